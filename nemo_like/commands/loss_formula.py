"""The policy-gradient loss of a config as text: its terms, its denominator and its symbols."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.config.loss import PolicyGradientLossConfig

_CUSTOM_KEYS = ("path", "options", "logprobs")
_NO_CORRECTION = ("none", "bypass")
_KL_VALUES = {"k1": "-d", "k2": "d^2 / 2", "k3": "exp(d) - 1 - d"}


def formula_lines(config: GrpoRunConfig) -> list[str]:
    """Return the formula of the loss, its terms and its symbols, one line each."""
    loss = config.loss_fn
    if loss.path is not None:
        lines = [f"the loss is {loss.path}, called with {loss.options or 'no options'}"]
        if loss.logprobs:
            lines.append(f"computed before training: {', '.join(loss.logprobs)}")
        return lines
    terms = ["S_t"]
    if loss.importance_correction.has_weights:
        terms = ["w_t S_t"]
    if loss.has_kl_in_loss:
        terms.append(f"+ {loss.reference_policy_kl_penalty:g} KL_t")
    if loss.entropy_coefficient > 0:
        terms.append(f"- {loss.entropy_coefficient:g} H_t")
    lines = [
        f"loss = {_normalized(config)}",
        f"loss_t = {' '.join(terms)}",
        "",
        *_surrogate_lines(config),
        *_weight_lines(loss),
    ]
    if loss.has_kl_in_loss:
        kind = loss.reference_policy_kl_type
        lines.append(
            f"KL_t = {_KL_VALUES[kind]} ({kind}) with d = l_ref,t - l_t, limited to [-10, 10]; its"
            " gradient is -d, limited as well"
        )
    if loss.entropy_coefficient > 0:
        lines.append("H_t = entropy of the unfiltered distribution of the policy")
    return [*lines, "", *_symbol_lines(config)]


def keys_without_effect(config: GrpoRunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key of `loss_fn`, reason) of every key that the other keys make ineffective."""
    loss = config.loss_fn
    if loss.path is not None:
        yield "all keys but path, options and logprobs", f"the loss is {loss.path}"
        return
    for name in _CUSTOM_KEYS[1:]:
        yield name, "path is null, the loss is a built-in one"
    is_single_step = not config.has_many_optimizer_steps
    has_ratio_of_one = is_single_step and loss.importance_correction.kind != "bypass"
    for name in ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"):
        if loss.surrogate == "reinforce":
            yield name, "surrogate reinforce has no ratio"
        elif name == "ratio_clip_c" and loss.ratio_clip_c is None:
            continue
        elif has_ratio_of_one:
            yield name, "each rollout has one optimizer step, so that every ratio is 1"
    if loss.divisor != "constant":
        yield "constant_length", f"normalization is {loss.divisor}"
    if loss.has_kl_in_reward:
        yield "reference_policy_kl_type", "the KL in the reward is k1"
    elif not loss.has_kl_in_loss:
        for name in ("reference_policy_kl_type", "reference_policy_kl_in"):
            yield name, "reference_policy_kl_penalty is 0"
    if loss.entropy_coefficient > 0:
        yield "log_entropy", "the entropy bonus logs the entropy already"
    kind = loss.importance_correction.kind
    if kind in _NO_CORRECTION:
        for name in ("lower", "upper"):
            yield f"importance_correction.{name}", f"kind {kind} has no weights to bound"


def _normalized(config: GrpoRunConfig) -> str:
    loss = config.loss_fn
    if loss.divisor == "token":
        return "1/N sum over trained tokens t of loss_t"
    if loss.divisor == "sequence":
        return "1/R sum over rows i of 1/n_i sum over trained tokens t of row i of loss_t"
    length = loss.constant_length or config.policy.generation.max_new_tokens
    return f"1/(R x {length}) sum over trained tokens t of loss_t"


def _surrogate_lines(config: GrpoRunConfig) -> Iterator[str]:
    loss = config.loss_fn
    if loss.surrogate == "reinforce":
        yield "S_t = -A l_t (reinforce)"
        return
    is_bypass = loss.importance_correction.kind == "bypass"
    previous = "l_gen,t" if is_bypass else "l_prev,t"
    lowest, highest = loss.ratio_bounds
    if loss.surrogate == "cispo":
        clipped = f"min(r_t, {highest:g})"
        if lowest is not None:
            clipped = f"clip(r_t, {lowest:g}, {highest:g})"
        yield f"S_t = -sg({clipped}) A l_t (cispo); sg: no gradient through the ratio"
        yield f"r_t = exp(l_t - {previous})"
        return
    ratio = "s_i" if loss.surrogate == "gspo" else "r_t"
    yield (
        f"S_t = max(-A {ratio}, -A clip({ratio}, {lowest:g}, {highest:g})) ({loss.surrogate});"
        " no gradient where the clipped value is the larger one"
    )
    if loss.ratio_clip_c is not None:
        yield f"S_t is at most -{loss.ratio_clip_c:g} A where A < 0 (dual clip)"
    row_ratio = f"s_i = exp(1/n_i sum over the trained tokens of row i of (l_t - {previous}))"
    if loss.surrogate == "gspo":
        yield row_ratio
    elif loss.surrogate == "gspo_token":
        yield "r_t = sg(s_i) exp(l_t - sg(l_t)), the value of s_i with the gradient of l_t"
        yield row_ratio
    else:
        yield f"r_t = exp(l_t - {previous})"


