"""A seccomp filter: the system calls that a program in the sandbox may not use.

The filter refuses by name, with the error "operation not permitted": sockets other than pairs,
tracing, signals and limits of other processes, namespaces and mounts, kernel objects that outlive
the program or do not count for its memory limit, and the administration of the machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

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
