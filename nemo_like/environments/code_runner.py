"""The program that tests a completion, inside the sandbox. Its source is executed there.

It uses the standard library only. File descriptor 4 has the number of bytes of the program as a
line, the program, and the tests as JSON; a line of JSON per test is written to 3. The tests are
read after the program was executed, which therefore cannot replace them as a side effect.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import traceback
from types import ModuleType
from typing import Any

_REPORT = 3
_MESSAGE = 4
_NAME = "solution.py"
_MAX_DEPTH = 50
_MAX_DECIMAL_BITS = 10_000
"""Python refuses to convert integers of more bits to decimal digits."""


def main() -> None:
    """Execute the program, then every test, and report each."""
    # Bound here, because the program may replace what the modules have.
    read, write, seek = os.read, os.write, os.lseek
    dumps, loads = json.dumps, json.loads
    set_trace, set_profile = sys.settrace, sys.setprofile
    evaluate, execute, build = eval, exec, compile
    program = _read_program(read)
    position = seek(_MESSAGE, 0, os.SEEK_CUR)
    # For the source lines of a traceback. `splitlines` would also split at form feeds.
    lines = [f"{line}\n" for line in program.split("\n")]
    linecache.cache[_NAME] = (len(program), None, lines, _NAME)
    module = ModuleType("program")
    sys.modules["program"] = module
    namespace = vars(module)
    try:
        execute(build(program, _NAME, "exec", dont_inherit=True), namespace)
    except BaseException as error:  # noqa: BLE001 (the program may raise anything)
        # Without the frame of this function.
        own_frame = error.__traceback__
        traceback.print_exception(error.with_traceback(own_frame and own_frame.tb_next))
        raise SystemExit(1) from None
    set_trace(None)
    set_profile(None)
    seek(_MESSAGE, position, os.SEEK_SET)
    tests = loads(_read_rest(read))
    for index, test in enumerate(tests):
        report: dict[str, Any] = {"test": index}
        try:
            kind = test["kind"]
            mode = "eval" if kind == "value" else "exec"
            code = build(test["source"], "tests.py", mode, dont_inherit=True)
            if kind == "value":
                report["value"] = literal(evaluate(code, namespace))
            else:
                execute(code, namespace)
                report["token"] = test["token"]
        except BaseException as error:  # noqa: BLE001 (the program may raise anything)
            report["error"] = f"{type(error).__name__}: {error}"[:500]
        write(_REPORT, dumps(report).encode() + b"\n")


def _read_program(read: Any) -> str:
    length = b""
    while not length.endswith(b"\n"):
        length += read(_MESSAGE, 1)
    text = b""
    while len(text) < int(length):
        text += read(_MESSAGE, int(length) - len(text))
    return text.decode("utf-8", "surrogatepass")


def _read_rest(read: Any) -> str:
    text = b""
    while part := read(_MESSAGE, 1 << 16):
        text += part
    return text.decode("utf-8")


def literal(value: Any, depth: int = 0) -> str:
    """Return plain data as a Python literal: numbers, texts, bytes and containers of them.

    Subclasses, such as a Counter, become their plain base. Raises TypeError for other objects, and
    ValueError for a nan, which is equal to nothing.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("the value is nested too deeply")
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        is_long = int.bit_length(value) > _MAX_DECIMAL_BITS
        return hex(value) if is_long else int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        if text == "nan":
            raise ValueError("the value is nan")
        return text.replace("inf", "1e999")
    if isinstance(value, complex):
        return complex.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, dict):
        pairs = []
        for key, item in dict.items(value):
            pairs.append(f"{literal(key, depth + 1)}: {literal(item, depth + 1)}")
        return "{" + ", ".join(pairs) + "}"
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"the value is a {type(value).__name__}, which is not plain data")
    items = [literal(item, depth + 1) for item in value]
    if isinstance(value, list):
        return "[" + ", ".join(items) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{item}, " for item in items) + ")"
    return "{" + ", ".join(items) + "}" if items else "set()"


if __name__ == "__main__":
    main()
