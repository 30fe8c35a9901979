"""The DPO loop. One step: pairs, plan, log-probs of the reference, one optimizer step."""

from __future__ import annotations

from nemo_like.algorithms.dpo.config import DpoRunConfig
from nemo_like.algorithms.dpo.data import open_source
from nemo_like.algorithms.dpo.loss import PreferenceLoss
from nemo_like.algorithms.pair_data import collate_pairs
from nemo_like.algorithms.pair_training import PairTask
from nemo_like.config.paths import resolve_paths
from nemo_like.data.preferences import PreferencePair
from nemo_like.training.run import RunResult
from nemo_like.training.steps import run_epochs


def run_dpo(config: DpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    loader = source.loader()

    def open_task() -> PairTask[PreferencePair]:
        """Return the step and the validation of the run; encodes the validation pairs."""
        return PairTask(
            loader=loader,
            validation=source.validation_batches(),
            loss=PreferenceLoss(config=config.loss_fn),
            collate=collate_pairs,
            pair_of=lambda pair: pair,
            short_name=_short_name,
            needs_reference=config.needs_reference,
        )

    return run_epochs(config.dpo, source, loader, open_task)


def _short_name(metric: str) -> str:
    """Return e.g. `loss` for `policy/loss`, and `rewards_chosen` for `rewards/chosen`."""
    section, _, rest = metric.partition("/")
    return rest if section == "policy" else metric.replace("/", "_")
