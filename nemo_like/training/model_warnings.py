"""Warnings about what a model's files say and a run does not do as they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.models.pretrained import load_model_config, load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import has_own_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_USUAL_RATES = (1e-7, 1e-4)
"""Learning rates of AdamW for full training of a model of `_LARGE_MODEL` parameters or more."""
_LARGE_MODEL = 1e9
_MAX_SMALL_FACTOR = 100.0
"""The usual maximum grows with one over the square root of the parameters, up to this factor."""
_LORA_FACTOR = 10.0
_FAR = 10.0
"""A rate is far outside if it is so many times above the maximum or below the minimum."""
_NOISE = (
    "attention_dropout",
    "hidden_dropout",
    "embedding_dropout",
    "activation_dropout",
    "resid_dropout",
    "dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "router_jitter_noise",
    "input_jitter_noise",
)
"""Random noise of transformers in training mode."""


def model_warnings(policy: PolicyConfig, *, needs_reference: bool) -> Iterator[str]:
    """Yield what the run does not do as the model's files say, and which model is the reference.

    Also yields what is only estimated for the model's type.
    """
    name = policy.model_name
    model_config = load_model_config(name)
    spec = ModelSpec.from_config(model_config, name)
    yield from spec.estimate_warnings
    yield from rate_warnings(policy, spec.num_params)
    text = model_config.get_text_config()
    noise = {key: getattr(text, key, None) for key in _NOISE}
    for key, value in noise.items():
        if isinstance(value, float) and value > 0:
            yield (
                f"config.json of {name} has {key} {value:g}, which is not applied: log-probs of one"
                " policy must be equal in all passes"
            )
    coefficient = getattr(text, "router_aux_loss_coef", None) or 0.0
    if getattr(text, "output_router_logits", False) and coefficient > 0:
        yield (
            f"config.json of {name} requests the auxiliary loss of its routers"
            f" (output_router_logits true, router_aux_loss_coef {coefficient:g}), which is not"
            " added to the loss; watch policy/expert_load_max"
        )
    directory = Path(name)
    if has_own_head(directory) and _ties_embeddings(directory, model_config):
        yield (
            f"config.json of {name} ties the embeddings, but its files have an lm_head.weight of"
            " other values: both are trained and exported, as in transformers"
        )
    adapter = policy.adapter
    if not needs_reference or adapter is None or adapter.adapter_path is None:
        return
    if adapter.reference == "base":
        yield (
            f"policy.lora.adapter_path is {adapter.adapter_path!r}, and the reference is the model"
            " without adapters, so the policy differs from it at the first step; for a run that"
            " starts at its reference set policy.lora.reference to adapter"
        )


def rate_warnings(policy: PolicyConfig, num_params: int) -> Iterator[str]:
    """Warn of learning rates far outside of the usual range, which grows for small models.

    The rate of Muon is scaled so that a rate for AdamW can be kept.
    """
    factor = _LORA_FACTOR if policy.adapter is not None else 1.0
    small = min(max(_LARGE_MODEL / num_params, 1.0) ** 0.5, _MAX_SMALL_FACTOR)
    low, high = _USUAL_RATES[0] * factor, _USUAL_RATES[1] * factor * small
    optimizer = policy.optimizer
    for key, rate in (("lr", optimizer.lr), ("muon_lr", optimizer.muon_lr)):
        if rate is None or low / _FAR <= rate <= high * _FAR:
            continue
        effect = "the loss will probably diverge" if rate > high else "the weights hardly change"
        kind = "LoRA" if policy.adapter is not None else "full training"
        yield (
            f"policy.optimizer.{key} is {rate:g}, and {effect}: usual for {kind} of"
            f" {num_params:,} parameters is {low:.2g} to {high:.2g}"
        )


def encoder_warnings(policy: PolicyConfig, encoder: ChatEncoder) -> Iterator[str]:
    """Warn of a tokenizer without a chat template."""
    if not encoder.template.exists:
        yield (
            f"the tokenizer of {policy.tokenizer_name or policy.model_name} has no chat template:"
            " the turns of a conversation are only separated by line breaks or end tokens, and"
            " nemo-like chat refuses the model; set policy.chat_template=FILE"
        )


def history_warnings(environment: EnvironmentConfig, encoder: ChatEncoder) -> Iterator[str]:
    """Warn of prompts of programs that a chat server without a record would not send."""
    if not environment.is_program or environment.history != "exact":
        return
    thought, answer = "<think>\nqzthought\n</think>\n\n", "qzanswer"
    turns = [("user", "qzuser"), ("assistant", thought + answer), ("user", "qzuser")]
    with suppress(ConfigError):
        text = encoder.render_prompt([{"role": role, "content": each} for role, each in turns])
        if answer in text and "qzthought" not in text:
            yield (
                "environment.history is exact, but the chat template removes the reasoning of"
                f" earlier turns: a chat server shows {answer!r} where the model is trained after"
                f" {thought + answer!r}. Set environment.history to template to train the prompts"
                " of such a server"
            )


def _ties_embeddings(directory: Path, model_config: PretrainedConfig) -> bool:
    """Return the value in config.json, or the default of its type without one."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return bool(content.get("tie_word_embeddings", type(model_config)().tie_word_embeddings))


def check_new_tokens(policy: PolicyConfig, encoder: ChatEncoder) -> None:
    """Raise ConfigError if adapters would leave the embeddings of new tokens untrained.

    New are tokens of `policy.tokenizer_name` that the model's own tokenizer does not have.
    """
    if policy.adapter is None or policy.tokenizer_name is None:
        return
    try:
        known = load_tokenizer(policy.model_name).get_vocab()
    except (OSError, ValueError):
        return
    new = sorted(encoder.tokenizer.get_vocab().keys() - known.keys())
    if new:
        raise ConfigError(
            f"policy.tokenizer_name has {counted(len(new), 'token')} that the tokenizer of"
            f" policy.model_name does not have, such as {new[0]!r}. Adapters do not train"
            " embeddings, so these tokens would stay random: set policy.lora.enabled=false, or"
            " train them first without adapters and continue from that model"
        )
