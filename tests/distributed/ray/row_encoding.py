"""The encoding of the tests of Ray Data, which actors import by the name of this module."""

from __future__ import annotations

from functools import partial
from typing import Any

from nemo_like.data.encoded_rows import encode_row
from tests.data.echo_encoding import encode


def open_encode(setup: dict[str, Any]) -> Any:
    if "missing" in setup:
        raise OSError(f"there is no {setup['missing']}")
    return partial(encode_row, encode)
