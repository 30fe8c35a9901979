"""Isolation of a program: namespaces with a root directory of their own, or Landlock, and seccomp.

Every function changes the calling process and is called in a process that ends with the program.

The seccomp filter refuses system calls by name, with the error "operation not permitted": sockets
other than pairs of streams, tracing, signals and limits of other processes, namespaces and mounts,
kernel objects that outlive the program or do not count for its memory limit, and the administration
of the machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import time

from nemo_like.environments.sandbox import linux

TYPE_CHECKING = False  # The module typing takes long to import.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SCRATCH = "/scratch"
"""The scratch directory in the root directory of a program."""
_INNER_USER = 1000
"""User in a user namespace. Not 0, so that the program gets no capabilities."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MAX_SCRATCH_FILES = 4096
_MAX_DISK_ENTRIES = 1024
"""Files and directories without a mount namespace. They are on a disk, where the removal of one can
take milliseconds."""
_MAX_PENDING_SIGNALS = 64
"""The kernel counts POSIX timers as well."""
CLEAN_UP_S = 1.0
"""Seconds for which a caller waits for the removal of files; the rest is removed later."""
_INET = 2
_STREAM = 1

_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKETPAIR = (53, 199)
# SOCK_STREAM, with any of SOCK_NONBLOCK and SOCK_CLOEXEC. Datagram sockets can send to a path.
_SOCKETPAIR_TYPES = (0x1, 0x801, 0x80001, 0x80801)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
# A file can be set to send a signal to a process, or to its group.
_REFUSED_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
# The first two insert input into a terminal.
_REFUSED_IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
_NAMESPACE_FLAGS = 0x7E020000

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine: (index of its system call numbers, its number in the kernel's audit interface)."""
_X32_BIT = 0x40000000

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000

_NUMBER_OFFSET = 0
_ARCHITECTURE_OFFSET = 4
_ARGUMENTS_OFFSET = 16

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand)."""


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
        (resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS, _MAX_PENDING_SIGNALS),
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


def remove_scratch(path: str, limit_s: float = float("inf")) -> bool:
    """Remove a directory with its content; nothing else, whatever links it has.

    The program must have ended. Directories without permissions are removed, and nested ones of any
    depth. Does nothing if the directory does not exist. Returns False if a part is left after
    `limit_s`, which another call removes.
    """
    deadline = time.monotonic() + limit_s
    if not os.path.isdir(path) or os.path.islink(path):
        return True
    os.chmod(path, 0o700)
    while entries := list(os.scandir(path)):
        for entry in entries:
            if time.monotonic() > deadline:
                return False
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if time.monotonic() > deadline:
                    return False
                if not inner.is_dir(follow_symlinks=False):
                    os.unlink(inner.path)
                    continue
                # Moved up instead of entered: its path may be longer than the system allows.
                os.chmod(inner.path, 0o700)
                # The program cannot have made a random name.
                os.rename(inner.path, f"{path}/.moved-{os.urandom(16).hex()}")
            os.rmdir(entry.path)
    os.rmdir(path)
    return True


def size_bytes(path: str, max_bytes: int) -> int:
    """Return the size of the files below `path`; stops counting above `max_bytes`.

    Each file and directory counts at least 4 KiB. More than `_MAX_DISK_ENTRIES` of them exceed the
    limit, as does a directory that cannot be read, which would hide files. Works while the program
    runs.
    """
    total = 0
    num_entries = 0
    directories = [path]
    while directories and total <= max_bytes:
        try:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    total += 4096
                    num_entries += 1
                    if num_entries > _MAX_DISK_ENTRIES:
                        return max_bytes + 1
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > max_bytes:
                        break
        except FileNotFoundError:
            # Removed meanwhile.
            continue
        except OSError:
            return max_bytes + 1
    return total


def probe(request: dict[str, Any]) -> dict[str, str]:
    """Return why each mechanism is unavailable; an empty text if it is available.

    `namespaces`: user, PID, mount, IPC and UTS namespaces with a root directory of their own.
    `network`: a network namespace. `seccomp`, `landlock`. `user`: without namespaces, another user
    than root can run the interpreter. Each is tried in a separate process.
    """
    user_id = request["user_id"]
    trials: dict[str, Callable[[], None]] = {
        "namespaces": lambda: _try_namespaces(request),
        "network": lambda: _try_network(user_id),
        "seccomp": _try_seccomp,
        "landlock": _try_landlock,
        "user": lambda: _try_user(user_id, request["argv"][0]),
    }
    return {name: _problem(trial) for name, trial in trials.items()}


def _problem(trial: Callable[[], None]) -> str:
    """Run a trial in a forked process; return its exception as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trial()
        except BaseException as error:  # noqa: BLE001 (the text is the result)
            os.write(write, (str(error) or type(error).__name__).encode()[:500])
            os._exit(1)
        os._exit(0)
    os.close(write)
    _, code = os.waitpid(pid, 0)
    text = os.read(read, 500).decode("utf-8", "replace")
    os.close(read)
    if code != 0 and not text:
        text = f"a process that tried it ended with status {code}"
    return text


