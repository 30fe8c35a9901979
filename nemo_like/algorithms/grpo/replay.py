"""Repeats the first optimizer step of a recorded rollout in one process, with any loss or packer.

Neither Ray nor a generator is started, and no weight changes: the loss and its gradient are
computed as in the run, from the recorded rows and the weights that the step began with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.rows import training_plan_spec
from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.keys import JobSchema
from nemo_like.config.load import load_config
from nemo_like.config.loss import LogprobName
from nemo_like.config.parallel import policy_layout
from nemo_like.config.paths import resolve_paths
from nemo_like.config.schema import CheckpointingConfig, PolicyConfig
from nemo_like.data.columns import take_rows
from nemo_like.data.planning.oversize import step_of_rows
from nemo_like.data.planning.plan import plan_batch
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.data.routed_experts import ROUTED_EXPERTS
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import rollout_loss
from nemo_like.metrics import metric_values
from nemo_like.policy.batching import shared_prefix_mode
from nemo_like.policy.checkpoint.sharded_reader import checkpoint_problem
from nemo_like.rollout.records import RolloutRecord, recorded_steps
from nemo_like.run.checkpoint import Checkpointer, incomplete_reason
from nemo_like.run.directory import RunDirectory
from nemo_like.training.model_files import open_model_spec
from nemo_like.training.saving import policy_directory
from nemo_like.training.workers import local_policy

REPLAYED_KEYS = (
    "loss_fn",
    "policy.sequence_packing",
    "policy.dynamic_batching",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.logprob_chunk_size",
    "policy.activation_checkpointing",
    "policy.compile",
    "policy.router_replay",
    "policy.engine",
    "policy.precision",
    "parallel",
    "cluster",
)
"""Keys, and sections of keys, that change the second side of the comparison."""
MOVED_KEYS = ("policy.model_name", "policy.tokenizer_name")
"""Keys that apply to both sides: where the files are now."""


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The first optimizer step of a recorded rollout: as logged, repeated, and with overrides."""

    step: int
    num_rows: int
    """Rows of the optimizer step."""
    num_optimizer_steps: int
    """Optimizer steps of the rollout."""
    weights: str
    """Name of the checkpoint, or of the initial model."""
    layout: str
    """Parallel layout of the run, for which `packing/*` of `replayed` is planned."""
    overrides: Sequence[str]
    logged: Mapping[str, float | None]
    replayed: Mapping[str, float]
    overridden: Mapping[str, float] | None
    """None without overrides of `REPLAYED_KEYS`."""


def replay_step(run: Path, step: int, overrides: Sequence[str] = ()) -> ReplayReport:
    """Repeat the first optimizer step of `step` of a GRPO run, and once more with `overrides`.

    The rows come from `rollouts/step_<N>.safetensors`, the weights from the checkpoint
    of step N - 1, or of the initial model. The other optimizer steps of the rollout, if it had
    several, began with weights that no file has. Raises ConfigError if the record or the weights
    are missing, and for an override that a replay does not use.
    """
    moved, changes = _sorted_overrides(overrides)
    directory = RunDirectory(run)
    path = directory.rollout_tokens(step)
    if not path.is_file():
        raise ConfigError(
            f"{shown_path(run)} has no token ids of step {step}; {_available(directory)}"
        )
    record = RolloutRecord.load(path)
    if record.has_images:
        raise ConfigError(
            f"the prompts of {shown_path(path)} had images, which the file does not have, so the"
            " step cannot be repeated; choose a run on texts"
        )
    config = _load_config(record, moved)
    weights = _find_weights(directory, step)
    overridden = None
    if changes:
        # Before the first replay: a wrong override should not cost its time.
        changed = _load_config(record, [*moved, *changes])
        _check_reward_kl(config, changed)
        replayed = _measure(config, record, weights)
        overridden = _measure(changed, record, weights)
    else:
        replayed = _measure(config, record, weights)
    return ReplayReport(
        step=step,
        num_rows=len(_first_rows(config.policy, record)),
        num_optimizer_steps=len(record.optimizer_steps),
        weights=config.policy.model_name if weights is None else shown_path(weights),
        layout=str(policy_layout(config.parallel, config.cluster)),
        overrides=changes,
        logged=record.optimizer_steps[0],
        replayed=replayed,
        overridden=overridden,
    )


