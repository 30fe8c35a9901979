"""An encoding for the tests: the text of a row as its characters' codes, and some ways to fail."""

from __future__ import annotations

import os
import time

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.row_files import Row


def encode(row: Row) -> EncodedRow | None:
    """`drop`, `bad`, `type`, `crash` and `slow` are special texts."""
    text = row["prompt"]
    if text == "drop":
        return None
    if text == "bad":
        raise ConfigError("this row is bad")
    if text == "type":
        raise TypeError("TextEncodeInput must be Union")
    if text == "crash":
        os._exit(7)
    if text == "slow":
        time.sleep(0.05)
        if path := os.environ.get("TEST_ENCODED"):
            with open(path, "a") as log:
                log.write(".")
    print("a library prints")
    codes = np.array([ord(letter) for letter in text], dtype=np.int32)
    return EncodedRow(codes, np.arange(len(codes)).astype(np.uint8))
