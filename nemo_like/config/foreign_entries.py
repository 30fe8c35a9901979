"""Types of the entries in the tables of other tools' keys; one entry per dotted key or section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


def to(
    *targets: str,
    values: Mapping[str, str | None] | None = None,
    note: str = "",
    switch: str | None = None,
    null: str = "",
    sft: str | None = None,
) -> Renamed:
    """Return a `Renamed` with its targets as arguments."""
    return Renamed(targets, values, note, switch, null, sft)


def unsupported(
    reason: str,
    *paths: str,
    off: tuple[str, ...] = ("false",),
) -> dict[str, Entry]:
    """Return one `Unsupported` for several keys."""
    return dict.fromkeys(paths, Unsupported(reason, off))


def obsolete(*paths: str) -> dict[str, Entry]:
    """Return `Obsolete` for several keys."""
    return dict.fromkeys(paths, Obsolete())


# Reasons that several tables give, so that keys of one cause share one line of the message.
NO_LORA = "there is no LoRA, all weights are trained"
NO_ENGINE = (
    "completions are sampled with the Hugging Face model, without vLLM, SGLang or Megatron"
    " generation"
)
NO_CRITIC = "advantages come from groups of completions, not from a value model"
NO_OFFLOAD = "nothing is offloaded to the CPU"
REWARD = "rewards are Python functions, named in reward.functions.<name>.path"
DATASET = "data is read from files: write the path in data.train_path"
TOTAL_LENGTH = "policy.max_total_sequence_length limits prompt and completion together"
TRACKERS = (
    "trackers are chosen with logger.tensorboard, logger.wandb_project and logger.mlflow_experiment"
)
TRUST_CODE = "code that comes with a model is never run"
LAST_ROWS = "the newest checkpoints are kept, not the best ones"
KEEP_ALL = "null keeps all checkpoints; write a number in checkpointing.keep_latest"
WARMUP_RATIO = "write the number of steps in policy.scheduler.warmup_steps"
ONLY_ADAMW = "the optimizer is AdamW"
# One foreign key for both jobs; the target that the job does not have is ignored.
STEPS = ("grpo.max_num_steps", "sft.max_num_steps")
VAL_PERIOD = ("grpo.val_period", "sft.val_period")
VAL_AT_START = ("grpo.val_at_start", "sft.val_at_start")
ADAMW = ("adamw", "adam", "torch.optim.adamw", "adamw_torch", "adamw_torch_fused")
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
# None: leaving the key out has the same effect.
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "auto": None,
}
