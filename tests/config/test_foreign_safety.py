"""What is dropped without an effect changes no training, whatever the tool."""

from __future__ import annotations

import re
from typing import Any

from nemo_like.algorithms.registry import RUN_CONFIGS, job_schema
from nemo_like.config.build import build_config
from nemo_like.config.foreign import canonical, find_foreign
from nemo_like.config.keys import tools, type_at
from tests.config.test_foreign import put

_NAMES = """
_target_ _v2 hybrid_engine do_eval do_train
log_level logging_dir logging_first_step logging_steps logging_strategy log_completions log_dir
gpu_monitoring wandb wandb_enabled wandb_project mlflow mlflow_enabled swanlab tensorboard trace
profiler global_profiler rollout_data_dir validation_data_dir use_tqdm disable_log_stats
enable_vllm_metrics_logger vllm_metrics_logger_interval hub_model_id calculate_entropy
val_at_end val_batch_size val_global_batch_size val_micro_batch_size per_device_eval_batch_size
validation_shuffle bf16_full_eval use_trainer_do_validate parallel_validate_and_rollout
checkpoint model_save_format save_consolidated save_mode overwrite_output_dir
max_critic_ckpt_to_keep del_local_ckpt_after_load checkpoint_engine
num_workers dataloader_num_workers dataset_num_proc filter_overlong_prompts_workers use_shm
use_fastokens filter_overlong_prompts image_patch_size remove_unused_columns return_full_prompt
return_multi_modal_inputs return_raw_chat return_raw_input_ids balance_dp_token balance_batch
pad_to_multiple_of make_sequence_length_divisible_by
foreach fused optm_impl use_liger use_liger_kernel use_fused_kernels fused_kernel_options use_triton
use_torch_compile compile attn_implementation tf32 use_cache cache_implementation
gradient_checkpointing_kwargs fsdp_reshard_after_forward async_tp_enabled a2a_experimental
use_transformers_paged ds3_gather_for_generation device device_map dtensor_cfg
use_legacy_worker_impl strategy use_dynamic_bsz log_prob_use_dynamic_bsz use_remove_padding
ddp_timeout request_timeout ray_wait_register_center_timeout esi_redundant_time ray_kwargs redis
transfer_queue master_port_range_low master_port_range_high port_range_low port_range_high
queue_maxsize max_inflight_tasks rollout_n mode async_engine load_format skip_tokenizer_init
refit_with_reload_api real_quant_export_cpu_offload free_cache_engine multi_stage_wake_up
calculate_log_probs layered_summon enable_chunked_prefill cudagraph_capture_sizes scheduling_policy
use_preprocessed_multimodal_input update_weights_bucket_megabytes vllm_enable_sleep_mode
vllm_server_timeout vllm_group_port launch_reward_fn_async input_tokenizer inference_mode
ignore_bias_buffers max_num_batched_tokens
env.reward_model.enabled env.reward_model.reward_model_cfg.enabled reward_model.enable
policy.reward_model_cfg.enabled train.train_policy.type
api_server_count attn backend_port cache_dir chunked_cross_entropy ckpt.output_dir ckpt_path clean
colocate_actor_ref compute_accuracy concurrency data_parallel_size dataloader_pin_memory
dataloader_prefetch_factor dataset_keep_in_memory dataset_prepared_path dataset_processes
deepcompile deployment.type disable_ds disable_fast_tokenizer dist_timeout_seconds dry_run
eager_attention enable_liger_kernel enable_prefix_caching enable_sleep entity eval_batch_size
eval_max_new_tokens eval_sample_packing eval_sequence_len eval_strategy eval_table_size
flash_attention flash_attn flex_attention gc gc_steps gradient_checkpointing_reentrant group
heartbeat hf_use_auth_token hub_strategy include_num_input_tokens_seen include_tkps
include_tokens_per_second inference.log is_llama_derived_model is_mistral_derived_model local_rank
log low_cpu_mem_usage max_cpu_loras max_loras max_mem media_dir memory_profiler_path
mlflow_tracking_uri model.compile model.impl model_type moe_use_grouped_mm monitors
no_remove_unused_columns offline orchestrator.log org overlap_comm overwrite_cache
pad_to_sequence_len path placement_strategy plot_loss preprocessing_batch_size
preprocessing_num_workers print_param_status processor_type profiler_steps push_dataset_to_hub
qlora_sharded_model_loading ray_num_workers ray_run_name ray_storage_path reshard_after_forward
resources_per_worker ring_attn_head_stride rollout_transport router run save_first_step save_hf_ckpt
save_only_model save_safetensors save_strategy sdp_attention server slurm stage sync_backend
sync_with_ray tags tasks_per_minute tensorboard_dir tokenized_path tokenizer_type tokenizer_use_fast
torch_compile torch_compile_backend trace_path train.compile trainer.log trainer.model.compile
trainer.model.impl use_fast_tokenizer use_ms use_ray use_reentrant_gc use_universal_ckpt use_unsloth
use_unsloth_gc vllm_sync_backend wandb_entity wandb_log_model wandb_mode wandb_name wandb_run_id
wandb_watch weight_broadcast world_size xformers_attention zero_stage zpg
broadcast_all_params coalesce_weight_sync collect_rollout_logprobs data_dispatch_as_rank_in_mesh
dataloader_batch_size dataloader_broadcast deterministic distillation.enable enable_dataset_cache
enable_liger_cross_entropy enable_liger_fused_cross_entropy eth_ips fa_version force_use_hf
local_dataset n_generation_mini_batch n_generation_to_batch rollout_as_token_ids save_ckpt_at_exit
signal_to_handle timestamp use_flashinfer validation.batch_size validation.enable
vllm_use_flashinfer
"""
HARMLESS = set(_NAMES.split())
"""Last parts of keys about logs, validation, checkpoints, loading, kernels and processes."""
WITHOUT_EFFECT = {
    "use_kl_loss": "the coefficient of the KL, which is listed too, turns the term on",
    "force_on_policy_ratio": "one optimizer step per rollout has the ratio 1",
    "dropout_position": "a dropout above 0 is refused",
    "max_lora_rank": "adapters are sent to vLLM as they are trained",
    "enable_lora": "adapters are sent to vLLM as they are trained",
    "lora_name": "the name of the adapter in the server",
    "lora_mlp_kernel": "a kernel of the same products",
    "lora_qkv_kernel": "a kernel of the same products",
    "lora_o_kernel": "a kernel of the same products",
    "vllm_lora_sync": "how weights reach vLLM",
    "matmul_precision": "the setting of torch for float32 products, as tf32",
    "reward_model": "a switch of axolotl; the job decides it",
    "orchestrator.model.lora.name": "the name of the adapter in the server",
    "bnb_4bit_compute_dtype": "products are computed in policy.precision, which is listed too",
    "bnb_4bit_quant_storage": "the type in which bytes are stored",
    "lora_task_type": "the job decides it",
    "task_type": "the job decides it",
    "gamma": "of a value model, which is refused",
    "lam": "of a value model, which is refused",
    "kl_ctrl": "of a KL penalty that is not constant, which is refused",
}
"""Keys that sound as if they changed training -> the reason why they do not."""
GENERAL = {
    "batch_size",
    "enabled",
    "enable",
    "type",
    "name",
    "log",
    "output_dir",
    "impl",
    "stage",
    "compile",
}
_TRAINING_NAMES = """
lr learning_rate actor_learning_rate weight_decay betas adam_beta1 adam_beta2 adam_epsilon eps
optim optimizer optimizer_name lr_scheduler lr_scheduler_type warmup_steps warmup_ratio min_lr_ratio
max_grad_norm max_norm clip_grad grad_clip max_steps max_num_steps num_epochs num_train_epochs
max_epochs total_epochs batch_size train_batch_size train_global_batch_size micro_batch_size
per_device_train_batch_size gradient_accumulation_steps ppo_mini_batch_size
adapter finetuning_type use_peft lora_r lora_rank lora_alpha lora_dropout lora_target
lora_target_modules lora_target_linear lora_target_parameters lora_modules_to_save lora_bias
modules_to_save peft_config rank alpha dim r target_modules exclude_modules use_dora use_rslora
init_lora_weights lora_model_dir adapter_name_or_path load_in_4bit load_in_8bit quantization_bit
bf16 fp16 dtype torch_dtype precision param_dtype sequence_len seq_len cutoff_len max_length max_len
max_seq_length max_total_sequence_length max_prompt_length max_completion_length max_new_tokens
truncation packing sample_packing train_on_inputs train_on_prompt completion_only_loss
assistant_only_loss roles_to_train seed data_seed shuffle temperature top_p top_k min_p
repetition_penalty num_generations n_samples_per_prompt n group_size num_iterations ppo_epochs beta
init_kl_coef kl_loss_coef kl_coef kl_loss_type epsilon epsilon_high delta eps_clip clip_ratio
loss_type loss_agg_mode adv_estimator advantage_estimator entropy_coeff entropy_coef scale_rewards
normalize_rewards normalize_reward reward_funcs reward_weights label_smoothing
neftune_noise_alpha embedding_lr freeze unfrozen_parameters model_name model_name_or_path base_model
pretrain datasets dataset dataset_name train_files chat_template template special_tokens
val_set_size
"""
_TRAINING = re.compile(
    r"(^|_)(lora|peft|adapter|lr|learning|loss|kl|clip|beta|betas|epsilon|eps|decay|warmup|dropout"
    r"|rank|alpha|dtype|precision|quant|seed|shuffle|temperature|advantage|gamma|lam|epochs|init"
    r"|template|prompt_key|merge)($|_)"
)


