"""Keys of NeMo RL's GRPO, SFT and reward model configs that are not keys of the schema."""

from __future__ import annotations

from nemo_like.config.foreign_distillation import NEMO_RL_DISTILLATION
from nemo_like.config.foreign_entries import (
    ADAMW,
    DATASET,
    KEEP_ALL,
    LAST_ROWS,
    NO_OFFLOAD,
    ONLY_ADAMW,
    OPTIMIZERS,
    RECOMPUTED,
    REWARD,
    TRACKERS,
    WSD_SHAPES,
    Entry,
    Obsolete,
    Unsupported,
    obsolete,
    to,
    unsupported,
)
from nemo_like.config.foreign_generation import NEMO_RL_GENERATION
from nemo_like.config.foreign_lora import NEMO_RL_LORA
from nemo_like.config.foreign_reward import NEMO_RL_REWARD
from nemo_like.config.foreign_reward_training import NEMO_RL_REWARD_TRAINING, NEMO_RL_SAME_KEYS

_SCHEDULER = (
    "write policy.scheduler as a section with kind, warmup_steps, decay_steps and min_ratio"
)
_MEGATRON = "this Megatron setting has no counterpart"
_DTENSOR = "this DTensor setting has no counterpart"
_IS_KIND = "loss_fn.importance_correction.kind"
_LENGTH = "write the limit in policy.max_total_sequence_length"
_MAX_LENGTH = "${policy.max_total_sequence_length}"

_JOBS: dict[str, Entry] = {
    "grpo.seed": to("seed"),
    "sft.seed": to("seed"),
    "grpo.normalize_rewards": to(
        "grpo.advantage.normalize",
        values={"true": "group_std", "false": "none"},
        note="leave_one_out_std is the form that goes with a leave-one-out baseline",
    ),
    "grpo.use_leave_one_out_baseline": to(
        "grpo.advantage.baseline", values={"true": "leave_one_out", "false": "group_mean"}
    ),
    "grpo.adv_estimator.normalize_rewards": to(
        "grpo.advantage.normalize",
        values={"true": "group_std", "false": "none", "${grpo.normalize_rewards}": None},
    ),
    "grpo.adv_estimator.use_leave_one_out_baseline": to(
        "grpo.advantage.baseline",
        values={
            "true": "leave_one_out",
            "false": "group_mean",
            "${grpo.use_leave_one_out_baseline}": None,
        },
    ),
    **unsupported(
        "there is no other estimator than that of GRPO", "grpo.adv_estimator.name", off=("grpo",)
    ),
    "grpo.max_val_samples": to("data.max_validation_rows"),
    **unsupported("this setting of the advantage has no counterpart", "grpo.adv_estimator"),
    **obsolete("grpo.val_batch_size", "sft.val_global_batch_size", "sft.val_micro_batch_size"),
    **unsupported("rollouts have one turn", "grpo.max_rollout_turns", off=("1",)),
    **unsupported("GRPO counts steps, in grpo.max_num_steps", "grpo.max_num_epochs"),
    **unsupported(
        "the period, the start and the end decide when validation runs",
        "grpo.val_start_at",
        "sft.val_start_at",
        off=("-1", "0"),
    ),
    # A run with validation data always validates at its end.
    **obsolete("grpo.val_at_end", "sft.val_at_end"),
    "grpo.val_num_generations_per_prompt": to("grpo.val_num_samples"),
    **unsupported(
        "write the number of rows in data.max_validation_rows", "sft.val_batches", off=("-1",)
    ),
    **unsupported(
        "a run stops early without progress and not at a value; see early_stopping.metric and"
        " early_stopping.patience",
        "grpo.stop_at_validation_metric",
        "grpo.stop_at_validation_threshold",
    ),
    **unsupported(
        "advantages are not clipped", "grpo.advantage_clip_low", "grpo.advantage_clip_high"
    ),
    "grpo.overlong_filtering": to("grpo.overlong.filter", values={"true": "true", "false": None}),
    "grpo.use_dynamic_sampling": to(
        "grpo.dynamic_sampling.enabled", values={"true": "true", "false": None}
    ),
    "grpo.dynamic_sampling_max_gen_batches": to(
        "grpo.dynamic_sampling.max_refills",
        note="minus 1: the first prompts of a step are not counted",
        switch="grpo.use_dynamic_sampling",
    ),
    **unsupported(
        "a step samples for as many prompts as it trains on, and refills as many as it lacks",
        "grpo.batch_multiplier",
        off=("1",),
    ),
    **unsupported(
        "the overlong penalty has the keys grpo.overlong.penalty_buffer and"
        " grpo.overlong.penalty_factor; other shaping is a function in reward.functions",
        "grpo.reward_shaping",
        "grpo.reward_scaling",
        "reward_penalties",
        "grpo.invalid_tool_call_advantage",
        "grpo.malformed_thinking_advantage",
    ),
    **unsupported(
        "no rows are dropped by their log-prob error", "grpo.seq_logprob_error_threshold"
    ),
    "sft.only_unmask_final": to("data.train_on", values={"true": "last", "false": None}),
}

