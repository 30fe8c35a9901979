"""Keys of NeMo RL, verl, TRL and Cosmos-RL for generation and for asynchronous training."""

from __future__ import annotations

from nemo_like.config.foreign_entries import TOTAL_LENGTH, Entry, obsolete, to, unsupported

_BACKEND = "policy.generation.backend"
_VLLM = "policy.generation.vllm"
_WORKERS = "cluster.generation_workers"
_STALENESS = "grpo.max_staleness"
_UPDATE = "grpo.weight_update"
_LENGTH = "policy.max_total_sequence_length"
# Engines without a counterpart are replaced by vLLM.
_ENGINES = {"hf": "hf", "*": "vllm"}
_IN_FLIGHT = {"true": "in_flight", "false": None}
_BYPASS = {"true": "bypass", "false": None}

OTHER_ENGINE = (
    "completions are sampled with vLLM or with the Hugging Face model (policy.generation.backend)"
)
_OWN_WORKERS = (
    f"write the number of workers that only generate, one per GPU, in {_WORKERS};"
    " cluster.num_nodes and cluster.gpus_per_node then count the policy's GPUs only"
)
_ONLY_TENSOR = f"a replica of vLLM is split by {_VLLM}.tensor_parallel_size only"
_SAME_PRECISION = "the generator computes in policy.precision"
_NO_OPTIONS = f"vLLM gets only the options in {_VLLM}"
_TRANSPORT = "the transport of the weights follows from the layout of the workers"
_LOGPROBS = "the recorded log-probs are those of the distribution that is sampled from"
_IS_ASYNC = f"rollouts run ahead of training with {_STALENESS} above 0"
_NO_ASYNC = "this setting of asynchronous training has no counterpart"
EACH_STEP = "the generator gets new weights after every step"
_SERVER = f"vLLM runs in workers of the run, on GPUs of their own with {_WORKERS}"
_END = "the end-of-sequence token always ends a completion"
_NO_PENALTY = "completions are sampled without penalties for repeated tokens"
_STEP_PROMPTS = "write require_batches x ppo_mini_batch_size in grpo.num_prompts_per_step"
_NOT_A_SHARE = "max weight updates between sampling and training, not a share of the rows: round up"

_NEMO_VLLM = "policy.generation.vllm_cfg"
_NEMO_KWARGS = "policy.generation.vllm_kwargs"
_NEMO_COLOCATED = "policy.generation.colocated"
_NEMO_ASYNC = "grpo.async_grpo"

