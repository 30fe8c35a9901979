"""Which tool a config of another tool is of, and which job it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.config.foreign_entries import canonical

OTHER_TOOLS: dict[str, tuple[str, set[str]]] = {
    "axolotl": ("sft", {"base_model", "sequence_len", "micro_batch_size", "adapter", "num_epochs"}),
    "LLaMA-Factory": ("sft", {"finetuning_type", "stage", "cutoff_len", "template", "lora_target"}),
    "OpenRLHF": ("grpo", {"pretrain", "micro_train_batch_size", "prompt_max_len", "zero_stage"}),
    "prime-rl": ("grpo", {"orchestrator", "inference", "seq_len", "inference_gpu_ids"}),
}
"""Tools without a table: the usual job, and keys of which a config of the tool has at least two."""


def guess_kind(tree: Mapping[str, Any]) -> str | None:
    """Return the job of a config of verl, TRL or Cosmos-RL, by keys that only one job has.

    Also for tools without a table. None if there are none.
    """
    other = other_tool(tree)
    if other is not None:
        return OTHER_TOOLS[other][0]
    grpo = {
        "actor_rollout_ref",
        "algorithm",
        "critic",
        "rollout",
        "num_generations",
        "max_completion_length",
        "reward_funcs",
    }
    sft = {
        "optim",
        "packing",
        "assistant_only_loss",
        "completion_only_loss",
        "max_length",
        "max_seq_length",
    }
    if {"distillation", "teacher_model_name_or_path"} & set(tree):
        return "distill"
    policy = value_at(tree, "train.train_policy.type")
    if policy in ("sft", "grpo"):
        return policy
    if grpo & set(tree):
        return "grpo"
    is_reward_model = canonical(tree.get("lora_task_type")) == "seq_cls"
    if is_reward_model or "center_rewards_coefficient" in tree:
        return "rm"
    return "sft" if sft & set(tree) else None


def other_tool(tree: Mapping[str, Any]) -> str | None:
    """Return the tool without a table whose keys the config has, or None."""
    counts = {name: len(keys & set(tree)) for name, (_, keys) in OTHER_TOOLS.items()}
    name = max(counts, key=lambda each: counts[each])
    return name if counts[name] >= 2 else None


def value_at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value of a dotted key; None if it is not set."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def has_key(tree: Mapping[str, Any], path: str) -> bool:
    """Return True if the key is set, also to null."""
    parent, _, name = path.rpartition(".")
    section = value_at(tree, parent) if parent else tree
    return isinstance(section, Mapping) and name in section
