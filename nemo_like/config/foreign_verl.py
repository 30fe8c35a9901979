"""Keys of verl's PPO and SFT configs that are not keys of the schema."""

from __future__ import annotations

from nemo_like.config.foreign_entries import (
    KEEP_ALL,
    NO_CRITIC,
    NO_OFFLOAD,
    ONLY_ADAMW,
    OPTIMIZERS,
    RECOMPUTED,
    REWARD,
    SCHEDULES,
    STEPS,
    TOTAL_LENGTH,
    TRACKERS,
    TRUST_CODE,
    VAL_AT_START,
    VAL_PERIOD,
    WARMUP_RATIO,
    Entry,
    obsolete,
    to,
    unsupported,
)
from nemo_like.config.foreign_generation import VERL_GENERATION
from nemo_like.config.foreign_lora import verl_lora
from nemo_like.config.foreign_reward import VERL_REWARD

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_IMPORTANCE = "loss_fn.importance_correction"
_ESTIMATORS = {"grpo": "group_mean", "rloo": "leave_one_out"}
_ROW_CAP = {"-1": None, "*": "*"}
_NO_PERIOD = {"-1": "0", "*": "*"}
_DROPPED = "the format is recognised from the columns"
_PROMPT_LENGTH = f"if filter_overlong_prompts is true; else delete it: {TOTAL_LENGTH}"


def _model(prefix: str) -> dict[str, Entry]:
    return {
        f"{prefix}.path": to("policy.model_name"),
        f"{prefix}.partial_pretrain": to("policy.model_name"),
        f"{prefix}.tokenizer_path": to("policy.tokenizer_name"),
        f"{prefix}.custom_chat_template": to(
            "policy.chat_template", note="the path of a Jinja file"
        ),
        f"{prefix}.enable_gradient_checkpointing": to(
            "policy.activation_checkpointing", values=RECOMPUTED
        ),
        f"{prefix}.use_remove_padding": to("policy.sequence_packing.enabled"),
        **unsupported(TRUST_CODE, f"{prefix}.trust_remote_code", f"{prefix}.external_lib"),
        **unsupported(NO_OFFLOAD, f"{prefix}.enable_activation_offload", f"{prefix}.fsdp_config"),
        **verl_lora(prefix),
        **obsolete(
            f"{prefix}.use_shm",
            f"{prefix}.use_liger",
            f"{prefix}.use_fused_kernels",
            f"{prefix}.fused_kernel_options",
            f"{prefix}.strategy",
        ),
        **unsupported("the model's own configuration is used", f"{prefix}.override_config"),
        **unsupported("this setting of the model has no counterpart", prefix),
    }


def _optimizer(prefix: str) -> dict[str, Entry]:
    return {
        f"{prefix}.lr": to("policy.optimizer.lr"),
        f"{prefix}.weight_decay": to("policy.optimizer.weight_decay"),
        f"{prefix}.betas": to(
            "policy.optimizer.beta1", "policy.optimizer.beta2", note="one number each"
        ),
        f"{prefix}.clip_grad": to("policy.max_grad_norm"),
        f"{prefix}.lr_warmup_steps": to("policy.scheduler.warmup_steps", values=_ROW_CAP),
        f"{prefix}.min_lr_ratio": to("policy.scheduler.min_ratio"),
        f"{prefix}.lr_scheduler_type": to("policy.scheduler.kind", values=SCHEDULES),
        f"{prefix}.lr_scheduler": to("policy.scheduler.kind", values=SCHEDULES),
        f"{prefix}.warmup_style": to("policy.scheduler.kind", values=SCHEDULES),
        f"{prefix}.total_training_steps": to("policy.scheduler.decay_steps", values=_ROW_CAP),
        f"{prefix}.optimizer": to("policy.optimizer.name", values=OPTIMIZERS),
        **unsupported(ONLY_ADAMW, f"{prefix}.optimizer_impl", off=("torch.optim",)),
        **unsupported(
            "a cosine schedule has half a cycle; policy.scheduler.num_cycles counts restarts",
            f"{prefix}.num_cycles",
            off=("0.5",),
        ),
        **obsolete(f"{prefix}._target_"),
        **unsupported(WARMUP_RATIO, f"{prefix}.lr_warmup_steps_ratio", off=("0",)),
        **unsupported(ONLY_ADAMW, prefix),
    }


