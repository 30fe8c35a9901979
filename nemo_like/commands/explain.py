"""`nemo-like explain loss`: the formula that a config selects, and the keys without effect.

docs/losses.md explains the symbols.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_any_config
from nemo_like.config.errors import ConfigError
from nemo_like.console import say

_ROW_RATIO = "s_i = exp(1/n_i sum over the trained tokens of row i of (l_t - PREV))"
_SURROGATES = {
    "ppo": ("max(-A r_t, -A clip(r_t, LOW, HIGH))", "r_t = exp(l_t - PREV)"),
    "gspo": ("max(-A s_i, -A clip(s_i, LOW, HIGH))", _ROW_RATIO),
    "gspo_token": (
        "max(-A r_t, -A clip(r_t, LOW, HIGH))",
        f"r_t = sg(s_i) exp(l_t - sg(l_t)), {_ROW_RATIO}",
    ),
    "cispo": ("-sg(clip(r_t, LOW, HIGH)) A l_t", "r_t = exp(l_t - PREV)"),
    "reinforce": ("-A l_t", ""),
}
"""S_t of each surrogate, and its ratio; sg: without gradient."""
_TOKEN_WEIGHT = "exp(l_prev,t - l_gen,t)"
_ROW_MEAN = "exp(1/n_i sum over row i of (l_prev,t - l_gen,t))"
_WEIGHTS = {
    "token_truncate": f"clip({_TOKEN_WEIGHT}, LOW, HIGH)",
    "sequence_truncate": "clip(exp(sum over row i of (l_prev,t - l_gen,t)), LOW, HIGH)",
    "token_mask": f"{_TOKEN_WEIGHT} if it is in [LOW, HIGH], else 0",
    "sequence_mask": f"{_TOKEN_WEIGHT} if {_ROW_MEAN} is in [LOW, HIGH], else 0",
    "gspo": f"{_ROW_MEAN} if it is in [LOW, HIGH], else 0",
}
"""w_t of each kind of `importance_correction` with weights; `gspo` is `sequence_mask` with
a ratio per row."""
_CUSTOM_KEYS = ("options", "logprobs")
_NO_CORRECTION = ("none", "bypass")
_KL_VALUES = {"k1": "-d", "k2": "d^2 / 2", "k3": "exp(d) - 1 - d"}
_DIVISORS = {
    "token": "1/N sum over trained tokens t of loss_t",
    "sequence": "1/R sum over rows i of 1/n_i sum over trained tokens t of row i of loss_t",
    "constant": "1/(R x LENGTH) sum over trained tokens t of loss_t",
}


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; return the exit code. Raises ConfigError."""
    config = load_any_config(arguments.config, arguments.overrides, arguments.kind)
    if not isinstance(config, GrpoRunConfig):
        raise ConfigError(
            f"`nemo-like explain loss` explains the loss of a grpo config, and this is a config for"
            f" {config.kind}; docs/numerics.md has the losses of sft, dpo and rm"
        )
    say(explain_loss(config))
    return 0


def explain_loss(config: GrpoRunConfig) -> str:
    """Return the explanation of the loss of a config as text."""
    unused = [f"{key}: {reason}" for key, reason in keys_without_effect(config)] or ["none"]
    lines = ["loss:", *(f"  {line}" for line in formula_lines(config))]
    lines += ["", "keys of loss_fn without effect:", *(f"  {line}" for line in unused)]
    return "\n".join(lines)


def formula_lines(config: GrpoRunConfig) -> Iterator[str]:
    """Yield the formula of the loss and its terms, one line each."""
    loss = config.loss_fn
    if loss.path is not None:
        yield f"the loss is {loss.path}, called with {loss.options or 'no options'}"
        if loss.logprobs:
            yield f"computed before training: {', '.join(loss.logprobs)}"
        return
    correction = loss.importance_correction
    length = loss.constant_length or config.policy.generation.max_new_tokens
    yield f"loss = {_DIVISORS[loss.divisor].replace('LENGTH', str(length))}"
    terms = "w_t S_t" if correction.has_weights else "S_t"
    if loss.has_kl_in_loss:
        terms += f" + {loss.reference_policy_kl_penalty:g} KL_t"
    if loss.entropy_coefficient > 0:
        terms += f" - {loss.entropy_coefficient:g} H_t"
    yield f"loss_t = {terms}"
    surrogate, ratio = _SURROGATES[loss.surrogate]
    yield f"S_t = {_bounded(surrogate, loss.ratio_bounds)} ({loss.surrogate})"
    if loss.ratio_clip_c is not None:
        yield f"S_t is at most -{loss.ratio_clip_c:g} A where A < 0 (dual clip)"
    if ratio:
        yield ratio.replace("PREV", "l_gen,t" if correction.kind == "bypass" else "l_prev,t")
    if correction.has_weights:
        name = correction.kind
        if name == "sequence_mask" and loss.surrogate == "gspo":
            name = "gspo"
        yield f"w_t = {_bounded(_WEIGHTS[name], correction.bounds)}, without gradient"
    if loss.has_kl_in_loss:
        kind = loss.reference_policy_kl_type
        yield (
            f"KL_t = {_KL_VALUES[kind]} ({kind}) with d = l_ref,t - l_t, limited to [-10, 10]; its"
            " gradient is -d, limited as well"
        )
    if loss.has_kl_in_reward:
        sampled = "l_gen,s" if correction.kind == "bypass" else "l_old,s"
        yield (
            f"A = A_row - {loss.reference_policy_kl_penalty:g} sum over trained tokens s >= t of"
            f" the row of ({sampled} - l_ref,s), without gradient"
        )
    if not config.has_many_optimizer_steps and correction.kind != "bypass":
        yield "l_prev,t = l_t without gradient: each rollout has one optimizer step"


def _bounded(formula: str, bounds: tuple[float | None, float | None]) -> str:
    """Return a formula with the bounds of its ratio; None means no bound."""
    low, high = ("none" if bound is None else f"{bound:g}" for bound in bounds)
    return formula.replace("LOW", low).replace("HIGH", high)


def keys_without_effect(config: GrpoRunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key of `loss_fn`, reason) of every key that the other keys make ineffective."""
    loss = config.loss_fn
    if loss.path is not None:
        yield "all keys but path, options and logprobs", f"the loss is {loss.path}"
        return
    for name in _CUSTOM_KEYS:
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
    kind = loss.importance_correction.kind
    if kind in _NO_CORRECTION:
        for name in ("lower", "upper"):
            yield f"importance_correction.{name}", f"kind {kind} has no weights to bound"