def _weight_lines(loss: PolicyGradientLossConfig) -> Iterator[str]:
    correction = loss.importance_correction
    if not correction.has_weights:
        return
    lower, upper = correction.bounds
    weight = "exp(l_prev,t - l_gen,t)"
    product = "exp(sum over row i of (l_prev,t - l_gen,t))"
    mean = "exp(1/n_i sum over row i of (l_prev,t - l_gen,t))"
    interval = f"[{lower:g}, {upper:g}]" if lower is not None else ""
    if correction.kind == "token_truncate":
        yield f"w_t = {_truncated(weight, lower, upper)}, without gradient"
    elif correction.kind == "sequence_truncate":
        yield f"w_t = {_truncated(product, lower, upper)}, without gradient"
    elif correction.kind == "token_mask":
        yield f"w_t = {weight} if it is in {interval}, else 0; without gradient"
    elif loss.surrogate == "gspo":
        yield f"w_t = {mean} if it is in {interval}, else 0; without gradient"
    else:
        yield f"w_t = {weight} if {mean} is in {interval}, else 0; without gradient"


def _truncated(weight: str, lower: float | None, upper: float | None) -> str:
    if lower is None:
        return f"min({weight}, {upper:g})"
    return f"clip({weight}, {lower:g}, {upper:g})"


def _symbol_lines(config: GrpoRunConfig) -> Iterator[str]:
    """Yield the meaning of each symbol that the formula has."""
    loss = config.loss_fn
    kind = loss.importance_correction.kind
    temperature = config.policy.generation.temperature
    yield (
        f"l_t: log-prob of the sampled token under the policy, at temperature {temperature:g} and"
        " after the filters of policy.generation, if any"
    )
    has_prev = kind != "bypass" and (
        loss.surrogate != "reinforce" or loss.importance_correction.has_weights
    )
    if has_prev and not config.has_many_optimizer_steps:
        yield "l_prev,t: l_t without gradient, since each rollout has one optimizer step"
    elif has_prev:
        yield "l_prev,t: l_t before the first optimizer step of the rollout, from a separate pass"
    if kind != "none":
        yield "l_gen,t: log-prob that the generator recorded when it sampled the token"
    if loss.needs_reference:
        yield "l_ref,t: log-prob under the reference, unfiltered"
    yield from _advantage_lines(config)
    if loss.divisor == "token":
        yield "N: trained tokens of the optimizer step over all data-parallel ranks"
    else:
        yield "R: rows of the optimizer step with a trained token, over all data-parallel ranks"
    has_mean_weight = kind == "sequence_mask"
    if loss.divisor == "sequence" or loss.has_row_ratio or has_mean_weight:
        yield "n_i: trained tokens of row i"


def _advantage_lines(config: GrpoRunConfig) -> Iterator[str]:
    """Yield where the advantage A of the formula comes from."""
    advantage = config.grpo.advantage
    keys = f"baseline {advantage.baseline}, normalize {advantage.normalize}"
    if advantage.components == "separate":
        keys += ", components separate"
    if not config.has_kl_in_reward:
        if advantage.whiten != "none":
            keys += f", whiten {advantage.whiten}"
        yield f"A: advantage of the row (grpo.advantage: {keys})"
        return
    is_bypass = config.loss_fn.importance_correction.kind == "bypass"
    sampled = "l_gen,s" if is_bypass else "l_old,s"
    whitened = (
        ", whitened over the trained tokens of the step" if advantage.whiten != "none" else ""
    )
    penalty = config.loss_fn.reference_policy_kl_penalty
    yield (
        f"A: advantage of the token, A_row - {penalty:g} sum over"
        f" trained tokens s >= t of the row of ({sampled} - l_ref,s){whitened}; without gradient"
    )
    yield f"A_row: advantage of the row (grpo.advantage: {keys})"
    if not is_bypass:
        yield "l_old,s: l_s before the first optimizer step of the rollout, from a separate pass"
