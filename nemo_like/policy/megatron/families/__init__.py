"""The model families of the Megatron engine."""

from __future__ import annotations

from nemo_like.config.errors import ConfigError
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families.deepseek_v3 import DeepseekV3
from nemo_like.policy.megatron.families.dense import Qwen2, Qwen3
from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.families.gpt_oss import GptOss
from nemo_like.policy.megatron.families.mixtral import Mixtral
from nemo_like.policy.megatron.families.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DeepseekV3(),
    "gpt_oss": GptOss(),
    "llama": Family(),
    # Where it has a sliding window, every layer has it (`ModelSpec.windows`).
    "mistral": Family(),
    "mixtral": Mixtral(),
    "qwen2": Qwen2(),
    "qwen3": Qwen3(),
    "qwen3_moe": Qwen3Moe(),
}
"""By the `model_type` of config.json."""


def family_of(spec: ModelSpec, model_name: str) -> Family:
    """Return the family of a model; `model_name` is for the message.

    Raises ConfigError for a model that this engine does not compute as transformers does.
    """
    family = FAMILIES.get(spec.model_type)
    if family is None:
        supported = ", ".join(FAMILIES)
        problems = [f"model_type {spec.model_type} (supported: {supported})"]
    else:
        problems = family.problems(spec)
    if family is None or problems:
        raise ConfigError(
            f"policy.model_name={model_name} has {' and '.join(problems)}, which"
            " policy.engine=megatron does not support; use policy.engine=dtensor, or another model"
        )
    return family