_ACTOR_KEYS: dict[str, Entry] = {
    **_optimizer(f"{_ACTOR}.optim"),
    f"{_ACTOR}.strategy": to(
        "policy.engine", values={"fsdp": "dtensor", "fsdp2": "dtensor", "megatron": "megatron"}
    ),
    f"{_ACTOR}.ppo_mini_batch_size": to(
        "policy.train_global_batch_size", note="counted in rows: prompts x generations per prompt"
    ),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": to("policy.train_micro_batch_size"),
    f"{_ACTOR}.ppo_micro_batch_size": to("policy.train_micro_batch_size", note="per worker"),
    f"{_ACTOR}.use_dynamic_bsz": to("policy.sequence_packing.enabled"),
    f"{_ACTOR}.use_remove_padding": to("policy.sequence_packing.enabled"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": to("policy.sequence_packing.train_mb_tokens"),
    f"{_ACTOR}.clip_ratio_low": to("loss_fn.ratio_clip_min"),
    f"{_ACTOR}.clip_ratio_high": to("loss_fn.ratio_clip_max"),
    f"{_ACTOR}.clip_ratio": to(
        "loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", note="both the same number"
    ),
    f"{_ACTOR}.clip_ratio_c": to("loss_fn.ratio_clip_c"),
    f"{_ACTOR}.loss_agg_mode": to(
        "loss_fn.normalization", values={"token-mean": "token", "seq-mean-token-mean": "sequence"}
    ),
    f"{_ACTOR}.policy_loss.loss_mode": to(
        "loss_fn.surrogate", values={"vanilla": None, "gspo": "gspo", "cispo": "cispo"}
    ),
    f"{_ACTOR}.entropy_coeff": to("loss_fn.entropy_coefficient"),
    f"{_ACTOR}.kl_loss_coef": to(
        "loss_fn.reference_policy_kl_penalty", switch=f"{_ACTOR}.use_kl_loss"
    ),
    f"{_ACTOR}.kl_loss_type": to(
        "loss_fn.reference_policy_kl_type",
        values={"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"},
        switch=f"{_ACTOR}.use_kl_loss",
    ),
    f"{_ACTOR}.grad_clip": to("policy.max_grad_norm"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": to("parallel.context"),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": to("parallel.tensor"),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": to("parallel.pipeline"),
    f"{_ACTOR}.megatron.context_parallel_size": to("parallel.context"),
    f"{_ACTOR}.megatron.expert_model_parallel_size": to("parallel.expert"),
    f"{_ACTOR}.megatron.sequence_parallel": to("parallel.sequence"),
    # A penalty above 0 turns the term on.
    **obsolete(
        f"{_ACTOR}.use_kl_loss",
        f"{_ACTOR}._target_",
        f"{_ACTOR}.rollout_n",
        f"{_ACTOR}.use_torch_compile",
        f"{_ACTOR}.checkpoint",
        f"{_ACTOR}.calculate_entropy",
        f"{_ACTOR}.use_fused_kernels",
        f"{_ACTOR}.profiler",
    ),
    **unsupported(
        "the order of the rows of a rollout follows from `seed`",
        f"{_ACTOR}.shuffle",
        f"{_ACTOR}.data_loader_seed",
    ),
    f"{_ACTOR}.ppo_epochs": to("grpo.num_epochs_per_rollout"),
    **unsupported(NO_OFFLOAD, f"{_ACTOR}.fsdp_config", f"{_ACTOR}.megatron"),
    **unsupported("this setting of the actor has no counterpart", _ACTOR),
}

_REFERENCE_KEYS: dict[str, Entry] = {
    f"{_REF}.log_prob_micro_batch_size_per_gpu": to("policy.logprob_batch_size"),
    f"{_REF}.log_prob_max_token_len_per_gpu": to("policy.sequence_packing.logprob_mb_tokens"),
    **unsupported("the reference policy has the layout of the policy", _REF),
}

_DATA_KEYS: dict[str, Entry] = {
    "data.train_files": to(
        "data.train_path", note="one file; the others of a list by name in data.train_sets"
    ),
    "data.val_files": to("data.validation_path", note="one file"),
    "data.train_max_samples": to("data.max_train_rows", values=_ROW_CAP),
    "data.val_max_samples": to("data.max_validation_rows", values=_ROW_CAP),
    # An asynchronous run has 0 and counts the batch in async_training.
    "data.train_batch_size": to(
        "grpo.num_prompts_per_step",
        values={"0": None, "*": "*"},
        sft="policy.train_global_batch_size",
    ),
    "data.micro_batch_size_per_gpu": to("policy.train_micro_batch_size"),
    "data.max_response_length": to("policy.generation.max_new_tokens"),
    "data.max_length": to("policy.max_total_sequence_length"),
    "data.truncation": to("policy.oversize_rows", values={"error": "error", "right": "truncate"}),
    "data.tokenizer": to("policy.tokenizer_name"),
    "data.chat_template": to("policy.chat_template", note="the path of a Jinja file"),
    "data.seed": to("seed"),
    "data.max_prompt_length": to("data.max_prompt_tokens", note=_PROMPT_LENGTH),
    # Prompts above data.max_prompt_tokens are always left out.
    **obsolete("data.filter_overlong_prompts"),
    "data.prompt_key": to("data.columns.prompt", values={"prompt": None, "*": "*"}),
    "data.response_key": to("data.columns.completion", note="a text or a list of messages"),
    **unsupported(
        _DROPPED,
        "data.prompt_dict_keys",
        "data.response_dict_keys",
        "data.multiturn",
        "data.custom_cls",
        "data.image_key",
        "data.video_key",
        "data.apply_chat_template_kwargs",
    ),
    **unsupported(REWARD, "data.reward_fn_key"),
    **unsupported(TRUST_CODE, "data.trust_remote_code"),
    **unsupported(
        "rows are drawn in order or shuffled (data.shuffle)", "data.sampler", "data.datagen"
    ),
    **obsolete(
        "data.use_shm",
        "data.val_batch_size",
        "data.return_raw_input_ids",
        "data.return_raw_chat",
        "data.return_full_prompt",
        "data.return_multi_modal_inputs",
        "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers",
        "data.validation_shuffle",
        "data.image_patch_size",
        "data.balance_dp_token",
    ),
    **unsupported(
        "a step samples for as many prompts as it trains on, and refills as many as it lacks",
        "data.gen_batch_size",
        off=("1",),
    ),
    **unsupported("tools are in the column `tools` of each row", "data.tool_config_path"),
}

_ALGORITHM_KEYS: dict[str, Entry] = {
    "algorithm.adv_estimator": to("grpo.advantage.baseline", values=_ESTIMATORS, note=NO_CRITIC),
    "algorithm.norm_adv_by_std_in_grpo": to(
        "grpo.advantage.normalize", values={"true": "group_std", "false": "none"}
    ),
    "algorithm.use_kl_in_reward": to(
        "loss_fn.reference_policy_kl_in", values={"true": "reward", "false": None}
    ),
    "algorithm.kl_ctrl.kl_coef": to(
        "loss_fn.reference_policy_kl_penalty", switch="algorithm.use_kl_in_reward"
    ),
    **unsupported("the KL penalty is constant", "algorithm.kl_ctrl.type", off=("fixed",)),
    "algorithm.filter_groups.enable": to(
        "grpo.dynamic_sampling.enabled", values={"true": "true", "false": None}
    ),
    "algorithm.filter_groups.max_num_gen_batches": to(
        "grpo.dynamic_sampling.max_refills",
        note="minus 1: the first prompts of a step are not counted",
        switch="algorithm.filter_groups.enable",
    ),
    **unsupported(
        "a group is dropped if its rewards are equal",
        "algorithm.filter_groups",
        off=("seq_reward", "seq_final_reward"),
    ),
    **unsupported("the KL in the reward is k1", "algorithm.kl_penalty", off=("kl", "k1")),
    # They have an effect only with a critic, or with a KL penalty that is not constant.
    **obsolete("algorithm.gamma", "algorithm.lam", "algorithm.kl_ctrl", "algorithm._target_"),
    f"{_CORRECTION}.rollout_is": to(
        f"{_IMPORTANCE}.kind",
        values={"null": None, "token": "token_truncate", "sequence": "sequence_truncate"},
    ),
    f"{_CORRECTION}.rollout_is_threshold": to(
        f"{_IMPORTANCE}.upper", switch=f"{_CORRECTION}.rollout_is"
    ),
    f"{_CORRECTION}.bypass_mode": to(
        f"{_IMPORTANCE}.kind", values={"false": None, "true": "bypass"}
    ),
    **unsupported(
        "rows and tokens are left out by loss_fn.importance_correction.kind token_mask or"
        " sequence_mask",
        f"{_CORRECTION}.rollout_rs",
        off=("null", "false"),
    ),
    **unsupported("this setting of the algorithm has no counterpart", "algorithm"),
    **unsupported(NO_CRITIC, "critic"),
    **unsupported(REWARD, "reward_model", "reward_manager", "custom_reward_function"),
}

_TRAINER_KEYS: dict[str, Entry] = {
    "trainer.total_epochs": to("sft.max_num_epochs"),
    "trainer.total_training_steps": to(*STEPS),
    "trainer.project_name": to("logger.wandb_project", note="only to log to Weights & Biases"),
    "trainer.experiment_name": to("run_name"),
    "trainer.nnodes": to("cluster.num_nodes"),
    "trainer.n_gpus_per_node": to("cluster.gpus_per_node"),
    "trainer.seed": to("seed"),
    "trainer.save_freq": to("checkpointing.save_period", values=_NO_PERIOD),
    "trainer.test_freq": to(*VAL_PERIOD, values=_NO_PERIOD),
    "trainer.val_before_train": to(*VAL_AT_START),
    "trainer.max_actor_ckpt_to_keep": to("checkpointing.keep_latest", null=KEEP_ALL),
    "trainer.max_ckpt_to_keep": to("checkpointing.keep_latest", null=KEEP_ALL),
    "trainer.default_local_dir": to("output_dir"),
    "trainer.log_val_generations": to("logger.num_samples_shown"),
    "trainer.resume_mode": to(
        "resume", values={"auto": "true", "disable": None}, note="resume continues a run_name"
    ),
    **unsupported(TRACKERS, "trainer.logger"),
    **unsupported(NO_CRITIC, "trainer.critic_warmup", off=("0",)),
    **unsupported("a run is resumed by its run_name, with resume", "trainer.resume_from_path"),
    **unsupported("`nemo-like` trains; nothing only validates", "trainer.val_only"),
    **obsolete(
        "trainer.balance_batch",
        "trainer.device",
        "trainer.max_critic_ckpt_to_keep",
        "trainer.ray_wait_register_center_timeout",
        "trainer.esi_redundant_time",
        "trainer.del_local_ckpt_after_load",
        "trainer.use_legacy_worker_impl",
        "trainer.checkpoint",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "global_profiler",
        "ray_kwargs",
        "transfer_queue",
    ),
    **unsupported("this setting of the trainer has no counterpart", "trainer"),
}

_SFT_KEYS: dict[str, Entry] = {
    **_model("model"),
    **_optimizer("optim"),
    "ulysses_sequence_parallel_size": to("parallel.context"),
    "use_remove_padding": to("policy.sequence_packing.enabled"),
}

VERL: dict[str, Entry] = {
    **_model(_MODEL),
    **_ACTOR_KEYS,
    **VERL_GENERATION,
    **_REFERENCE_KEYS,
    **_DATA_KEYS,
    **_ALGORITHM_KEYS,
    **VERL_REWARD,
    **_TRAINER_KEYS,
    **_SFT_KEYS,
    "actor_rollout_ref.nccl_timeout": to("cluster.collective_timeout_s"),
    **obsolete("actor_rollout_ref.hybrid_engine", "actor_rollout_ref._target_"),
}
