"""Linux calls that the standard library lacks, and the descendants of a process.

The supervisor imports this module at the start of every program, so it imports little.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY = 1
_ATTR_NOSUID = 2
_ATTR_NODEV = 4

SIGKILL = 9
SIGSTOP = 19
SIGXCPU = 24
_SIGINT = 2
_SIGPIPE = 13
_SIGXFSZ = 25
_SIG_DFL = 0
_SIG_IGN = 1

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_END_LIMIT_S = 20.0
"""Max seconds until all descendants of a process have ended when they are killed."""

_MACHINE = os.uname().machine
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_ADD_RULE = 445
_LANDLOCK_RESTRICT_SELF = 446
_CAPABILITY_VERSION = 0x20080522

_LANDLOCK_EXECUTE = 1 << 0
_LANDLOCK_WRITE_FILE = 1 << 1
_LANDLOCK_READ_FILE = 1 << 2
_LANDLOCK_READ_DIR = 1 << 3
_LANDLOCK_TRUNCATE = 1 << 14
_LANDLOCK_FILE_RIGHTS = (
    _LANDLOCK_EXECUTE | _LANDLOCK_WRITE_FILE | _LANDLOCK_READ_FILE | _LANDLOCK_TRUNCATE | 1 << 15
)
_LANDLOCK_RIGHTS_OF_ABI = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process that has one argument. Raises OSError."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of user cancels it."""
    prctl(_PR_SET_PDEATHSIG, SIGKILL)


def ignore_interrupts() -> None:
    """Ignore SIGINT, for which Python has a handler."""
    # The module signal takes long to import.
    _libc.signal(_SIGINT, ctypes.c_void_p(_SIG_IGN))


def restore_signals() -> None:
    """Restore the default action of the signals that Python handles or ignores."""
    for number in (_SIGINT, _SIGPIPE, _SIGXFSZ):
        _libc.signal(number, ctypes.c_void_p(_SIG_DFL))


def set_dumpable(*, enabled: bool) -> None:
    """Allow or refuse other processes of the user to trace this one and read its memory."""
    prctl(_PR_SET_DUMPABLE, int(enabled))


def set_no_new_privileges() -> None:
    """Have execve ignore set-user-id bits and file capabilities, in all descendants as well."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def unshare(flags: int) -> None:
    """Enter new namespaces. Raises OSError."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """Add a file system at `target`, or change what is there. Raises OSError."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    options = None if data is None else data.encode()
    code = _libc.mount(*arguments, ctypes.c_ulong(flags), options)
    _check(code, f"mount {source or ''} on {target}")


def make_read_only(target: str) -> None:
    """Make a mount and the mounts below it read-only. Raises OSError before Linux 5.12."""
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    path = os.fsencode(target)
    code = _syscall(_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, request, len(request))
    _check(code, f"mount_setattr({target})")


def change_root(path: str) -> None:
    """Make `path`, a mount, the root directory, and detach the previous root. Raises OSError."""
    os.chdir(path)
    # The old root is mounted over the new one, and detached from there.
    _check(_syscall(_PIVOT_ROOT[_MACHINE], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up all capabilities of this process. Raises OSError."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_syscall(_CAPSET[_MACHINE], header, bytes(24)), "capset")


def change_user(user_id: int) -> None:
    """Change all user and group ids, and leave supplementary groups. Raises OSError."""
    os.setgroups([])
    os.setresgid(user_id, user_id, user_id)
    os.setresuid(user_id, user_id, user_id)


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel supports. Raises OSError if it has none."""
    version = _syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    _check(version, "landlock_create_ruleset")
    return version


def landlock_restrict(read_only: list[str], writable: list[str]) -> None:
    """Allow this process only to read and execute `read_only`, and to use `writable` freely.

    Both are files or directories. TCP is refused as well, and signals to processes outside, where
    the kernel's version of Landlock can. Raises OSError. Call `set_no_new_privileges` before.
    """
    abi = landlock_abi()
    rights = 0
    for version, bits in _LANDLOCK_RIGHTS_OF_ABI:
        if abi >= version:
            rights |= bits
    attributes = struct.pack("=Q", rights)
    if abi >= 4:
        attributes += struct.pack("=Q", 0b11)
    if abi >= 6:
        attributes += struct.pack("=Q", 0b11)
    ruleset = _syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    _check(ruleset, "landlock_create_ruleset")
    readable = _LANDLOCK_EXECUTE | _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR
    for path in read_only:
        _landlock_allow(ruleset, path, readable)
    for path in writable:
        _landlock_allow(ruleset, path, rights)
    _check(_syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _landlock_allow(ruleset: int, path: str, rights: int) -> None:
    try:
        directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _LANDLOCK_FILE_RIGHTS
        rule = struct.pack("=Qi", rights, directory)
        _check(_syscall(_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule({path})")
    finally:
        os.close(directory)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    converted = []
    for argument in arguments:
        if isinstance(argument, int):
            converted.append(ctypes.c_long(argument))
        else:
            converted.append(ctypes.c_char_p(argument))
    return _libc.syscall(ctypes.c_long(number), *converted)


def _check(code: int, call: str) -> None:
    """Raise OSError with the name of the call if its return value is negative."""
    if code < 0:
        number = ctypes.get_errno()
        name = errno.errorcode.get(number, str(number))
        raise OSError(number, f"{call}: {name} ({os.strerror(number)})")


def descendants(pid: int) -> list[int]:
    """Return the process ids of the living descendants of `pid`, zombies included."""
    found: list[int] = []
    open_ids = [pid]
    while open_ids:
        children = _children(open_ids.pop())
        found += children
        open_ids += children
    return found


def resident_bytes(pids: list[int]) -> int:
    """Return the sum of the resident memory of processes; ended ones count 0."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return total * _PAGE_BYTES


def num_tasks(user_id: int) -> int:
    """Return the number of processes and threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == user_id:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            # It ended meanwhile.
            continue
    return count


def has_children_after(seconds: float) -> bool:
    """Return True if this process has children after waiting this long for their end.

    Orphaned descendants are children of a subreaper, and of the first process of a PID namespace.
    """
    deadline = time.monotonic() + seconds
    while _reap():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.005)
    return False


def end_descendants() -> None:
    """Kill all descendants of this process, a subreaper, and wait for their end.

    They are stopped first: a process that forks faster than its children are killed would not be
    caught otherwise. Stopped processes still count towards the limit of processes, so a pass finds
    no new ones in the end. Raises TimeoutError if one does not end.
    """
    deadline = time.monotonic() + _END_LIMIT_S
    me = os.getpid()
    while True:
        stopped: set[int] = set()
        while new := set(descendants(me)) - stopped:
            for pid in new:
                _send(pid, SIGSTOP)
            stopped |= new
        for pid in stopped:
            _send(pid, SIGKILL)
        if not _reap():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(descendants(me))} did not end when killed")
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    children = []
    try:
        # A child belongs to the thread that forked it.
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children += [int(child) for child in file.read().split()]
    except OSError:
        # It ended meanwhile; the subreaper is the parent of its children now.
        pass
    return children


def _reap() -> bool:
    """Collect ended children; return True if there are others."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It ended meanwhile.
        return
