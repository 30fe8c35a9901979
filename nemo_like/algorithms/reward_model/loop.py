"""The loop of a reward model. One step: pairs, plan, one optimizer step."""

from __future__ import annotations

from nemo_like.algorithms.pair_training import PairTask
from nemo_like.algorithms.reward_model.config import RewardModelRunConfig
from nemo_like.algorithms.reward_model.data import (
    MarginPair,
    collate_margin_pairs,
    open_source,
    preference_pair,
)
from nemo_like.config.paths import resolve_paths
from nemo_like.losses.pairs import BradleyTerryLoss
from nemo_like.policy.checkpoint.hf_export import padding_token_id
from nemo_like.training.run import RunResult
from nemo_like.training.steps import run_epochs


def run_reward_model(config: RewardModelRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    # The export needs one; without the check the run would fail at its end.
    padding_token_id(source.data.encoder.tokenizer)
    loader = source.loader()

    def open_task() -> PairTask[MarginPair]:
        """Return the step and the validation of the run; encodes the validation pairs."""
        return PairTask(
            loader=loader,
            validation=source.validation_batches(),
            loss=BradleyTerryLoss(center_coefficient=config.rm.center_coefficient),
            collate=collate_margin_pairs,
            pair_of=preference_pair,
            short_name=_short_name,
        )

    return run_epochs(config.rm, source, loader, open_task)


def _short_name(metric: str) -> str:
    """Return the name without its section, e.g. `accuracy` for `rm/accuracy`."""
    return metric.rpartition("/")[2]