def obsolete_keys() -> dict[str, str]:
    """Every key that is dropped whatever its value -> the reason."""
    return {
        path: entry.note
        for tool in tools()
        for path, entry in tool.entries.items()
        if entry.kind == "obsolete"
    }


def test_every_key_without_a_meaning_is_known_to_change_no_training() -> None:
    names = set()
    for path, reason in obsolete_keys().items():
        assert reason, path
        name = path.rpartition(".")[2]
        # The last part alone would stand for keys of any section.
        names.add(path if name in GENERAL else name)
    assert names <= HARMLESS | set(WITHOUT_EFFECT), names - HARMLESS - set(WITHOUT_EFFECT)
    allowed = {
        "real_quant_export_cpu_offload",
        "skip_tokenizer_init",
        "validation_shuffle",
        "plot_loss",
        "local_rank",
        "data_dispatch_as_rank_in_mesh",
    }
    assert not [name for name in HARMLESS - allowed if _TRAINING.search(name)]


def test_no_training_key_is_dropped_whatever_its_value() -> None:
    """The keys that decide the result of a run, by their usual names in all tools."""
    paths = [path for path in obsolete_keys() if not path.startswith("validation.")]
    dropped = {path.rpartition(".")[2] for path in paths}
    assert not dropped & set(_TRAINING_NAMES.split())