_LOSS: dict[str, Entry] = {
    "loss_fn.token_level_loss": to(
        "loss_fn.normalization", values={"true": "token", "false": "sequence"}
    ),
    **unsupported(
        "the KL is not clamped", "loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"
    ),
    "loss_fn.use_importance_sampling_correction": to(
        _IS_KIND,
        values={"false": None},
        note="weights have bounds: token_truncate with a high upper bound is the nearest",
    ),
    "loss_fn.truncated_importance_sampling_type": to(
        _IS_KIND,
        values={
            "null": None,
            "tis": "token_truncate",
            "icepop": "token_mask",
            "seq-mask-tis": "sequence_mask",
        },
    ),
    "loss_fn.truncated_importance_sampling_ratio": to(
        "loss_fn.importance_correction.upper", values={"null": None, "*": "*"}
    ),
    "loss_fn.truncated_importance_sampling_ratio_min": to(
        "loss_fn.importance_correction.lower", values={"null": None, "*": "*"}
    ),
    **unsupported(
        "the KL to the reference has no importance weights",
        "loss_fn.use_on_policy_kl_approximation",
    ),
    "loss_fn.sequence_level_importance_ratios": to(
        "loss_fn.surrogate", values={"true": "gspo", "false": None}
    ),
    "loss_fn.use_cispo": to("loss_fn.surrogate", values={"true": "cispo", "false": None}),
    "loss_fn.disable_ppo_ratio": to(
        "loss_fn.surrogate", values={"true": "reinforce", "false": None}
    ),
    "loss_fn.use_kl_in_reward": to(
        "loss_fn.reference_policy_kl_in", values={"true": "reward", "false": None}
    ),
    # The plan of a step decides it.
    **obsolete("loss_fn.force_on_policy_ratio"),
    **unsupported("the loss has no such term", "loss_fn.positive_example_nll_weight", off=("0",)),
}

