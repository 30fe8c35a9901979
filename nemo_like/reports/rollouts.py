"""Recorded rollouts for a page: some steps, some rows of each, and the tokens of these rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import model_directory
from nemo_like.data.jagged import Jagged
from nemo_like.reports.run_files import RunFiles
from nemo_like.rollout.records import ENGINE_LOGPROBS, RolloutRecord
from nemo_like.run.files import read_json_lines

_NUM_STEPS = 4
"""Steps that are shown, and as many again with token ids."""
_NUM_ROWS = 6
_MAX_CHARACTERS = 6000
_MAX_TOKENS = 400
"""Tokens of a row that are shown one by one."""
Decode = Callable[[list[int]], str]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Token:
    """A piece of text: one token, or the tokens of one character."""

    text: str
    is_trained: bool
    advantage: float = 0.0
    difference: float = 0.0
    """Absolute difference of the log-probs of training engine and generator; the largest, if the
    piece has several tokens."""


@dataclass(frozen=True)
class Row:
    """One completion."""

    reward: float
    notes: dict[str, str]
    turns: Sequence[tuple[str, str]]
    """(role, text) of each message."""
    tokens: Sequence[Token]
    num_left_out: int
    """Tokens after `tokens`."""


@dataclass(frozen=True)
class Step:
    """The rows of a step, highest reward first."""

    number: int
    num_rows: int
    mean_reward: float
    rows: Sequence[Row]
    max_advantage: float
    max_difference: float


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of a run that its page shows."""

    steps: Sequence[Step]
    has_tokens: bool
    problem: str = ""
    """Why token texts are missing."""


def read_rollouts(run: RunFiles) -> Rollouts:
    """Read a selection of the recorded rollouts of a run."""
    with_tokens = spread(run.token_steps, _NUM_STEPS)
    chosen = sorted({*spread(run.rollout_steps, _NUM_STEPS), *with_tokens})
    decode = None
    problem = "token ids of no step are recorded (logger.keep_rollout_tokens)"
    if with_tokens:
        decode, problem = open_decoder(run)
    steps = [_read_step(run, number, decode) for number in chosen]
    shown = [step for step in steps if step.rows]
    has_tokens = any(row.tokens for step in shown for row in step.rows)
    return Rollouts(shown, has_tokens, "" if has_tokens else problem)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return at most `count` items at equal distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[int(index)] for index in np.linspace(0, len(items) - 1, count).round()]


def open_decoder(run: RunFiles) -> tuple[Decode | None, str]:
    """Return what decodes token ids, or None and the reason."""
    from tokenizers import Tokenizer

    name = run.config.get("policy.tokenizer_name") or run.config.get("policy.model_name")
    try:
        folder = run.directory.hf
        if not (folder / "tokenizer.json").is_file():
            folder = Path(model_directory("policy.tokenizer_name", str(name), weights=False))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises Exception itself for a file that it cannot use.
    except (ConfigError, Exception) as error:  # noqa: BLE001
        return None, f"the tokenizer of {name} cannot be loaded: {error}"
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False), ""


def _read_step(run: RunFiles, number: int, decode: Decode | None) -> Step:
    records = list(read_json_lines(run.directory.rollouts(number)))
    rewards = np.array([float(record["reward"]) for record in records])
    path = run.directory.rollout_tokens(number)
    columns = _token_columns(path) if decode is not None and path.is_file() else {}
    rows = []
    # Highest first; equal rewards stay in the order of the batch.
    for index in spread(np.argsort(-rewards, kind="stable").tolist(), _NUM_ROWS):
        tokens: list[Token] = []
        # A group that dynamic sampling dropped has no tokens in the batch.
        if columns and decode is not None and records[index].get("kept", True):
            tokens = _tokens(columns, index, decode)
        left_out = max(len(tokens) - _MAX_TOKENS, 0)
        notes, turns = _notes(records[index]), _turns(records[index])
        rows.append(Row(float(rewards[index]), notes, turns, tokens[:_MAX_TOKENS], left_out))
    largest = {name: float(np.abs(each.values).max(initial=0)) for name, each in columns.items()}
    return Step(
        number=number,
        num_rows=len(records),
        mean_reward=float(rewards.mean()) if len(rewards) else 0.0,
        rows=rows,
        max_advantage=largest.get("advantages", 0.0),
        max_difference=largest.get("differences", 0.0),
    )


def _token_columns(path: Path) -> dict[str, Jagged]:
    """Return ids, mask, and advantages and differences of trained tokens, Jagged [T] each."""
    columns = RolloutRecord.load(path).columns
    ids, mask, generation = (
        columns[name] for name in ("input_ids", "token_mask", "generation_logprobs")
    )
    assert isinstance(ids, Jagged) and isinstance(mask, Jagged) and isinstance(generation, Jagged)
    trained = mask.values.astype(bool)
    advantages = columns["advantages"]
    if not isinstance(advantages, Jagged):
        advantages = Jagged(np.repeat(advantages, mask.lengths), mask.offsets)
    differences = np.zeros(len(trained))
    engine = next((columns[name] for name in ENGINE_LOGPROBS if name in columns), None)
    if isinstance(engine, Jagged):
        differences = np.nan_to_num(np.abs(engine.values - generation.values))
    return {
        "ids": ids,
        "trained": Jagged(trained, mask.offsets),
        "advantages": Jagged(np.where(trained, advantages.values, 0.0), mask.offsets),
        "differences": Jagged(np.where(trained, differences, 0.0), mask.offsets),
    }


def _tokens(columns: dict[str, Jagged], row: int, decode: Decode) -> list[Token]:
    """Return the tokens of a row of the batch."""
    ids = columns["ids"][row].tolist()
    trained, advantages, differences = (
        columns[name][row] for name in ("trained", "advantages", "differences")
    )
    tokens = []
    start = 0
    for stop in range(1, len(ids) + 1):
        text = decode(ids[start:stop])
        # The tokens of one character decode to a replacement character until the last.
        ends = stop == len(ids) or stop - start >= 4 or trained[stop] != trained[start]
        if ends or not text.endswith("\ufffd"):
            difference = float(differences[start:stop].max())
            tokens.append(Token(text, bool(trained[start]), float(advantages[start]), difference))
            start = stop
    return tokens


def _notes(record: dict[str, Any]) -> dict[str, str]:
    """Return label -> value of what is known of a row besides its text."""
    notes = {}
    for name, value in record.items():
        if name.startswith("reward_"):
            notes[name.removeprefix("reward_")] = _shown(value)
    for name in ("calls", "turn_rewards"):
        if name in record:
            notes[name.replace("_", " ")] = " ".join(f"{each:.4g}" for each in record[name])
    names = (
        "status",
        "advantage",
        "answer",
        "completion_tokens",
        "finish_reason",
        "ended_by",
        "error",
    )
    for name in (*names, "logprob_difference_max", "source"):
        if record.get(name) is not None:
            notes[name.replace("_", " ")] = _shown(record[name])
    return notes


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _turns(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (role, text) of each message, or of prompt and completion."""
    turns = [("prompt", record["prompt"]), ("completion", record["completion"])]
    if "segments" in record:
        roles = itertools.cycle(("given", "assistant"))
        turns = list(zip(roles, record["segments"], strict=False))
    if "messages" in record:
        turns = [(each["role"], each.get("content") or "") for each in record["messages"]]
    return [(str(role), _limited(str(text))) for role, text in turns]


def _limited(text: str) -> str:
    left_out = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}… ({left_out:,} more characters)" if left_out > 0 else text
