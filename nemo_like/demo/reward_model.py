r"""Data and an untrained model for a reward model that drives GRPO; no network, no GPU.

A prompt is one digit, and a completion is any text of the tiny vocabulary. Its true reward, the
mean of its digits over 9 where other characters count 0, is known, so that one can see whether a
policy that is trained with the reward model alone becomes better:

    <user>4<assistant>9 8#7=9      true reward (9 + 8 + 7 + 9) / 9 / 7 = 0.52

Of two random completions of a prompt, the one with the higher true reward is chosen.

    python -m nemo_like.demo.reward_model
    nemo-like rm --config examples/configs/demo_rm.yaml
    nemo-like grpo --config examples/configs/demo_rm_grpo.yaml
"""

from __future__ import annotations

import random
import string
from pathlib import Path

from nemo_like.demo.task import build_main, build_model, build_tokenizer, write_rows
from nemo_like.environments.reward import RewardSample

NUM_PREFERENCES = 2_000
NUM_HELD_OUT = 500
NUM_GRPO_ROWS = 1_000
NUM_VALIDATION_ROWS = 50
MAX_CHARACTERS = 16
MIN_MARGIN = 0.05
"""Least difference of the true rewards of a pair."""

_CHARACTERS = string.digits + "+=# \n"


def build_preferences(directory: Path, seed: int) -> None:
    """Write the untrained model and the data, the same for the same seed.

    `model/` is a Hugging Face directory, from which both the reward model and the policy start.
    `preferences_train.jsonl` and `preferences_validation.jsonl` have prompt, chosen and rejected;
    `prompts_train.jsonl` and `prompts_validation.jsonl` have prompts.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = _preferences(rng, NUM_PREFERENCES + NUM_HELD_OUT)
    prompts = [{"prompt": _prompt(rng)} for _ in range(NUM_GRPO_ROWS + NUM_VALIDATION_ROWS)]
    write_rows(directory / "preferences_train.jsonl", pairs[:NUM_PREFERENCES])
    write_rows(directory / "preferences_validation.jsonl", pairs[NUM_PREFERENCES:])
    write_rows(directory / "prompts_train.jsonl", prompts[:NUM_GRPO_ROWS])
    write_rows(directory / "prompts_validation.jsonl", prompts[NUM_GRPO_ROWS:])
    build_tokenizer().save_pretrained(directory / "model")
    build_model(seed).save_pretrained(directory / "model")


def true_reward(sample: RewardSample) -> float:
    """Return the true reward of a completion, for `reward.functions` with weight 0."""
    return mean_digit(sample.completion)


def mean_digit(text: str) -> float:
    """Return the mean of the digits of `text` over 9, where other characters count 0."""
    total = sum(int(character) for character in text if character in string.digits)
    return total / (9 * max(len(text), 1))


def _preferences(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Return different pairs of completions whose true rewards differ by at least `MIN_MARGIN`."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    while len(pairs) < count:
        first = _completion(rng)
        second = _completion(rng)
        chosen, rejected = sorted((first, second), key=mean_digit, reverse=True)
        if mean_digit(chosen) - mean_digit(rejected) >= MIN_MARGIN:
            pair = {"prompt": _prompt(rng), "chosen": chosen, "rejected": rejected}
            pairs.setdefault((chosen, rejected), pair)
    return list(pairs.values())


def _prompt(rng: random.Random) -> str:
    return str(rng.randint(0, 9))


def _completion(rng: random.Random) -> str:
    """Return a text of random length; the share of digits differs between texts."""
    # Without this all texts would have nearly the same true reward, and the reward model would not
    # know texts like a trained policy's.
    digits = string.digits[rng.randint(0, 9) :]
    share = rng.random()
    characters = []
    for _ in range(rng.randint(1, MAX_CHARACTERS)):
        alphabet = digits if rng.random() < share else _CHARACTERS
        characters.append(rng.choice(alphabet))
    return "".join(characters)


if __name__ == "__main__":
    build_main("preferences, prompts and a tiny model", build_preferences, "demo_reward_model")