NEMO_RL_GENERATION: dict[str, Entry] = {
    "policy.generation_batch_size": to("policy.generation.hf.batch_size"),
    "policy.generation.val_temperature": to("grpo.val_temperature"),
    **unsupported(
        "validation samples with the filters of training",
        "policy.generation.val_top_p",
        "policy.generation.val_top_k",
        off=("${.top_p}", "${.top_k}"),
    ),
    f"{_NEMO_VLLM}.tensor_parallel_size": to(f"{_VLLM}.tensor_parallel_size"),
    f"{_NEMO_VLLM}.gpu_memory_utilization": to(f"{_VLLM}.gpu_memory_utilization"),
    f"{_NEMO_VLLM}.enforce_eager": to(f"{_VLLM}.enforce_eager"),
    **unsupported(
        _ONLY_TENSOR,
        f"{_NEMO_VLLM}.pipeline_parallel_size",
        f"{_NEMO_VLLM}.expert_parallel_size",
        off=("1",),
    ),
    **unsupported(TOTAL_LENGTH, f"{_NEMO_VLLM}.max_model_len", off=(f"${{{_LENGTH}}}",)),
    **unsupported(
        _SAME_PRECISION,
        f"{_NEMO_VLLM}.precision",
        f"{_NEMO_VLLM}.kv_cache_dtype",
        off=("${policy.precision}", "auto"),
    ),
    **unsupported(
        _SAME_PRECISION,
        f"{_NEMO_VLLM}.use_deep_gemm",
        f"{_NEMO_VLLM}.is_mx",
        f"{_NEMO_VLLM}.num_first_layers_in_bf16",
        f"{_NEMO_VLLM}.num_last_layers_in_bf16",
        "policy.generation.quant_cfg",
        "policy.generation.real_quant",
        "policy.generation.nvfp4_pertoken_rollout",
        off=("false", "0"),
    ),
    **unsupported(_LOGPROBS, f"{_NEMO_VLLM}.logprobs_mode", off=("processed_logprobs",)),
    # Requests are always submitted and polled, and weights always come from the policy.
    **obsolete(
        f"{_NEMO_VLLM}.async_engine",
        f"{_NEMO_VLLM}.load_format",
        f"{_NEMO_VLLM}.skip_tokenizer_init",
        f"{_NEMO_VLLM}.use_tqdm",
        f"{_NEMO_VLLM}.enable_vllm_metrics_logger",
        f"{_NEMO_VLLM}.vllm_metrics_logger_interval",
        f"{_NEMO_VLLM}.refit_with_reload_api",
        "policy.generation.port_range_low",
        "policy.generation.port_range_high",
        "policy.generation.real_quant_export_cpu_offload",
    ),
    **unsupported(_NO_OPTIONS, _NEMO_VLLM),
    f"{_NEMO_KWARGS}.max_num_seqs": to(f"{_VLLM}.max_num_seqs"),
    f"{_NEMO_KWARGS}.max_num_batched_tokens": to(f"{_VLLM}.max_num_batched_tokens"),
    f"{_NEMO_KWARGS}.enable_prefix_caching": to(f"{_VLLM}.prefix_caching"),
    **unsupported(_NO_OPTIONS, _NEMO_KWARGS),
    **unsupported(
        OTHER_ENGINE,
        "policy.generation.sglang_cfg",
        "policy.generation.trtllm_cfg",
        "policy.generation.mcore_generation_config",
    ),
    **unsupported(_TRANSPORT, "policy.generation.refit_cfg", "policy.generation.refit_transport"),
    # Colocated generation is the default.
    **unsupported(_OWN_WORKERS, f"{_NEMO_COLOCATED}.enabled", off=("true",)),
    f"{_NEMO_COLOCATED}.resources.gpus_per_node": to(
        _WORKERS, note="times colocated.resources.num_nodes", unless=f"{_NEMO_COLOCATED}.enabled"
    ),
    **unsupported(_OWN_WORKERS, f"{_NEMO_COLOCATED}.resources.num_nodes", off=("1",)),
    **unsupported(_OWN_WORKERS, _NEMO_COLOCATED),
    f"{_NEMO_ASYNC}.max_trajectory_age_steps": to(_STALENESS, switch=f"{_NEMO_ASYNC}.enabled"),
    f"{_NEMO_ASYNC}.in_flight_weight_updates": to(
        _UPDATE, values=_IN_FLIGHT, switch=f"{_NEMO_ASYNC}.enabled"
    ),
    **unsupported(_IS_ASYNC, f"{_NEMO_ASYNC}.enabled"),
    **unsupported(
        "the KV cache is computed again after every weight update",
        f"{_NEMO_ASYNC}.recompute_kv_cache_after_weight_updates",
        off=("true",),
    ),
    **unsupported(_NO_ASYNC, _NEMO_ASYNC),
    "async_rl.sampler.max_lookahead_versions": to(_STALENESS),
    **unsupported(_NO_ASYNC, "async_rl"),
}

_ROLLOUT = "actor_rollout_ref.rollout"
_ASYNC = "async_training"

