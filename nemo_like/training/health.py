"""Rules on the metrics of a run that find failing training, with the cause and the key to change.

A rule is a pure function of the latest values of the metrics, as `metrics.jsonl` has them, and of
the config. No rule changes the run; `TrainingRun` ends it for a finding of level `stop`.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from nemo_like.config.health import HealthConfig
from nemo_like.run.directory import flatten
from nemo_like.run.files import AppendedFile

logger = logging.getLogger(__name__)

_MIN_VALUES = 3
"""Values of a metric that the rules of a level need; fewer may be chance."""
_MIN_RISE = 0.02
"""Rise of the mean reward, as a share of the distance of lowest and highest, that is progress."""
_REFERENCE_KL = tuple(f"policy/reference_kl_{kind}" for kind in ("k1", "k2", "k3"))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule whose condition holds, as one line of `health.jsonl`."""

    step: int
    rule: str
    message: str
    key: str
    """The config key to change first."""
    level: str
    """`warn` or `stop`."""


@dataclass(frozen=True)
class Window:
    """The latest values of each metric, oldest first, and the config."""

    metrics: Mapping[str, Sequence[float]]
    """At most `health.window` finite values by name."""
    logged: frozenset[str]
    """Names of the metrics of the step that was logged last."""
    limits: HealthConfig
    settings: Mapping[str, Any]
    """Every value of the config by its dotted key."""

    def values(self, name: str) -> Sequence[float]:
        """Return the values of a metric; none if the last step did not log it."""
        return list(self.metrics.get(name, ())) if name in self.logged else []

    def mean(self, name: str, min_values: int = _MIN_VALUES) -> float | None:
        """Return the mean of a metric; None with fewer than `min_values` values."""
        values = self.values(name)
        return fmean(values) if len(values) >= min_values else None

    def complete(self, name: str) -> Sequence[float]:
        """Return the values of a metric if the window has all of them, otherwise none."""
        values = self.values(name)
        return values if len(values) == self.limits.window else ()

    @property
    def reward_rises(self) -> bool:
        """True if the mean reward is higher in the later half than in the earlier half."""
        rewards = self.values("reward/mean")
        if len(rewards) < 2:
            return False
        half = len(rewards) // 2
        distance = max(self.metrics["reward/max"]) - min(self.metrics["reward/min"])
        return fmean(rewards[half:]) - fmean(rewards[:half]) > _MIN_RISE * distance


def _reward_flat(window: Window) -> str | None:
    share = window.mean("reward/frac_groups_zero_std")
    is_above = share is not None and share >= window.limits.max_equal_rewards
    has_baseline = window.settings.get("grpo.advantage.baseline") != "none"
    if not is_above or window.reward_rises or not has_baseline:
        return None
    zero_share = window.mean("reward/frac_groups_all_zero") or 0.0
    return (
        f"{share:.0%} of the groups have equal rewards ({zero_share:.0%} only rewards of 0), which"
        " do not train the policy, and the reward does not rise"
    )


def _entropy_collapse(window: Window) -> str | None:
    entropy = window.mean("policy/entropy_estimate")
    if entropy is None or entropy >= window.limits.min_entropy or window.reward_rises:
        return None
    return f"the entropy is {entropy:.2g} nats per token, and the reward does not rise"


def _above(limit: str, text: str, *names: str) -> Callable[[Window], str | None]:
    """Return the condition that the mean of a metric, the one that is logged, is above a limit."""

    def observe(window: Window) -> str | None:
        for name in names:
            value = window.mean(name)
            if value is not None and value > getattr(window.limits, limit):
                return text.format(value)
        return None

    return observe


def _length_explosion(window: Window) -> str | None:
    lengths = window.complete("generation/completion_length_mean")
    if not lengths or window.reward_rises:
        return None
    third = len(lengths) // 3
    before = fmean(lengths[:third])
    after = fmean(lengths[-third:])
    if after <= before * window.limits.max_length_growth:
        return None
    return (
        f"completions grew from {before:.0f} to {after:.0f} tokens in {len(lengths)} steps, and"
        " the reward does not rise"
    )


def _truncated(window: Window) -> str | None:
    share = window.mean("generation/truncated_share")
    if share is None:
        # A mean over a validation set does not depend on the rows of a single step.
        share = next(reversed(window.values("validation/generation_truncated_share")), None)
    if share is None or share <= window.limits.max_truncated:
        return None
    return f"{share:.0%} of the completions were cut off at the length limit"