_POLICY: dict[str, Entry] = {
    "policy.tokenizer.name": to(
        "policy.tokenizer_name", values={"${policy.model_name}": None, "*": "*"}
    ),
    "policy.tokenizer.chat_template": to("policy.chat_template", note="the path of a Jinja file"),
    **unsupported("chat templates get no arguments", "policy.tokenizer.chat_template_kwargs"),
    **obsolete("policy.tokenizer.use_fastokens", "policy.make_sequence_length_divisible_by"),
    **unsupported("the model's own configuration is used", "policy.hf_config_overrides"),
    **unsupported(
        NO_OFFLOAD, "policy.offload_optimizer_for_logprob", "policy.dtensor_cfg.cpu_offload"
    ),
    **unsupported("there is no draft model", "policy.draft"),
    "policy.optimizer.kwargs.lr": to("policy.optimizer.lr"),
    "policy.optimizer.kwargs.weight_decay": to("policy.optimizer.weight_decay"),
    "policy.optimizer.kwargs.betas": to(
        "policy.optimizer.beta1", "policy.optimizer.beta2", note="one number each"
    ),
    "policy.optimizer.kwargs.eps": to("policy.optimizer.eps"),
    **obsolete("policy.optimizer.kwargs.foreach", "policy.optimizer.kwargs.fused"),
    **unsupported(ONLY_ADAMW, "policy.optimizer.kwargs"),
    **unsupported(_SCHEDULER, "policy.scheduler.name", "policy.scheduler.kwargs"),
    "policy.dtensor_cfg.enabled": to("policy.engine", values={"true": "dtensor"}),
    "policy.dtensor_cfg.sequence_parallel": to("parallel.sequence"),
    "policy.dtensor_cfg.activation_checkpointing": to(
        "policy.activation_checkpointing", values=RECOMPUTED
    ),
    "policy.dtensor_cfg.tensor_parallel_size": to("parallel.tensor"),
    "policy.dtensor_cfg.context_parallel_size": to("parallel.context"),
    "policy.dtensor_cfg.expert_parallel_size": to("parallel.expert"),
    **obsolete("policy.dtensor_cfg._v2"),
    "policy.dtensor_cfg.dp_replicate_size": to("parallel.replicas"),
    **NEMO_RL_LORA,
    **unsupported(_DTENSOR, "policy.dtensor_cfg"),
    "policy.megatron_cfg.enabled": to("policy.engine", values={"true": "megatron"}),
    "policy.megatron_cfg.sequence_parallel": to("parallel.sequence"),
    "policy.megatron_cfg.activation_checkpointing": to(
        "policy.activation_checkpointing", values=RECOMPUTED
    ),
    "policy.megatron_cfg.tensor_model_parallel_size": to("parallel.tensor"),
    "policy.megatron_cfg.pipeline_model_parallel_size": to("parallel.pipeline"),
    "policy.megatron_cfg.context_parallel_size": to("parallel.context"),
    "policy.megatron_cfg.expert_model_parallel_size": to("parallel.expert"),
    **unsupported(ONLY_ADAMW, "policy.megatron_cfg.optimizer.optimizer", off=ADAMW),
    "policy.megatron_cfg.optimizer.lr": to("policy.optimizer.lr"),
    "policy.megatron_cfg.optimizer.weight_decay": to("policy.optimizer.weight_decay"),
    "policy.megatron_cfg.optimizer.adam_beta1": to("policy.optimizer.beta1"),
    "policy.megatron_cfg.optimizer.adam_beta2": to("policy.optimizer.beta2"),
    "policy.megatron_cfg.optimizer.adam_eps": to("policy.optimizer.eps"),
    "policy.megatron_cfg.optimizer.clip_grad": to(
        "policy.max_grad_norm", values={"${policy.max_grad_norm}": None, "*": "*"}
    ),
    "policy.megatron_cfg.scheduler.lr_decay_style": to(
        "policy.scheduler.kind",
        values={"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "wsd"},
    ),
    "policy.megatron_cfg.scheduler.lr_wsd_decay_style": to(
        "policy.scheduler.wsd_decay_shape", values=WSD_SHAPES
    ),
    "policy.megatron_cfg.scheduler.lr_wsd_decay_iters": to("policy.scheduler.wsd_decay_steps"),
    "policy.megatron_cfg.scheduler.lr_warmup_iters": to("policy.scheduler.warmup_steps"),
    "policy.megatron_cfg.scheduler.lr_decay_iters": to("policy.scheduler.decay_steps"),
    **unsupported(_MEGATRON, "policy.megatron_cfg"),
}

_DATA: dict[str, Entry] = {
    **unsupported(
        _LENGTH, "data.max_input_seq_length", off=("${policy.max_total_sequence_length}",)
    ),
    **obsolete("data.num_workers"),
    **unsupported(
        "the chat template decides on the tokens around a text",
        "data.add_bos",
        "data.add_eos",
        off=("true",),
    ),
    **unsupported(
        "the chat template decides on the tokens around a text", "data.add_generation_prompt"
    ),
    **unsupported(
        "a step has rows of all sets, by data.train_weights", "data.use_multiple_dataloader"
    ),
    "data.train.data_path": to("data.train_path"),
    "data.train.input_key": to("data.columns.prompt"),
    "data.train.output_key": to("data.columns.answer", sft="data.columns.completion"),
    "data.validation.data_path": to("data.validation_path"),
    "data.train_data_path": to("data.train_path"),
    "data.val_data_path": to("data.validation_path"),
    **unsupported(DATASET, "data.train", "data.dataset_name"),
    **unsupported("validation data is read from the file data.validation_path", "data.validation"),
    **unsupported(
        "write the text in data.prompt_template", "data.prompt_file", "data.default.prompt_file"
    ),
    **unsupported(
        "write the text in data.system_prompt",
        "data.system_prompt_file",
        "data.default.system_prompt_file",
    ),
    **unsupported(
        "the format is recognised from the columns",
        "data.default",
        "data.chat_key",
        "data.system_key",
        "data.tool_key",
    ),
    **unsupported(REWARD, "env"),
}

_REST: dict[str, Entry] = {
    "checkpointing.checkpoint_dir": to("output_dir"),
    "checkpointing.keep_top_k": to("checkpointing.keep_latest", note=LAST_ROWS, null=KEEP_ALL),
    "checkpointing.checkpoint_must_save_by": to("cluster.time_limit", note="as D-HH:MM:SS"),
    **unsupported(LAST_ROWS, "checkpointing.metric_name", "checkpointing.higher_is_better"),
    **obsolete("checkpointing.model_save_format", "checkpointing.save_consolidated"),
    **unsupported(
        "checkpoints always hold the optimizer state", "checkpointing.save_optimizer", off=("true",)
    ),
    **unsupported("training starts from policy.model_name", "checkpointing.pretrained_checkpoint"),
    "logger.num_val_samples_to_print": to("logger.num_samples_shown"),
    "logger.tensorboard_enabled": to("logger.tensorboard"),
    "logger.wandb.project": to("logger.wandb_project", switch="logger.wandb_enabled"),
    "logger.mlflow.experiment_name": to("logger.mlflow_experiment", switch="logger.mlflow_enabled"),
    # The name of the project or the experiment turns the tracker on.
    **obsolete(
        "logger.log_dir",
        "logger.wandb_enabled",
        "logger.mlflow_enabled",
        "logger.wandb",
        "logger.mlflow",
        "logger.swanlab",
        "logger.gpu_monitoring",
    ),
    **unsupported(TRACKERS, "logger.swanlab_enabled"),
    **unsupported("GPUs are not monitored", "logger.monitor_gpus"),
    **obsolete("cluster.master_port_range_low", "cluster.master_port_range_high"),
    **unsupported("Ray places the workers", "cluster.segment_size"),
    **unsupported("rows go through Ray", "data_plane"),
}

NEMO_RL: dict[str, Entry] = {
    **_JOBS,
    **_LOSS,
    **_POLICY,
    **NEMO_RL_GENERATION,
    **_DATA,
    **NEMO_RL_REWARD,
    **_REST,
    **NEMO_RL_DISTILLATION,
    **NEMO_RL_REWARD_TRAINING,
}

SAME_KEYS: dict[str, tuple[type, Entry]] = {
    **NEMO_RL_SAME_KEYS,
    "policy.scheduler": (list, Unsupported(_SCHEDULER)),
    "policy.optimizer.name": (str, to("policy.optimizer.name", values={**OPTIMIZERS, "*": "*"})),
    "logger.tensorboard": (dict, Obsolete()),
    "policy.generation.backend": (
        str,
        to("policy.generation.backend", values={"hf": "hf", "*": "vllm"}),
    ),
    "policy.generation.max_new_tokens": (
        str,
        to(
            "policy.generation.max_new_tokens",
            values={_MAX_LENGTH: f"${{div:{_MAX_LENGTH},2}}", "*": "*"},
            note="the prompt counts too",
        ),
    ),
}
"""Keys of the schema that NeMo RL has too, with values of another form: (type of the value, what to
do with it).
"""

ON_WHEN_DISABLED = frozenset({"policy.generation.colocated"})
"""Sections whose `enabled: false` has a meaning of its own: generation with workers of its own."""