def test_a_key_with_a_value_is_only_deletable_if_it_has_no_meaning() -> None:
    """A key alone in a config: no other key turns it off, and its value is none that is off."""
    for kind in RUN_CONFIGS:
        for tool in tools():
            for path, entry in tool.entries.items():
                tree: dict[str, Any] = {}
                put(tree, path.replace("NAME", "0"), 0.123)
                groups = [one.group for one in find_foreign(job_schema(kind), tree, tool)]
                if entry.kind != "obsolete":
                    assert "deletable" not in groups, (kind, path)


def test_a_key_in_no_table_is_unknown_whatever_its_value() -> None:
    for tool in tools():
        for value in (None, False, 0, "", [], {}, {"enabled": False}, 1):
            (finding,) = find_foreign(job_schema("sft"), {"some_new_key": value}, tool)
            assert finding.group == "unknown"


def test_a_value_is_left_out_only_where_the_default_means_the_same() -> None:
    defaults = {kind: default_config(kind) for kind in RUN_CONFIGS}
    for path, entry in [item for tool in tools() for item in tool.entries.items()]:
        values = entry.values
        # A reference to a key that is listed itself has the meaning of that key.
        left_out = [old for old, new in (values or {}).items() if new is None and "${" not in old]
        if not left_out:
            continue
        others = {new for new in (values or {}).values() if new is not None}
        for kind, config in defaults.items():
            for target in entry.targets:
                if type_at(RUN_CONFIGS[kind], target) is not None:
                    assert canonical(value_at(config, target)) not in others, (path, target)


def default_config(kind: str) -> Any:
    plain: dict[str, Any] = {}
    keys = ["run_name", "policy.model_name", "data.train_path", "reward.models.model.model_name"]
    for key in (*keys, *(["distill.teacher"] if kind == "distill" else [])):
        put(plain, key, "x")
    config, _ = build_config(RUN_CONFIGS[kind], plain)
    assert config is not None
    return config


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name)
    return config
