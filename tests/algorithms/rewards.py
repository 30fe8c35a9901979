"""Reward functions for the tests: one that is smooth, one that breaks."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from nemo_like.environments.reward import RewardSample


def digit_share(sample: RewardSample) -> float:
    """Share of characters that are digits: differs within nearly every group, so every step has a
    gradient.
    """
    return sum(character.isdigit() for character in sample.completion) / max(
        len(sample.completion), 1
    )


def digit_share_of_even_prompts(sample: RewardSample) -> float:
    """As `digit_share` for the prompt `n+n` with an even n; 1 for all others."""
    return 1.0 if int(sample.prompt.split("+")[0]) % 2 else digit_share(sample)


def share_of_even_tokens(sample: RewardSample) -> float:
    """Differs within nearly every group; needs the columns of the row and its images."""
    num_images = len(sample.row.get("images", ()))
    if (
        sample.row["extra"] != int(sample.answer or "")
        or sample.prompt.count("<image>") != num_images
    ):
        raise ValueError(f"the row is {sample.row}, with the prompt {sample.prompt!r}")
    ids = sample.completion_ids
    return sum(int(each) % 2 == 0 for each in ids) / max(len(ids), 1)


def broken(sample: RewardSample) -> float:
    raise KeyError("no such key in the verifier")


_num_calls = 0


def broken_sometimes(sample: RewardSample) -> float:
    """As `digit_share`; every eighth call raises."""
    global _num_calls
    _num_calls += 1
    if _num_calls % 8 == 0:
        raise KeyError("no such key in the verifier")
    return digit_share(sample)


def slow_digit_share(sample: RewardSample, log: str, num_quick: int) -> float:
    """As `digit_share`, after the first calls in 0.15 s. Each call appends a character to the file
    `log`.
    """
    with Path(log).open("a") as file:
        file.write(".")
        num_calls = file.tell()
    if num_calls > num_quick:
        time.sleep(0.15)
    return digit_share(sample)


def close_terminal_once(sample: RewardSample) -> float:
    """As `signal_once`; before the signal it closes the descriptor in TEST_TERMINAL."""
    terminal = os.environ.pop("TEST_TERMINAL", None)
    if terminal is not None:
        os.close(int(terminal))
    return signal_once(sample)


_pending: list[tuple[Path, Callable[[], None]]] = []


def after_first_step(run: Path, action: Callable[[], None]) -> None:
    """Have `acting_digit_share` call `action` once the metrics of `run` have a step."""
    _pending[:] = [(run / "metrics.jsonl", action)]


def acting_digit_share(sample: RewardSample) -> float:
    """As `digit_share`; see `after_first_step`."""
    if _pending and _pending[0][0].exists() and '"step": 1' in _pending[0][0].read_text():
        _, action = _pending.pop()
        action()
    return digit_share(sample)


def signal_once(sample: RewardSample) -> float:
    """As `digit_share`; at its first call it sends this process the signal named by TEST_SIGNAL."""
    name = os.environ.pop("TEST_SIGNAL", None)
    if name is not None:
        os.kill(os.getpid(), signal.Signals[name])
    return digit_share(sample)


def always_one(sample: RewardSample) -> float:
    """The same value for every completion, so that no group has a spread."""
    return 1.0