def _grad_norm(window: Window) -> str | None:
    *before, last = window.complete("policy/grad_norm") or (0.0,)
    usual = median(before) if before else 0.0
    if usual == 0 or last <= usual * window.limits.max_grad_norm_growth:
        return None
    return f"the gradient norm is {last:.3g}, and was {usual:.3g} in the steps before (median)"


def _data_wait(window: Window) -> str | None:
    wait_s = window.mean("timing/data_wait_s") or 0.0
    step_s = window.mean("timing/step_s") or math.inf
    if wait_s <= window.limits.max_data_wait * step_s:
        return None
    return f"a step waits {wait_s:.2g} of {step_s:.2g} s for its rows"


def _generator_idle(window: Window) -> str | None:
    idle_s = window.mean("timing/generator_idle_s") or 0.0
    share = idle_s / max(idle_s + (window.mean("timing/generator_busy_s") or 0.0), 1e-9)
    # A colocated generator shares its devices with training, which uses them meanwhile.
    is_colocated = window.settings["cluster.generation_workers"] == 0
    if is_colocated or share <= window.limits.max_generator_idle:
        return None
    return f"the generation workers are idle {share:.0%} of the time"


def _slow_rank(window: Window) -> str | None:
    ranks = window.complete("policy/rank_time_slowest")
    imbalance = window.mean("policy/rank_time_worst_over_mean") or 1.0
    # Without a plan of several ranks the work of all is taken as equal.
    slowdown = imbalance / max(window.mean("packing/rank_imbalance_flops") or 1.0, 1.0)
    if len(set(ranks)) != 1 or slowdown <= window.limits.max_rank_slowdown:
        return None
    return (
        f"worker {ranks[0]:g} of the policy group is the slowest in each of {len(ranks)} steps, at"
        f" {slowdown:.2f} times its planned time (its node is in logs/driver.log, and in the output"
        " of nemo-like doctor)"
    )


def _long_failures(window: Window) -> str | None:
    failed = window.mean("episodes/failed_calls_mean") or 0.0
    usual = window.mean("episodes/calls_mean") or math.inf
    if failed <= usual * window.limits.max_failed_calls:
        return None
    return f"failed attempts at an episode have {failed:.1f} calls, episodes have {usual:.1f}"


def _truncating_keys(window: Window) -> tuple[str, ...]:
    """Return the keys of the limits of completions, that which was reached in front."""
    new, total = "policy.generation.max_new_tokens", "policy.max_total_sequence_length"
    longest = window.values("generation/completion_length_max")
    # A conversation can be longer than one completion.
    return (total, new) if longest and longest[-1] < window.settings[new] else (new, total)


@dataclass(frozen=True)
class Rule:
    """A condition on the metrics of the latest steps, its probable cause, and the keys to change.

    Keys that the config of another algorithm lacks are left out.
    """

    observe: Callable[[Window], str | None]
    """Return what was observed; None where the condition does not hold."""
    cause: str
    keys: Callable[[Window], Sequence[str]]


def _keys(*keys: str) -> Callable[[Window], Sequence[str]]:
    return lambda window: keys