VERL_GENERATION: dict[str, Entry] = {
    f"{_ROLLOUT}.name": to(_BACKEND, values=_ENGINES),
    f"{_ROLLOUT}.n": to("grpo.num_generations_per_prompt"),
    f"{_ROLLOUT}.temperature": to("policy.generation.temperature"),
    f"{_ROLLOUT}.top_p": to("policy.generation.top_p"),
    f"{_ROLLOUT}.top_k": to("policy.generation.top_k"),
    f"{_ROLLOUT}.response_length": to("policy.generation.max_new_tokens"),
    f"{_ROLLOUT}.val_kwargs.temperature": to("grpo.val_temperature"),
    f"{_ROLLOUT}.val_kwargs.n": to("grpo.val_num_samples"),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": to("policy.logprob_batch_size"),
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": to("policy.sequence_packing.logprob_mb_tokens"),
    f"{_ROLLOUT}.tensor_model_parallel_size": to(f"{_VLLM}.tensor_parallel_size"),
    f"{_ROLLOUT}.gpu_memory_utilization": to(f"{_VLLM}.gpu_memory_utilization"),
    f"{_ROLLOUT}.max_num_seqs": to(f"{_VLLM}.max_num_seqs"),
    f"{_ROLLOUT}.max_num_batched_tokens": to(f"{_VLLM}.max_num_batched_tokens"),
    f"{_ROLLOUT}.enforce_eager": to(f"{_VLLM}.enforce_eager"),
    f"{_ROLLOUT}.enable_prefix_caching": to(f"{_VLLM}.prefix_caching"),
    **unsupported(TOTAL_LENGTH, f"{_ROLLOUT}.prompt_length", f"{_ROLLOUT}.max_model_len"),
    **unsupported(
        _ONLY_TENSOR,
        f"{_ROLLOUT}.data_parallel_size",
        f"{_ROLLOUT}.expert_parallel_size",
        f"{_ROLLOUT}.pipeline_model_parallel_size",
        off=("1",),
    ),
    **unsupported(_SAME_PRECISION, f"{_ROLLOUT}.dtype", off=("auto",)),
    **unsupported(_SAME_PRECISION, f"{_ROLLOUT}.quantization"),
    **unsupported(_END, f"{_ROLLOUT}.ignore_eos"),
    **unsupported(_LOGPROBS, f"{_ROLLOUT}.logprobs_mode", off=("processed_logprobs",)),
    **unsupported(
        "completions are always sampled; set policy.generation.temperature",
        f"{_ROLLOUT}.do_sample",
        off=("true",),
    ),
    **unsupported(
        "all completions of a step are finished", f"{_ROLLOUT}.over_sample_rate", off=("0",)
    ),
    **unsupported("rollouts have one turn", f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.agent"),
    **unsupported("validation samples with the filters of training", f"{_ROLLOUT}.val_kwargs"),
    f"{_ROLLOUT}.n_gpus_per_node": to(
        _WORKERS, note="times rollout.nnodes", switch=f"{_ROLLOUT}.nnodes"
    ),
    **unsupported(_OWN_WORKERS, f"{_ROLLOUT}.nnodes", off=("0",)),
    # Memory is released while the policy trains on the same GPUs, log-probs are always recorded,
    # and weights always come from the policy.
    **obsolete(
        f"{_ROLLOUT}._target_",
        f"{_ROLLOUT}.mode",
        f"{_ROLLOUT}.free_cache_engine",
        f"{_ROLLOUT}.multi_stage_wake_up",
        f"{_ROLLOUT}.calculate_log_probs",
        f"{_ROLLOUT}.load_format",
        f"{_ROLLOUT}.layered_summon",
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz",
        f"{_ROLLOUT}.disable_log_stats",
        f"{_ROLLOUT}.enable_chunked_prefill",
        f"{_ROLLOUT}.cudagraph_capture_sizes",
        f"{_ROLLOUT}.scheduling_policy",
        f"{_ROLLOUT}.skip_tokenizer_init",
        f"{_ROLLOUT}.use_preprocessed_multimodal_input",
        f"{_ROLLOUT}.checkpoint_engine",
        f"{_ROLLOUT}.update_weights_bucket_megabytes",
        f"{_ROLLOUT}.profiler",
        f"{_ROLLOUT}.trace",
    ),
    **unsupported(_NO_OPTIONS, f"{_ROLLOUT}.engine_kwargs", off=("false", "null")),
    **unsupported("this setting of the rollout has no counterpart", _ROLLOUT),
    f"{_ASYNC}.staleness_threshold": to(
        _STALENESS,
        values={"0": None, "1": "1", "2": "2", "3": "3", "4": "4", "*": "1"},
        note=_NOT_A_SHARE,
    ),
    f"{_ASYNC}.partial_rollout": to(_UPDATE, values=_IN_FLIGHT),
    f"{_ASYNC}.use_rollout_log_probs": to("loss_fn.importance_correction.kind", values=_BYPASS),
    "actor_rollout_ref.actor.use_rollout_log_probs": to(
        "loss_fn.importance_correction.kind", values=_BYPASS
    ),
    **unsupported(EACH_STEP, f"{_ASYNC}.trigger_parameter_sync_step", off=("1",)),
    **unsupported(_STEP_PROMPTS, f"{_ASYNC}.require_batches", off=()),
    **obsolete(
        f"{_ASYNC}.checkpoint_engine",
        f"{_ASYNC}.use_trainer_do_validate",
        f"{_ASYNC}.parallel_validate_and_rollout",
    ),
    **unsupported(_NO_ASYNC, _ASYNC),
    "rollout.n": to("grpo.num_generations_per_prompt"),
    "rollout.test_freq": to("grpo.val_period"),
    "rollout.n_gpus_per_node": to(_WORKERS, note="times rollout.nnodes"),
    **unsupported(_OWN_WORKERS, "rollout.nnodes", off=("1",)),
    **unsupported(
        "GRPO counts steps, in grpo.max_num_steps",
        "rollout.total_rollout_steps",
        "rollout.total_epochs",
    ),
}

TRL_GENERATION: dict[str, Entry] = {
    "max_completion_length": to("policy.generation.max_new_tokens"),
    "temperature": to("policy.generation.temperature"),
    "top_p": to("policy.generation.top_p"),
    "top_k": to("policy.generation.top_k"),
    "min_p": to("policy.generation.min_p"),
    "num_generations": to("grpo.num_generations_per_prompt"),
    **unsupported(_NO_PENALTY, "repetition_penalty", off=("1",)),
    **unsupported("only the keys of policy.generation are options", "generation_kwargs"),
    "use_vllm": to(_BACKEND, values={"true": "vllm", "false": None}),
    "vllm_gpu_memory_utilization": to(f"{_VLLM}.gpu_memory_utilization", switch="use_vllm"),
    "vllm_tensor_parallel_size": to(f"{_VLLM}.tensor_parallel_size", switch="use_vllm"),
    "vllm_enable_prefix_caching": to(f"{_VLLM}.prefix_caching", switch="use_vllm"),
    **unsupported(TOTAL_LENGTH, "vllm_max_model_length", "vllm_max_model_len"),
    **unsupported(_SAME_PRECISION, "vllm_dtype", off=("auto",)),
    **unsupported(_OWN_WORKERS, "vllm_mode", off=("colocate",)),
    **unsupported(
        _SERVER, "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_device"
    ),
    **unsupported(_NO_OPTIONS, "vllm_model_impl", off=("vllm",)),
    **unsupported(
        "completions are not restricted by a grammar",
        "vllm_structured_outputs_regex",
        "vllm_guided_decoding_regex",
    ),
    # On GPUs that the policy uses too, vLLM always sleeps while the policy trains.
    **obsolete(
        "vllm_enable_sleep_mode",
        "vllm_server_timeout",
        "vllm_group_port",
        "request_timeout",
        "use_transformers_paged",
        "cache_implementation",
        "ds3_gather_for_generation",
    ),
    "vllm_importance_sampling_correction": to(
        "loss_fn.importance_correction.kind",
        values={"false": None},
        note="the kinds have the names of vllm_importance_sampling_mode",
    ),
    "vllm_importance_sampling_mode": to(
        "loss_fn.importance_correction.kind", switch="vllm_importance_sampling_correction"
    ),
    "vllm_importance_sampling_cap": to(
        "loss_fn.importance_correction.upper", switch="vllm_importance_sampling_correction"
    ),
    "max_staleness": to(_STALENESS),
    **unsupported(EACH_STEP, "weight_sync_steps", off=("1",)),
    **obsolete("max_inflight_tasks", "queue_maxsize"),
}

COSMOS_RL_GENERATION: dict[str, Entry] = {
    "rollout.n_generation": to("grpo.num_generations_per_prompt"),
    "rollout.batch_size": to("policy.generation.hf.batch_size"),
    "rollout.max_response_length": to("policy.generation.max_new_tokens"),
    "rollout.sampling_config.temperature": to("policy.generation.temperature"),
    "rollout.sampling_config.top_p": to("policy.generation.top_p"),
    "rollout.sampling_config.top_k": to("policy.generation.top_k"),
    "rollout.backend": to(_BACKEND, values=_ENGINES),
    "rollout.gpu_memory_utilization": to(f"{_VLLM}.gpu_memory_utilization"),
    "rollout.enforce_eager": to(f"{_VLLM}.enforce_eager"),
    "rollout.parallelism.tp_size": to(f"{_VLLM}.tensor_parallel_size"),
    **unsupported(_ONLY_TENSOR, "rollout.parallelism.pp_size", off=("1",)),
    **unsupported(_OWN_WORKERS, "rollout.parallelism", off=("1", "-1")),
    **unsupported(
        "this setting of the rollout has no counterpart", "rollout", off=("false", "none")
    ),
    "train.train_policy.allowed_outdated_steps": to(_STALENESS),
}
