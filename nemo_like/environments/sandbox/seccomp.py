"""A seccomp filter: the system calls that a program in the sandbox may not use.

The filter refuses by name, with the error "operation not permitted": sockets other than pairs,
tracing, signals and limits of other processes, namespaces and mounts, kernel objects that outlive
the program or are no part of its memory limit, and the administration of the machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# name: (number on x86_64, number on aarch64); numbers from 424 on are equal.
_REFUSED = {
    # networks
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # memory and objects that are not part of a process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # interfaces of the kernel that avoid this filter, or are large
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
_ATTRIBUTES = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
"""Refused without a mount namespace: Landlock does not restrict modes, owners and times of files,
and a program of the user could change those of the user's files."""
_OWN_PROCESS_ONLY = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
"""The first argument must be 0 or the program itself."""
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
"""The same without a PID namespace, where other processes of the user are visible. With one, the
first argument must not be 1, the first process of the namespace, which waits for the program."""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
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
    refused = [numbers[column] for numbers in _REFUSED.values()]
    if not has_namespaces:
        refused += [number for each in _ATTRIBUTES.values() if (number := each[column]) is not None]
    for number in refused:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    # The C library uses clone if clone3 does not exist; its flags are not readable by a filter.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    program += _refuse_argument(_CLONE[column], 0, (_NAMESPACE_FLAGS,), _ANY_BIT)
    program += _refuse_argument(_FCNTL[column], 1, _REFUSED_FCNTL, _EQUAL)
    program += _refuse_argument(_IOCTL[column], 1, _REFUSED_IOCTL, _EQUAL)
    for numbers in _OWN_PROCESS_ONLY.values():
        program += _require_argument(numbers[column], 0, (0, pid))
    for numbers in _SIGNALS.values():
        if has_namespaces:
            program += _refuse_argument(numbers[column], 0, (1,), _EQUAL)
        else:
            program += _require_argument(numbers[column], 0, (0, pid))
    program.append((_RETURN, 0, 0, _ALLOW))
    return program


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