def _sorted_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of `MOVED_KEYS` and of `REPLAYED_KEYS`. Raises ConfigError."""
    moved = []
    changes = []
    for override in overrides:
        key = re.split("[=@]", override.lstrip("+~"), maxsplit=1)[0]
        if key in MOVED_KEYS:
            moved.append(override)
        elif any(key == each or key.startswith(f"{each}.") for each in REPLAYED_KEYS):
            changes.append(override)
        else:
            raise ConfigError(
                f"{key} has no effect on a replay, which repeats one optimizer step of recorded"
                f" rows; it uses {', '.join(REPLAYED_KEYS)}, and {' and '.join(MOVED_KEYS)} if the"
                " files have moved"
            )
    return moved, changes


def _load_config(record: RolloutRecord, overrides: Sequence[str]) -> GrpoRunConfig:
    """Return the config that the run had at the recorded step, with `overrides`."""
    # Not from the registry, which imports this package. The record has keys of this job only.
    job = JobSchema(GrpoRunConfig.kind, {GrpoRunConfig.kind: GrpoRunConfig})
    # A file, because the loader composes files and overrides.
    with TemporaryDirectory(prefix="nemo_like_replay_") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(dict(record.config)), encoding="utf-8")
        config = load_config(job, path, overrides)
    assert isinstance(config, GrpoRunConfig)
    return resolve_paths(config)


def _check_reward_kl(config: GrpoRunConfig, changed: GrpoRunConfig) -> None:
    """Raise ConfigError if the overrides change the KL in the reward of the recorded advantages.

    A loss of the user has no such keys and reads the advantages as they are.
    """
    if changed.loss_fn.path is not None:
        return
    penalties = []
    for each in (config, changed):
        penalty = each.loss_fn.reference_policy_kl_penalty
        penalties.append(penalty if each.has_kl_in_reward else 0.0)
    if penalties[0] != penalties[1]:
        raise ConfigError(
            f"the overrides change the KL penalty of the reward from {penalties[0]:g} to"
            f" {penalties[1]:g}, but a replay uses the recorded advantages, which have the KL of"
            " the run; keep loss_fn.reference_policy_kl_in, and with reward"
            " loss_fn.reference_policy_kl_penalty, as they were"
        )


def _available(directory: RunDirectory) -> str:
    """Return the sentence about the steps of the run that can be replayed."""
    recorded = recorded_steps(directory.rollout_tokens(0).parent, ".safetensors")
    if not recorded:
        return (
            "it has none of any step: logger.save_rollouts with logger.keep_rollout_tokens above 0"
            " writes them for steps of at most logger.max_rollout_rows rows"
        )
    saved = Checkpointer(directory.path, CheckpointingConfig()).saved_steps()
    replayable = [step for step in recorded if step == 1 or step - 1 in saved]
    if not replayable:
        return (
            f"it has token ids of {_listed(recorded)} and checkpoints of {_listed(saved)}, and a"
            " replay needs the checkpoint of the step before, or step 1"
        )
    return f"steps that can be replayed: {_listed(replayable)}"


def _listed(steps: Sequence[int]) -> str:
    """Return the numbers of steps as text."""
    return ", ".join(map(str, steps)) or "no step"


def _find_weights(directory: RunDirectory, step: int) -> Path | None:
    """Return the policy's files of the checkpoint before `step`; None for the initial model.

    Raises ConfigError if there is no complete checkpoint.
    """
    if step == 1:
        return None
    checkpoint = directory.path / "checkpoints" / f"step_{step - 1}"
    if not checkpoint.is_dir():
        raise ConfigError(
            f"{shown_path(directory.path)} has no checkpoint of step {step - 1}, whose weights"
            f" step {step} trained; {_available(directory)}. checkpointing.keep_latest and"
            " checkpointing.save_period decide which are kept"
        )
    problem = incomplete_reason(checkpoint, step - 1)
    if problem is None:
        problem = checkpoint_problem(policy_directory(checkpoint))
    if problem is not None:
        raise ConfigError(f"{shown_path(checkpoint)} cannot be loaded: {problem}")
    return policy_directory(checkpoint)


def _first_rows(policy: PolicyConfig, record: RolloutRecord) -> np.ndarray:
    """Return the rows of the first optimizer step, int64 [n]."""
    # A plan never moves a row to another optimizer step.
    step_of = step_of_rows(
        len(record.columns["length"]), policy.train_global_batch_size, _episodes(record)
    )
    return np.flatnonzero(step_of == 0)


def _episodes(record: RolloutRecord) -> np.ndarray | None:
    """Return the episode of each row, int [B]; None where each row is an episode of its own."""
    episodes = record.columns.get("episode")
    return episodes if isinstance(episodes, np.ndarray) else None


def _measure(
    config: GrpoRunConfig, record: RolloutRecord, weights: Path | None
) -> dict[str, float]:
    """Return the metrics of the first optimizer step, and `packing/*` of the complete rollout."""
    loss = rollout_loss(config.loss_fn, config.policy.generation.max_new_tokens)
    loss = loss.for_num_steps(len(record.optimizer_steps))
    unused: set[str] = {"prev_logprobs", "reference_logprobs", "policy_logprobs"}
    unused.difference_update(loss.logprob_names)
    if config.policy.router_replay is False:
        unused.add(ROUTED_EXPERTS)
    rows = _first_rows(config.policy, record)
    batch = BatchedDataDict()
    for name, column in record.columns.items():
        if name not in unused:
            batch[name] = take_rows(column, rows)
    # At the beginning of the step the policy's own log-probs are the previous ones.
    missing: list[LogprobName] = [name for name in loss.logprob_names if name not in batch]
    with local_policy(
        config.policy,
        config.cluster,
        seed=config.seed,
        needs_reference="reference_logprobs" in missing,
    ) as policy:
        if weights is not None:
            policy.load(weights)
        plan = policy.plan_rows(batch)
        sharded = policy.shard(batch, plan)
        logprobs = policy.compute_logprobs(sharded, missing) if missing else None
        metrics = metric_values(policy.measure_gradient(sharded, None, loss, logprobs))
    return metrics | _packing_metrics(config, record)


def _packing_metrics(config: GrpoRunConfig, record: RolloutRecord) -> dict[str, float]:
    """Return `packing/*` of the rollout in the config's own parallel layout."""
    model = open_model_spec(config.policy)
    spec = training_plan_spec(config, model)
    shared_prefix = shared_prefix_mode(config.policy, model)
    may_share = shared_prefix is not False and spec.layout == "packed"
    counts = TokenCounts.of_batch(record.columns, with_prefixes=may_share)
    episodes = _episodes(record)
    return plan_batch(counts, spec, episodes=episodes, shared_prefix=shared_prefix).metrics()