def _try_namespaces(request: dict[str, Any]) -> None:
    keeps_root = enter_pid_namespace(request["user_id"])
    problem = _problem(lambda: _try_root(request, keeps_root=keeps_root))
    if problem:
        raise OSError(problem)


def _try_root(request: dict[str, Any], *, keeps_root: bool) -> None:
    owner = request["user_id"] if keeps_root else None
    scratch = request["scratch"]
    enter_root(scratch, request["read_only"], 1, owner, has_network_namespace=False)
    if keeps_root:
        linux.change_user(request["user_id"])
    linux.drop_capabilities()
    if os.getpid() != 1:
        raise OSError("the PID namespace has no effect")
    if not os.access(request["argv"][0], os.X_OK):
        raise OSError(f"{request['argv'][0]} is not in the root directory of the program")
    with open(f"{SCRATCH}/file", "w", encoding="ascii") as file:
        file.write("x")


def _try_network(user_id: int | None) -> None:
    enter_pid_namespace(user_id)
    linux.unshare(linux.CLONE_NEWNET)


def _try_seccomp() -> None:
    linux.set_no_new_privileges()
    install_filter(has_namespaces=False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.socket(_INET, _STREAM, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        raise OSError("the filter has no effect")


def _try_landlock() -> None:
    linux.set_no_new_privileges()
    linux.landlock_restrict([], [])
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError("the rules have no effect")


def _try_user(user_id: int | None, python: str) -> None:
    if user_id is None:
        return
    linux.change_user(user_id)
    if not os.access(python, os.X_OK):
        raise OSError(f"only root can execute {python}")


def _read_calls() -> dict[str, list[tuple[str, str]]]:
    """Return the numbers of the system calls of each rule, on x86_64 and aarch64."""
    calls: dict[str, list[tuple[str, str]]] = {}
    path = os.path.join(os.path.dirname(__file__), "system_calls.txt")
    with open(path, encoding="ascii") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                rule, _, *numbers = line.split()
                calls.setdefault(rule, []).append((numbers[0], numbers[1]))
    return calls


_CALLS = _read_calls()
"""Read at the import: the root directory of a program does not have the file."""


def install_filter(*, has_namespaces: bool) -> None:
    """Install the filter for this process, which executes the program next.

    Without namespaces the program may signal itself only, and change no modes, owners and times of
    files. Call `set_no_new_privileges` before. Raises OSError where the kernel or a container
    refuses, and on other machines than x86_64 and aarch64.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {machine}")
    instructions = _filter(*_ARCHITECTURES[machine], os.getpid(), has_namespaces=has_namespaces)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the length, padding, and a pointer.
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_SECCOMP): {os.strerror(number)}")


def _filter(
    column: int, architecture: int, pid: int, *, has_namespaces: bool
) -> list[_Instruction]:
    """Return the instructions; `column` selects the system call numbers of the architecture."""
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, architecture),
        # A call with the numbers of another architecture (32 bits) would pass the filter.
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]
    refused = _CALLS["refused"] if has_namespaces else _CALLS["refused"] + _CALLS["attributes"]
    for number in _of_architecture(refused, column):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    # The C library uses clone if clone3 does not exist; its flags are not readable by a filter.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    program += _refuse_argument(_CLONE[column], 0, (_NAMESPACE_FLAGS,), _ANY_BIT)
    program += _require_argument(_SOCKETPAIR[column], 1, _SOCKETPAIR_TYPES)
    program += _refuse_argument(_FCNTL[column], 1, _REFUSED_FCNTL, _EQUAL)
    program += _refuse_argument(_IOCTL[column], 1, _REFUSED_IOCTL, _EQUAL)
    for number in _of_architecture(_CALLS["own_process"], column):
        program += _require_argument(number, 0, (0, pid))
    for number in _of_architecture(_CALLS["signals"], column):
        if has_namespaces:
            program += _refuse_argument(number, 0, (1,), _EQUAL)
        else:
            program += _require_argument(number, 0, (0, pid))
    program.append((_RETURN, 0, 0, _ALLOW))
    return program


def _of_architecture(calls: list[tuple[str, str]], column: int) -> list[int]:
    """Return the numbers of the calls that the architecture has."""
    return [int(numbers[column]) for numbers in calls if numbers[column] != "-"]


def _refuse_argument(
    number: int, index: int, values: tuple[int, ...], comparison: int
) -> list[_Instruction]:
    """Refuse a call whose argument `index` matches a value. Argument words are the low 32 bits."""
    checks: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index)]
    for value in values:
        checks += [(comparison, 0, 1, value), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    checks.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(checks), number), *checks]


def _require_argument(number: int, index: int, values: tuple[int, ...]) -> list[_Instruction]:
    """Refuse a call whose argument `index` matches none of the values."""
    checks: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index)]
    for value in values:
        checks += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    checks.append((_RETURN, 0, 0, _ERROR | errno.EPERM))
    return [(_EQUAL, 0, len(checks), number), *checks]
