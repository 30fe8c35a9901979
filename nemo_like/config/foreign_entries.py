"""Types of the entries in the tables of other tools' keys; one entry per dotted key or section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OFF_SWITCHES = ("enabled", "enable")


@dataclass(frozen=True, slots=True)
class Renamed:
    """The key has another name here.

    Example: `Renamed(("grpo.advantage.normalize",), {"true": "group_std", "false": "none"})`.
    """

    targets: tuple[str, ...]
    """Keys of the schema; those that the job does not have are ignored. Several targets take the
    items of a list.
    """
    values: Mapping[str, str | None] | None = None
    """Canonical old value -> new value, None where the default has the same effect; None if values
    stay as they are.
    """
    note: str = ""
    """A further change of the value, or the reason why values not in `values` have no counterpart.
    """
    switch: str | None = None
    """A foreign key that must be on, or this one has no effect."""
    unless: str | None = None
    """A foreign key that must be off, or this one has no effect."""
    null: str = ""
    """Why null is not the same as leaving the key out; empty if it is."""
    sft: str | None = None
    """The key for SFT configs where it differs."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The key, or the section and all that is below it and not in the table, has no counterpart."""

    reason: str
    off: tuple[str, ...] = ("false",)
    """Canonical values with which the key can be deleted without any effect."""


@dataclass(frozen=True, slots=True)
class Obsolete:
    """The key or section has no meaning here; without it the run is the same."""


Entry = Renamed | Unsupported | Obsolete


def canonical(value: Any) -> str:
    """Return a value in the notation of the tables.

    Examples: True -> `true`, `0.0` -> `0`, `GRPO` -> `grpo`.
    """
    if value is None:
        return "null"
    text = str(value).strip().lower()
    try:
        # 0.0, 0 and `0` are one value of a table.
        return f"{float(text):g}"
    except ValueError:
        return text


def is_off(value: Any) -> bool:
    """Return True for null, an empty value, and a section that is switched off."""
    # Such a section has no effect, whatever else is in it.
    if isinstance(value, Mapping) and any(value.get(name) is False for name in _OFF_SWITCHES):
        return True
    is_empty = isinstance(value, Mapping | list | str) and not value
    return value is None or is_empty


def are_all_off(value: Any, off: tuple[str, ...]) -> bool:
    """Return True if the value, or every value in it, is one of `off` or null."""
    if isinstance(value, Mapping):
        return all(is_off(inner) or are_all_off(inner, off) for inner in value.values())
    return is_off(value) or canonical(value) in off


def to(
    *targets: str,
    values: Mapping[str, str | None] | None = None,
    note: str = "",
    switch: str | None = None,
    unless: str | None = None,
    null: str = "",
    sft: str | None = None,
) -> Renamed:
    """Return a `Renamed` with its targets as arguments."""
    return Renamed(targets, values, note, switch, unless, null, sft)


def unsupported(reason: str, *paths: str, off: tuple[str, ...] = ("false",)) -> dict[str, Entry]:
    """Return one `Unsupported` for several keys."""
    return dict.fromkeys(paths, Unsupported(reason, off))


def obsolete(*paths: str) -> dict[str, Entry]:
    """Return `Obsolete` for several keys."""
    return dict.fromkeys(paths, Obsolete())


# Reasons that several tables give, so that keys of one cause share one line of the message.
NO_CRITIC = "advantages come from groups of completions, not from a value model"
NO_OFFLOAD = "nothing is offloaded to the CPU"
REWARD = (
    "rewards are Python functions, named in reward.functions.<name>.path, and reward models, named"
    " in reward.models.<name>.model_name"
)
DATASET = (
    "training data is a file or hf://NAME?split=SPLIT in data.train_path; further sets have names"
    " in data.train_sets and weights in data.train_weights"
)
TOTAL_LENGTH = "policy.max_total_sequence_length limits prompt and completion together"
TRACKERS = (
    "trackers are chosen with logger.tensorboard, logger.wandb_project and logger.mlflow_experiment"
)
TRUST_CODE = "code that comes with a model is never run"
LAST_ROWS = (
    "the newest checkpoints are kept, and the best one by the metric that checkpointing.keep_best"
    " names"
)
KEEP_ALL = "null keeps all checkpoints; write a number in checkpointing.keep_latest"
WARMUP_RATIO = "write the number of steps in policy.scheduler.warmup_steps"
ONLY_ADAMW = "the optimizer is AdamW"
# One foreign key for several jobs; the targets that the job does not have are ignored.
_JOBS = ("grpo", "sft", "dpo", "rm", "distill")
STEPS = tuple(f"{job}.max_num_steps" for job in _JOBS)
EPOCHS = ("sft.max_num_epochs", "dpo.max_num_epochs", "rm.max_num_epochs")
VAL_PERIOD = tuple(f"{job}.val_period" for job in _JOBS)
VAL_AT_START = tuple(f"{job}.val_at_start" for job in _JOBS)
ADAMW = ("adamw", "adam", "torch.optim.adamw", "adamw_torch", "adamw_torch_fused")
OPTIMIZERS = {
    **dict.fromkeys(ADAMW, "adamw"),
    "muon": "muon",
    "torch.optim.muon": "muon",
    **dict.fromkeys(
        (
            "adamw_8bit",
            "adamw8bit",
            "adamw_bnb_8bit",
            "adamw_torch_8bit",
            "torchao.optim.adamw8bit",
            "bitsandbytes.optim.adamw8bit",
        ),
        "adamw_8bit",
    ),
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_restarts",
    "warmup_stable_decay": "wsd",
}
WSD_SHAPES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt", "minus_sqrt": "sqrt"}
RECOMPUTED = {"true": "full", "false": None}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
