"""Data and an untrained model for the included environments; no network, no GPU.

The calculator: a problem is `37*24`. Two in five of the supervised conversations call the tool and
repeat its value, the others answer at once:

    <user>37*24<assistant><tool>37*24</tool><user>888<assistant>#### 888

A model this small cannot multiply, so after SFT most of its direct answers are wrong. GRPO with the
calculator increases the share of conversations that call the tool.

The guessing game: the prompt `1-16` has the bounds of a number, and the supervised
conversations guess within what is still possible, but not in the middle of it.

    python -m nemo_like.demo.environments
"""

from __future__ import annotations

import random
import string
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nemo_like.demo.task import build_main, build_model, build_tokenizer, write_rows

NUM_SFT_ROWS = 16_000
NUM_GRPO_ROWS = 4_000
NUM_VALIDATION_ROWS = 128
CALL_SHARE = 0.4
"""Share of the supervised problems whose conversation calls the tool."""
GAME_SHARE = 0.3
"""Share of the supervised conversations that are games."""
MAX_GUESS = 16

_CHARACTERS = string.digits + string.ascii_lowercase + "+-*/=#: \n"
_TOOL_TEXTS = ("<tool>", "</tool>")


def build_environments(directory: Path, seed: int) -> None:
    """Write the untrained model and the data, the same for the same seed.

    `model/` is a Hugging Face directory. `sft_train.jsonl` has conversations; `calculator_*.jsonl`
    and `guessing_*.jsonl` have prompt and answer, for training and for validation. No validation
    problem of the calculator is in the training data.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    validation = [_problem(rng) for _ in range(NUM_VALIDATION_ROWS)]
    excluded = {row["prompt"] for row in validation}
    problems = [_problem(rng, excluded) for _ in range(NUM_GRPO_ROWS)]
    conversations = []
    for _ in range(NUM_SFT_ROWS):
        if rng.random() < GAME_SHARE:
            messages = _game(rng)
        else:
            messages = _calculation(_problem(rng, excluded), calls=rng.random() < CALL_SHARE)
        conversations.append({"messages": messages})
    numbers = list(range(1, MAX_GUESS + 1))
    games = [{"prompt": f"1-{MAX_GUESS}", "answer": str(number)} for number in numbers]
    write_rows(directory / "sft_train.jsonl", conversations)
    write_rows(directory / "calculator_train.jsonl", problems)
    write_rows(directory / "calculator_validation.jsonl", validation)
    write_rows(directory / "guessing_train.jsonl", games * 64)
    write_rows(directory / "guessing_validation.jsonl", games)
    tokenizer = build_tokenizer(_CHARACTERS, _TOOL_TEXTS)
    tokenizer.save_pretrained(directory / "model")
    build_model(seed, len(tokenizer)).save_pretrained(directory / "model")


def _problem(rng: random.Random, excluded: Collection[str] = ()) -> dict[str, str]:
    """Draw a product of two numbers of two digits whose prompt is not excluded."""
    while True:
        left = rng.randint(10, 99)
        right = rng.randint(10, 99)
        prompt = f"{left}*{right}"
        if prompt not in excluded:
            return {"prompt": prompt, "answer": str(left * right)}


def _calculation(problem: dict[str, str], *, calls: bool) -> list[dict[str, str]]:
    """Return a conversation that answers a problem, with a call of the tool if `calls`."""
    messages = [_user(problem["prompt"])]
    if calls:
        messages.append(_assistant(f"<tool>{problem['prompt']}</tool>"))
        messages.append(_user(problem["answer"]))
    messages.append(_assistant(f"#### {problem['answer']}"))
    return messages


def _game(rng: random.Random) -> list[dict[str, str]]:
    """Return a game that ends with the number, with guesses at random among the possible ones."""
    number = rng.randint(1, MAX_GUESS)
    low = 1
    high = MAX_GUESS
    messages = [_user(f"1-{MAX_GUESS}")]
    while True:
        guess = rng.randint(low, high)
        messages.append(_assistant(str(guess)))
        if guess == number:
            return messages
        if guess < number:
            low = guess + 1
            messages.append(_user("higher"))
        else:
            high = guess - 1
            messages.append(_user("lower"))


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


if __name__ == "__main__":
    build_main("data and a tiny model for environments", build_environments, "demo_environments")
