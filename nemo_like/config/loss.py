"""The keys of `loss_fn` of GRPO, the policy-gradient loss, and the checks of their relations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nemo_like.config.constraints import IMPORT_PATH, Ge, Gt, Le, subset_of
from nemo_like.config.errors import Problem

CorrectionKind = Literal[
    "none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "bypass"
]
_DEFAULT_BOUNDS: dict[CorrectionKind, tuple[float | None, float | None]] = {
    "none": (None, None),
    "token_truncate": (None, 2.0),
    "sequence_truncate": (None, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_mask": (0.999, 1.002),
    "bypass": (None, None),
}
"""(lower, upper) of each kind: TIS of verl, IcePop, and the geometric mean of Geo-RS."""
_KEY = "loss_fn.importance_correction"


@dataclass(frozen=True, kw_only=True)
class ImportanceCorrectionConfig:
    """Correction for completions that were sampled with other kernels, in another precision or with
    older weights than the training pass uses. The weight of a token is w = exp(l_prev -
    l_generation); it multiplies the surrogate loss, not the KL penalty or the entropy bonus.
    """

    kind: CorrectionKind = "none"
    """`token_truncate` uses min(w, upper) (TIS), `sequence_truncate` the product of the row's
    weights, at most upper; `token_mask` leaves out tokens with w outside [lower, upper] (IcePop,
    MIS), `sequence_mask` rows with exp(mean log w) outside of it (Geo-RS). `bypass` takes the
    generator's log-prob as l_prev. `none` only measures."""
    upper: Annotated[float | None, Ge(1)] = None
    """Upper bound; null is 2 for the truncated kinds, 5 for `token_mask` and 1.002 for
    `sequence_mask`."""
    lower: Annotated[float | None, Ge(0), Le(1)] = None
    """Lower bound; null is 0.5 for `token_mask`, 0.999 for `sequence_mask` and no bound for the
    truncated kinds."""

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """(lower, upper) with the defaults of `kind`; None means no bound."""
        lower, upper = _DEFAULT_BOUNDS[self.kind]
        if self.lower is not None:
            lower = self.lower
        if self.upper is not None:
            upper = self.upper
        return lower, upper

    @property
    def has_weights(self) -> bool:
        """True if the surrogate loss is multiplied by weights."""
        return self.kind not in ("none", "bypass")

    def problems(self) -> Iterator[Problem]:
        """Yield bounds that the kind does not use, and bounds in the wrong order."""
        for name in ("lower", "upper"):
            value = getattr(self, name)
            if value is not None and not self.has_weights:
                yield Problem(
                    (f"{_KEY}.{name}", f"{_KEY}.kind"),
                    f"{_KEY}.{name} is {value:g}, but {_KEY}.kind {self.kind} has no weights to"
                    f" bound: remove {name}, or set kind to token_truncate, sequence_truncate,"
                    " token_mask or sequence_mask",
                )
        lower, upper = self.bounds
        if lower is not None and upper is not None and lower >= upper:
            yield Problem(
                (f"{_KEY}.lower", f"{_KEY}.upper"),
                f"{_KEY}.lower is {lower:g} and {_KEY}.upper {upper:g}; lower must be below upper,"
                f" e.g. the defaults {_defaults(self.kind)} of kind {self.kind}",
            )


def _defaults(kind: CorrectionKind) -> str:
    """Return the default bounds in words. Example: `0.5 and 5`."""
    lower, upper = _DEFAULT_BOUNDS[kind]
    shown_lower = "null" if lower is None else f"{lower:g}"
    return f"{shown_lower} and {upper:g}"


Surrogate = Literal["ppo", "gspo", "gspo_token", "cispo", "reinforce"]
LossNormalization = Literal["token", "sequence", "constant"]
LogprobName = Literal["prev_logprobs", "reference_logprobs"]
LOGPROB_NAMES: tuple[LogprobName, ...] = ("prev_logprobs", "reference_logprobs")
"""Columns that a log-prob pass computes before training."""

