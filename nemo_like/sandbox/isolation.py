"""Isolation of a program: namespaces with a root directory of their own, or Landlock.

Every function changes the calling process and is called in a process that ends with the program.
"""

from __future__ import annotations

import os
import resource

from nemo_like.sandbox import linux
from nemo_like.sandbox.seccomp import install_filter

SCRATCH = "/scratch"
"""The scratch directory in a root directory of its own."""
_INNER_USER = 1000
"""User in a user namespace. Not 0, so that the program gets no capabilities."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MAX_SCRATCH_FILES = 4096


def enter_pid_namespace(user_id: int | None) -> bool:
    """Have the next child process start a PID namespace. Raises OSError.

    Returns True if this process stays root, which changes its user later. Otherwise it enters a
    user namespace: one without the right to make namespaces may do so there. `user_id` is the user
    to change to if this process is root; None if it is not.
    """
    if user_id is not None:
        try:
            linux.unshare(linux.CLONE_NEWPID)
        except OSError:
            linux.change_user(user_id)
            # The files below /proc/self belong to root otherwise.
            linux.set_dumpable(enabled=True)
        else:
            return True
    user = os.geteuid()
    group = os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INNER_USER} {user} 1")
    _write("/proc/self/gid_map", f"{_INNER_USER} {group} 1")
    linux.unshare(linux.CLONE_NEWPID)
    return False


def enter_root(
    root: str,
    read_only: list[str],
    scratch_mb: int,
    owner: int | None,
    *,
    has_network_namespace: bool,
) -> None:
    """Make the empty directory `root` the root directory of this process. Raises OSError.

    It has the `read_only` files and directories at their paths, a few devices and an empty
    scratch directory in memory, which belongs to the user `owner`. Only processes of this mount
    namespace see its content, which is gone with the last of them.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    if has_network_namespace:
        linux.unshare(linux.CLONE_NEWNET)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", root, "tmpfs", flags, "size=1m,nr_inodes=4096,mode=755")
    for path in read_only:
        _bind(path, root)
    os.mkdir(f"{root}/dev")
    for name in _DEVICES:
        _bind(f"/dev/{name}", root, has_devices=True)
    scratch = root + SCRATCH
    os.mkdir(scratch)
    options = f"size={scratch_mb}m,nr_inodes={_MAX_SCRATCH_FILES},mode=700"
    linux.mount("tmpfs", scratch, "tmpfs", flags, options)
    if owner is not None:
        os.chown(scratch, owner, owner)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(SCRATCH[1:], f"{root}/tmp")
    linux.mount(None, root, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | flags)
    linux.change_root(root)


def lower_limit(kind: int, soft: int, hard: int) -> None:
    """Set a resource limit of this process, but not above its present one."""
    present = resource.getrlimit(kind)[1]
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(kind, (soft, hard))


def apply_limits(limits: dict[str, int | float], num_other_tasks: int) -> None:
    """Set the resource limits of this process, which its descendants inherit.

    `num_other_tasks` is the number of processes and threads of its user that are not the
    program's, because the kernel counts them as well.
    """
    memory = int(limits["memory_mb"]) << 20
    files = int(limits["scratch_mb"]) << 20
    cpu = max(1, round(limits["cpu_s"]))
    num_tasks = int(limits["max_processes"]) + num_other_tasks
    for name, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_AS, memory, memory),
        # SIGXCPU at the soft limit, and SIGKILL one second later.
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, files, files),
        (resource.RLIMIT_NPROC, num_tasks, num_tasks),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_RTPRIO, 0, 0),
        (resource.RLIMIT_NOFILE, int(limits["max_open_files"]), int(limits["max_open_files"])),
    ):
        lower_limit(name, soft, hard)


def restrict(mechanisms: list[str], read_only: list[str], scratch: str) -> None:
    """Apply Landlock and seccomp to this process, as far as `mechanisms` names them."""
    linux.set_no_new_privileges()
    if "landlock" in mechanisms and "namespaces" not in mechanisms:
        devices = [f"/dev/{name}" for name in _DEVICES]
        linux.landlock_restrict(read_only + devices[1:], [scratch, devices[0]])
    if "seccomp" in mechanisms:
        install_filter(has_namespaces="namespaces" in mechanisms)


def _bind(path: str, root: str, *, has_devices: bool = False) -> None:
    """Show a file or directory, with what is mounted below it, read-only under `root`."""
    target = root + path
    if not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        # For example /lib, a link to usr/lib.
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
    if not has_devices:
        linux.make_read_only(target)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