RULES = {
    "reward_flat": Rule(
        _reward_flat,
        "the prompts are too hard or too easy for the model, or the reward function nearly always"
        " returns the same value; use prompts of other difficulty (data.pass_rate_range)",
        _keys("grpo.num_generations_per_prompt", "grpo.dynamic_sampling.enabled"),
    ),
    "entropy_collapse": Rule(
        _entropy_collapse,
        "the policy gives nearly the same completion every time, so groups have nothing to compare;"
        " the learning rate is too high or exploration too low",
        _keys("loss_fn.entropy_coefficient", "policy.optimizer.lr"),
    ),
    "kl": Rule(
        _above("max_kl", "the KL to the reference is {:.2g} nats per token", *_REFERENCE_KL),
        "the policy moves away from the reference faster than the penalty holds it; the learning"
        " rate is too high or the penalty too small",
        _keys("loss_fn.reference_policy_kl_penalty", "policy.optimizer.lr"),
    ),
    "mismatch": Rule(
        _above(
            "max_mismatch",
            "log-probs of generator and policy differ by a KL of {:.2g} nats per token",
            "mismatch/gen_kl_k3",
        ),
        "generator and training engine compute other log-probs (kernels, precision, another chat"
        " template), or the rows were sampled with old weights",
        _keys("loss_fn.importance_correction.kind", "grpo.max_staleness", "policy.precision"),
    ),
    "length_explosion": Rule(
        _length_explosion,
        "long completions are not worse for the reward; often repeated text",
        _keys("grpo.overlong.penalty_buffer", "policy.generation.max_new_tokens"),
    ),
    "truncated": Rule(
        _truncated,
        "the limit is too low for the task, or the model does not end its answers with an end token"
        " of its chat template",
        _truncating_keys,
    ),
    "truncated_rows": Rule(
        _above(
            "max_truncated",
            "{:.0%} of the training rows were truncated at the length limit",
            "data/full_length_share",
        ),
        "the rows are longer than the limit, so the ends of conversations are not trained on",
        _keys("policy.max_total_sequence_length", "policy.oversize_rows"),
    ),
    "clipped": Rule(
        _above(
            "max_clipped",
            "the loss clips {:.0%} of the tokens, which then do not train the policy",
            "policy/clip_fraction",
        ),
        "the policy changes too much between the rollout and the optimizer step",
        _keys("policy.optimizer.lr", "grpo.num_epochs_per_rollout", "grpo.max_staleness"),
    ),
    "grad_norm": Rule(
        _grad_norm,
        "a batch with unusual rows, or a learning rate that is too high",
        _keys("policy.optimizer.lr", "policy.max_grad_norm"),
    ),
    "data_wait": Rule(
        _data_wait,
        "rows are read and tokenized more slowly than they are trained on",
        _keys("data.num_encoding_workers"),
    ),
    "generator_idle": Rule(
        _generator_idle,
        "the generator waits for training; let it work ahead, or give it fewer workers",
        _keys("grpo.max_staleness", "cluster.generation_workers"),
    ),
    "slow_rank": Rule(
        _slow_rank,
        "a device that is throttled or damaged, or other programs on its node; all ranks wait for"
        " it. Stop the run and resume it without the node",
        _keys("cluster.exclude_nodes"),
    ),
    "long_failures": Rule(
        _long_failures,
        "long episodes fail more often, by a limit or a tool that fails late, so that short ones"
        " are trained more often than they are sampled",
        _keys("environment.timeout_s", "environment.retries"),
    ),
}


class Health:
    """Applies the rules to each logged step of a run.

    A rule that fired is silent until its condition has not held for `health.window` steps.
    """

    def __init__(self, limits: HealthConfig, config: Mapping[str, Any]) -> None:
        """`config` is the config of the run as plain values."""
        self._limits = limits
        self._settings = flatten(config)
        self._metrics: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=limits.window))
        self._num_steps = 0
        self._held: dict[str, int] = {}
        """The number of steps after which the condition of a rule held last."""
        self.findings: list[Finding] = []
        """All findings of this process."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Take the record of a step; return the rules that fire."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._metrics[name].append(value)
        self._num_steps += 1
        window = Window(self._metrics, frozenset(metrics), self._limits, self._settings)
        found = []
        for name, rule in RULES.items():
            action = self._limits.action_of(name)
            observed = None if action == "ignore" else rule.observe(window)
            if observed is None:
                continue
            if self._num_steps - self._held.get(name, -math.inf) > self._limits.window:
                keys = [key for key in rule.keys(window) if key in self._settings]
                # As YAML has them: null, false.
                values = [json.dumps(self._settings[key]) for key in keys]
                pairs = zip(keys, values, strict=True)
                change = " or ".join(f"{key} (now {value})" for key, value in pairs)
                text = f"{observed}. Probable cause: {rule.cause}. Change {change}"
                found.append(Finding(step=step, rule=name, message=text, key=keys[0], level=action))
            self._held[name] = self._num_steps
        self.findings += found
        return found

    def report(self, step: int, metrics: Mapping[str, float], file: AppendedFile) -> str | None:
        """Take the record of a step; log what fires, also in `file`.

        Returns the rule that ends the run, if one does. Raises WriteError.
        """
        stopping = None
        for finding in self.observe(step, metrics):
            logger.warning("step %d: %s: %s", step, finding.rule, finding.message)
            file.append_json(asdict(finding), "the findings of the health rules")
            if finding.level == "stop":
                stopping = finding.rule
        return stopping

    def advice(self) -> list[str]:
        """Return the lines for the end of the run: each rule that fired, with its key."""
        latest = {finding.rule: finding for finding in self.findings}
        return [
            f"health: {rule} at step {found.step}; change {found.key}"
            for rule, found in latest.items()
        ]