_DEFAULT_CLIPS: dict[Surrogate, tuple[float | None, float | None]] = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "cispo": (None, 4.0),
    "reinforce": (None, None),
}
"""Default (`ratio_clip_min`, `ratio_clip_max`); None means no bound. PPO (Schulman et al. 2017),
GSPO (Zheng et al. 2025, section 5.1), CISPO with an upper bound only (MiniMax-M1), at 5 as in
ScaleRL (Khatri et al. 2025).
"""
MAX_ROW_RATIO_CLIP = 0.1
"""Max clip of a row's ratio: as the geometric mean of its tokens' ratios it never reaches more in
a stable run."""
_NORMALIZATION = "loss_fn.normalization"
_SURROGATE = "loss_fn.surrogate"


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLossConfig:
    """The policy-gradient loss of GRPO: a surrogate, a KL penalty and an entropy bonus. `nemo-like
    explain loss --config FILE` prints the formula that a config selects.
    """

    surrogate: Surrogate = "ppo"
    """`ppo` clips the ratio of each token (GRPO, DAPO). `gspo` clips one ratio per row, the
    geometric mean of its tokens' ratios; `gspo_token` does the same with advantages of tokens.
    `cispo` multiplies the log-prob by the clipped ratio as a constant, so that no token loses its
    gradient. `reinforce` is log-prob times advantage, without a ratio (RLOO, REINFORCE++)."""
    ratio_clip_min: Annotated[float | None, Ge(0), Le(1)] = None
    """Lower clip of the ratio, at 1 - this. null is 0.2 for `ppo`, 3e-4 for `gspo` and
    `gspo_token`, and no lower bound for `cispo`. Must be null for `reinforce`."""
    ratio_clip_max: Annotated[float | None, Ge(0)] = None
    """Upper clip of the ratio, at 1 + this. null is 0.2 for `ppo` (DAPO uses 0.28), 4e-4 for `gspo`
    and `gspo_token`, and 4 for `cispo`. Must be null for `reinforce`."""
    ratio_clip_c: Annotated[float | None, Gt(1)] = None
    """Dual clip of `ppo`, `gspo` and `gspo_token`: for negative advantages the loss of a token is
    at most this x |advantage|; null turns it off."""
    normalization: LossNormalization | None = None
    """Denominator of the loss: `token` is the mean over all trained tokens, `sequence` the mean
    over rows of each row's token mean, `constant` the sum over tokens divided by rows x
    `constant_length` (Dr. GRPO). null is `sequence` for `gspo` and `gspo_token`, else `token`."""
    constant_length: Annotated[int | None, Ge(1)] = None
    """Tokens per row in the denominator of `loss_fn.normalization=constant`; null is
    `policy.generation.max_new_tokens`."""
    reference_policy_kl_penalty: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence to the frozen initial policy; above 0 a step has one more
    log-prob pass."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the reported KL divergence; all three have the gradient of k2."""
    reference_policy_kl_in: Literal["loss", "reward"] = "loss"
    """`loss` adds the KL divergence to the loss of each token. `reward` subtracts its k1 estimate,
    without gradient, from the reward of each token (PPO, REINFORCE++), which needs a log-prob pass
    of the policy."""
    entropy_coefficient: Annotated[float, Ge(0)] = 0.0
    """Weight of the entropy bonus. Above 0 the exact entropy over the vocabulary is computed and
    logged as `policy/entropy`, which takes about three more passes over the logits."""
    path: Annotated[str | None, IMPORT_PATH] = None
    """Import path of a custom loss, e.g. `my_package.losses.MyLoss`; null means the built-in loss.
    Excludes the other keys of `loss_fn` but `options`, `logprobs` and the keys of a KL penalty in
    the reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class or function at `loss_fn.path`."""
    logprobs: Annotated[tuple[str, ...], subset_of(LOGPROB_NAMES)] = ()
    """Columns that a pass before training computes for the loss at `loss_fn.path`."""
    importance_correction: ImportanceCorrectionConfig = field(
        default_factory=ImportanceCorrectionConfig
    )

    @property
    def clips(self) -> tuple[float | None, float | None]:
        """(`ratio_clip_min`, `ratio_clip_max`) with the defaults of `surrogate`; None: no bound."""
        lower, upper = _DEFAULT_CLIPS[self.surrogate]
        if self.ratio_clip_min is not None:
            lower = self.ratio_clip_min
        if self.ratio_clip_max is not None:
            upper = self.ratio_clip_max
        return lower, upper

    @property
    def ratio_bounds(self) -> tuple[float | None, float | None]:
        """(lowest, highest) clipped ratio; None means no bound. Example: (0.8, 1.28)."""
        lower, upper = self.clips
        lowest = None if lower is None else 1.0 - lower
        highest = None if upper is None else 1.0 + upper
        return lowest, highest

    @property
    def has_kl_in_loss(self) -> bool:
        """True if the loss has a KL penalty."""
        return self.reference_policy_kl_penalty > 0 and self.reference_policy_kl_in == "loss"

    @property
    def has_kl_in_reward(self) -> bool:
        """True if the rewards have a KL penalty."""
        return self.reference_policy_kl_penalty > 0 and self.reference_policy_kl_in == "reward"

    @property
    def needs_reference(self) -> bool:
        """True if the log-probs of the reference are computed before training."""
        if self.path is not None:
            return "reference_logprobs" in self.logprobs or self.has_kl_in_reward
        return self.reference_policy_kl_penalty > 0

    @property
    def has_row_ratio(self) -> bool:
        """True if the tokens of a row share one ratio."""
        return self.surrogate in ("gspo", "gspo_token")

    @property
    def divisor(self) -> LossNormalization:
        """`normalization` with the default of `surrogate`."""
        if self.normalization is not None:
            return self.normalization
        return "sequence" if self.has_row_ratio else "token"

    def logprob_names(self, *, is_single_step: bool) -> tuple[LogprobName, ...]:
        """Return the columns that a log-prob pass has to compute before training.

        With `is_single_step` exactly one optimizer step is taken on the batch. The built-in losses
        then need no `prev_logprobs`: they come from the training pass.
        """
        if self.path is not None:
            return tuple(name for name in LOGPROB_NAMES if name in self.logprobs)
        kind = self.importance_correction.kind
        # REINFORCE has no ratio, only weights of the importance correction.
        has_ratio = self.surrogate != "reinforce" or self.importance_correction.has_weights
        names: list[LogprobName] = []
        if has_ratio and kind != "bypass" and not is_single_step:
            names.append("prev_logprobs")
        if self.has_kl_in_loss:
            names.append("reference_logprobs")
        return tuple(names)

    def problems(self) -> Iterator[Problem]:
        """Yield the combinations of keys that have no meaning, each with the reason."""
        yield from self.importance_correction.problems()
        if self.path is not None:
            yield from _custom_problems(self)
            return
        for name in ("options", "logprobs"):
            if getattr(self, name):
                yield Problem(
                    (f"loss_fn.{name}", "loss_fn.path"),
                    f"loss_fn.{name} is set, but loss_fn.path is null, and only a custom loss"
                    f" reads it: remove loss_fn.{name}, or set loss_fn.path",
                )
        yield from _clip_problems(self)
        yield from _normalization_problems(self)
        yield from _correction_problems(self)


