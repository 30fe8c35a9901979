"""Encodes plain values as bytes: the format between a caller and its supervisor.

It is as simple as JSON, whose module takes longer to import than the rest of the supervisor.
A value is a letter, its length in decimal digits, a colon and its content.
"""

from __future__ import annotations

TYPE_CHECKING = False  # The module typing takes long to import as well.
if TYPE_CHECKING:
    from typing import Any


def encode(value: Any) -> bytes:
    """Encode None, bool, int, float, str, lists, tuples and dicts of them.

    Tuples are decoded as lists. Raises TypeError for other types.
    """
    if value is None:
        return b"n0:"
    if isinstance(value, bool):
        return b"b1:%d" % value
    if isinstance(value, int):
        kind, content = b"i", b"%d" % value
    elif isinstance(value, float):
        kind, content = b"f", value.hex().encode("ascii")
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, list | tuple):
        kind, content = b"l", b"".join(map(encode, value))
    elif isinstance(value, dict):
        parts = []
        for key, item in value.items():
            parts += [encode(key), encode(item)]
        kind, content = b"d", b"".join(parts)
    else:
        raise TypeError(f"cannot encode a {type(value).__name__}")
    return kind + b"%d:" % len(content) + content


def decode(data: bytes) -> Any:
    """Decode one value. Raises ValueError for data that `encode` did not write."""
    value, end = _decode_at(data, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow the value")
    return value


def _decode_at(data: bytes, start: int) -> tuple[Any, int]:
    """Return the value at `start`, and the position after it."""
    colon = data.index(b":", start)
    kind = data[start : start + 1]
    begin = colon + 1
    end = begin + int(data[start + 1 : colon])
    if end > len(data):
        raise ValueError("the data is incomplete")
    content = data[begin:end]
    if kind == b"n":
        return None, end
    if kind == b"b":
        return content == b"1", end
    if kind == b"i":
        return int(content), end
    if kind == b"f":
        return float.fromhex(content.decode("ascii")), end
    if kind == b"s":
        return content.decode("utf-8", "surrogatepass"), end
    items = []
    position = begin
    while position < end:
        item, position = _decode_at(data, position)
        items.append(item)
    if kind == b"l":
        return items, end
    if kind == b"d":
        return dict(zip(items[::2], items[1::2], strict=True)), end
    raise ValueError(f"no value begins with {kind!r}")
