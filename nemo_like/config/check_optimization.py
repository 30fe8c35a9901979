"""Relations between the keys of the optimizer, the schedule and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.optimization import OptimizerConfig, SchedulerConfig
from nemo_like.config.schema import PolicyConfig, RunConfig

_MUON_KEYS = ("muon_lr", "muon_lr_adjust", "muon_momentum")
_KIND_OF_KEY = {
    "wsd_decay_steps": "wsd",
    "wsd_decay_shape": "wsd",
    "num_cycles": "cosine_restarts",
    "cycle_multiplier": "cosine_restarts",
}
"""Keys of `policy.scheduler` that one kind of schedule uses."""


def optimization_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `policy.optimizer`, `policy.scheduler` and `policy.freeze`."""
    scheduler = config.policy.scheduler
    yield from _lengths(scheduler)
    yield from _unused(scheduler)
    yield from _optimizer(config.policy)
    yield from _ema(config)
    if config.policy.freeze and config.policy.lora.enabled:
        yield Problem(
            ("policy.freeze", "policy.lora.enabled"),
            "policy.freeze is set, but policy.lora.enabled is true, which freezes all weights of"
            " the model: remove policy.freeze; policy.lora.target_modules selects what is trained",
        )
    has_base = scheduler.base_batch_size is not None
    if has_base != (scheduler.batch_size_scaling != "none"):
        yield Problem(
            ("policy.scheduler.batch_size_scaling", "policy.scheduler.base_batch_size"),
            f"policy.scheduler.batch_size_scaling is {scheduler.batch_size_scaling} and"
            f" policy.scheduler.base_batch_size is {scheduler.base_batch_size or 'null'}: scaling"
            " needs the batch size for which policy.optimizer.lr was chosen; set both or none",
        )


def _optimizer(policy: PolicyConfig) -> Iterator[Problem]:
    optimizer = policy.optimizer
    default = OptimizerConfig()
    for name in _MUON_KEYS:
        value = getattr(optimizer, name)
        if optimizer.name != "muon" and value != getattr(default, name):
            yield Problem(
                (f"policy.optimizer.{name}", "policy.optimizer.name"),
                f"policy.optimizer.{name} is {value}, which policy.optimizer.name muon uses, not"
                f" {optimizer.name}: remove it, or set policy.optimizer.name to muon",
            )
    if optimizer.name != "adamw" and policy.engine == "megatron":
        yield Problem(
            ("policy.optimizer.name", "policy.engine"),
            f"policy.optimizer.name is {optimizer.name}, but policy.engine megatron divides the"
            " state of a float32 AdamW into flat parts: set policy.engine to dtensor, or"
            " policy.optimizer.name to adamw",
        )
    if optimizer.name == "muon" and policy.lora.enabled:
        yield Problem(
            ("policy.optimizer.name", "policy.lora.enabled"),
            "policy.optimizer.name is muon, but policy.lora.enabled is true: Muon updates the"
            " matrices of the model, which are frozen. Set policy.optimizer.name to adamw",
        )


def _ema(config: RunConfig) -> Iterator[Problem]:
    ema = config.policy.ema
    if not ema.use_for_validation:
        return
    if not ema.enabled:
        yield Problem(
            ("policy.ema.use_for_validation", "policy.ema.enabled"),
            "policy.ema.use_for_validation is true, but policy.ema.enabled is false, so there is no"
            " average: set policy.ema.enabled to true, or policy.ema.use_for_validation to false",
        )
    if config.samples_validation:
        yield Problem(
            ("policy.ema.use_for_validation",),
            "policy.ema.use_for_validation is true, but the completions of this validation are"
            " sampled by the generator, which has the weights: set it to false, and evaluate the"
            " averaged model with `nemo-like eval policy.model_name=<run>/hf_ema`",
        )


def _lengths(scheduler: SchedulerConfig) -> Iterator[Problem]:
    end = scheduler.decay_steps
    warmup = scheduler.warmup_steps
    if end is None:
        return
    if end <= warmup:
        yield Problem(
            ("policy.scheduler.decay_steps", "policy.scheduler.warmup_steps"),
            f"policy.scheduler.decay_steps is {end}, which includes the"
            f" {warmup} warm-up steps; it must be above {warmup},"
            " or null for the length of the run",
        )
        return
    if scheduler.kind == "wsd" and (scheduler.wsd_decay_steps or 0) > end - warmup:
        yield Problem(
            ("policy.scheduler.wsd_decay_steps", "policy.scheduler.decay_steps"),
            f"policy.scheduler.wsd_decay_steps is {scheduler.wsd_decay_steps}, but only"
            f" {end - warmup} steps are between policy.scheduler.warmup_steps {warmup} and"
            f" policy.scheduler.decay_steps {end}: set it to {end - warmup} or less",
        )


def _unused(scheduler: SchedulerConfig) -> Iterator[Problem]:
    """Yield the keys that are set and that the kind of the schedule does not use."""
    default = SchedulerConfig()
    for name, kind in _KIND_OF_KEY.items():
        value = getattr(scheduler, name)
        if scheduler.kind != kind and value != getattr(default, name):
            yield Problem(
                (f"policy.scheduler.{name}", "policy.scheduler.kind"),
                f"policy.scheduler.{name} is {value}, which policy.scheduler.kind {kind} uses, not"
                f" {scheduler.kind}: remove it, or set policy.scheduler.kind to {kind}",
            )