def _custom_problems(loss: PolicyGradientLossConfig) -> Iterator[Problem]:
    """A loss of the user has its own keys, `options`. A KL in the reward does not depend on it."""
    defaults = PolicyGradientLossConfig()
    read = {"path", "options", "logprobs"}
    if loss.has_kl_in_reward:
        read |= {"reference_policy_kl_penalty", "reference_policy_kl_in"}
    for each in dataclasses.fields(loss):
        if each.name in read:
            continue
        if getattr(loss, each.name) != getattr(defaults, each.name):
            key = f"loss_fn.{each.name}"
            yield Problem(
                (key, "loss_fn.path"),
                f"{key} is set, but loss_fn.path {loss.path} replaces the loss that reads it:"
                f" remove {key}, and give the loss its settings in loss_fn.options",
            )


def _clip_problems(loss: PolicyGradientLossConfig) -> Iterator[Problem]:
    surrogate = loss.surrogate
    for name in ("ratio_clip_min", "ratio_clip_max"):
        key = f"loss_fn.{name}"
        value = getattr(loss, name)
        if value is None:
            continue
        if surrogate == "reinforce":
            yield Problem(
                (key, _SURROGATE),
                f"{key} is {value:g}, but {_SURROGATE} reinforce has no ratio to clip: set {key} to"
                f" null, or {_SURROGATE} to ppo or cispo",
            )
        elif loss.has_row_ratio and value > MAX_ROW_RATIO_CLIP:
            yield Problem(
                (key, _SURROGATE),
                f"{key} is {value:g}, but the ratio of {_SURROGATE} {surrogate} is the geometric"
                " mean over the tokens of a row, which stays so close to 1 that this clip has no"
                f" effect: set {key} to null (3e-4 below, 4e-4 above) or to at most"
                f" {MAX_ROW_RATIO_CLIP:g}",
            )
    if loss.ratio_clip_c is not None and surrogate in ("cispo", "reinforce"):
        reason = "has no ratio"
        if surrogate == "cispo":
            reason = "has the ratio as a weight that ratio_clip_max limits already"
        yield Problem(
            ("loss_fn.ratio_clip_c", _SURROGATE),
            f"loss_fn.ratio_clip_c is {loss.ratio_clip_c:g}, but {_SURROGATE} {surrogate} {reason}:"
            f" set loss_fn.ratio_clip_c to null, or {_SURROGATE} to ppo",
        )


def _normalization_problems(loss: PolicyGradientLossConfig) -> Iterator[Problem]:
    if loss.constant_length is not None and loss.divisor != "constant":
        yield Problem(
            ("loss_fn.constant_length", _NORMALIZATION),
            f"loss_fn.constant_length is {loss.constant_length}, but {_NORMALIZATION} is"
            f" {loss.divisor}: set loss_fn.constant_length to null, or {_NORMALIZATION} to"
            " constant",
        )
    if loss.surrogate == "gspo" and loss.divisor != "sequence":
        yield Problem(
            (_NORMALIZATION, _SURROGATE),
            f"{_NORMALIZATION} is {loss.divisor}, but {_SURROGATE} gspo has one loss per row, which"
            " it would multiply by the row's number of tokens: set it to sequence or null, or"
            f" {_SURROGATE} to gspo_token",
        )


def _correction_problems(loss: PolicyGradientLossConfig) -> Iterator[Problem]:
    key = "loss_fn.importance_correction.kind"
    kind = loss.importance_correction.kind
    if loss.surrogate == "gspo" and kind in ("token_truncate", "token_mask"):
        yield Problem(
            (key, _SURROGATE),
            f"{key} is {kind}, which weights tokens, but {_SURROGATE} gspo has one ratio and"
            " therefore one weight per row: set it to sequence_truncate or sequence_mask, or"
            f" {_SURROGATE} to gspo_token",
        )
    if loss.surrogate == "reinforce" and kind == "bypass":
        yield Problem(
            (key, _SURROGATE),
            f"{key} is bypass, which corrects in the ratio, but {_SURROGATE} reinforce has no"
            " ratio: set it to token_truncate, which is a weight, or to none",
        )
