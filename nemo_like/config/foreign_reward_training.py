"""Keys of the training of reward models: of NeMo RL's `rm.yaml` and of TRL's `RewardConfig`."""

from __future__ import annotations

from nemo_like.config.foreign_entries import (
    DTYPES,
    NO_OFFLOAD,
    RECOMPUTED,
    Entry,
    obsolete,
    to,
    unsupported,
)

_SPLIT = "the split is part of the path: hf://NAME?split=SPLIT"
_TOKENS = "special tokens are those of the tokenizer's files (policy.tokenizer_name)"
_CONFIGURATION = "the model's own configuration is used"

NEMO_RL_REWARD_TRAINING: dict[str, Entry] = {
    "rm.seed": to("seed"),
    **obsolete("rm.val_global_batch_size", "rm.val_micro_batch_size"),
    **unsupported(
        "write the number of rows in data.max_validation_rows", "rm.val_batches", off=("-1",)
    ),
    **unsupported(
        "the period, the start and the end decide when validation runs",
        "rm.val_start_at",
        off=("-1", "0"),
    ),
    # A run with validation data always validates at its end.
    **obsolete("rm.val_at_end"),
    # `nemo-like rm` trains no other models.
    **obsolete("policy.reward_model_cfg.enabled"),
    **unsupported(
        "the loss is that of Bradley and Terry",
        "policy.reward_model_cfg.reward_model_type",
        off=("bradley_terry",),
    ),
    **unsupported("this setting of the reward model has no counterpart", "policy.reward_model_cfg"),
    "policy.activation_checkpointing_enabled": to(
        "policy.activation_checkpointing", values=RECOMPUTED
    ),
    "data.chosen_key": to("data.columns.chosen"),
    "data.rejected_key": to("data.columns.rejected"),
    **unsupported(
        "validation files have names in data.validation_sets; one may be data.validation_path",
        "data.val_data_paths",
    ),
    **unsupported(_SPLIT, "data.train_split", "data.val_split"),
}

NEMO_RL_SAME_KEYS: dict[str, tuple[type, Entry]] = {
    "rm.max_num_steps": (str, to("rm.max_num_steps", values={"-1": None, "*": "*"}))
}
"""See `foreign_nemo_rl.SAME_KEYS`."""

TRL_REWARD_TRAINING: dict[str, Entry] = {
    "center_rewards_coefficient": to("rm.center_coefficient"),
    **unsupported("dropout is always off", "disable_dropout", off=("true",)),
    **unsupported(_TOKENS, "eos_token", "pad_token"),
    **unsupported(NO_OFFLOAD, "activation_offloading"),
    "model_init_kwargs.dtype": to("policy.precision", values=DTYPES),
    "model_init_kwargs.torch_dtype": to("policy.precision", values=DTYPES),
    **obsolete("model_init_kwargs.attn_implementation", "model_init_kwargs.device_map"),
    # A reward model has one label.
    **unsupported(_CONFIGURATION, "model_init_kwargs.num_labels", off=("1",)),
    **unsupported(_CONFIGURATION, "model_init_kwargs"),
    **unsupported(
        "download that revision and give its directory in policy.model_name",
        "model_revision",
        off=("main",),
    ),
    **unsupported("rows are read by their position in a file", "dataset_streaming"),
    **obsolete("ignore_bias_buffers", "pad_to_multiple_of"),
}
