"""What a message lists as safe to delete changes no training, whatever the tool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_like.algorithms.registry import RUN_CONFIGS, detect_kind, job_schema, load_config
from nemo_like.config.build import build_config
from nemo_like.config.errors import ConfigError
from nemo_like.config.foreign import canonical, find_foreign
from nemo_like.config.keys import all_entries, same_keys, type_at
from tests.config.test_foreign import listed, put

CONFIGS = Path(__file__).parent / "foreign"

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
"""
HARMLESS = set(_NAMES.split())
"""Last parts of keys about logs, validation, checkpoints, loading, kernels and processes."""
WITHOUT_EFFECT = {
    "use_kl_loss": "the coefficient of the KL, which is listed too, turns the term on",
    "force_on_policy_ratio": "one optimizer step per rollout has the ratio 1",
    "dropout_position": "a dropout above 0 is refused",
    "bnb_4bit_compute_dtype": "products are computed in policy.precision, which is listed too",
    "bnb_4bit_quant_storage": "the type in which bytes are stored",
    "lora_task_type": "the job decides it",
    "task_type": "the job decides it",
    "gamma": "of a value model, which is refused",
    "lam": "of a value model, which is refused",
    "kl_ctrl": "of a KL penalty that is not constant, which is refused",
}
"""Keys that sound as if they changed training -> the reason why they do not."""
_TRAINING = re.compile(
    r"(^|_)(lora|peft|adapter|lr|learning|loss|kl|clip|beta|betas|epsilon|eps|decay|warmup|dropout"
    r"|rank|alpha|dtype|precision|quant|seed|shuffle|temperature|advantage|gamma|lam|epochs|init"
    r"|template|prompt_key|merge)($|_)"
)


def test_every_key_without_a_meaning_is_known_to_change_no_training() -> None:
    entries = {**all_entries(), **same_keys()}
    obsolete = {path for path, entry in entries.items() if entry.kind == "obsolete"}
    names = set()
    for path in obsolete:
        name = path.rpartition(".")[2]
        # The last part alone would stand for keys of any section.
        names.add(path if name in ("enabled", "enable", "type") else name)
    assert names <= HARMLESS | set(WITHOUT_EFFECT)
    allowed = {"real_quant_export_cpu_offload", "skip_tokenizer_init", "validation_shuffle"}
    assert not [name for name in HARMLESS - allowed if _TRAINING.search(name)]


def test_a_key_with_a_value_is_only_deletable_if_it_has_no_meaning() -> None:
    """A key alone in a config: no other key turns it off, and its value is none that is off."""
    for kind in RUN_CONFIGS:
        for path, entry in all_entries().items():
            tree: dict[str, Any] = {}
            put(tree, path, 0.123)
            groups = [one.group for one in find_foreign(job_schema(kind), tree).found]
            if entry.kind != "obsolete":
                assert "deletable" not in groups, (kind, path)


def test_a_value_is_left_out_only_where_the_default_means_the_same() -> None:
    defaults = {kind: default_config(kind) for kind in RUN_CONFIGS}
    for path, entry in all_entries().items():
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


@pytest.mark.parametrize(
    ("name", "tool", "kind"),
    [
        ("axolotl", "axolotl", "sft"),
        ("llama_factory", "LLaMA-Factory", "sft"),
        ("openrlhf", "OpenRLHF", "grpo"),
        ("prime_rl", "prime-rl", "grpo"),
    ],
)
def test_a_config_of_a_tool_without_a_table_is_called_that(name: str, tool: str, kind: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    values = yaml.safe_load(path.read_text())
    assert detect_kind(path) == kind
    with pytest.raises(ConfigError) as error:
        load_config(kind, path)
    text = str(error.value)
    assert f"of {tool}, whose keys are not known" in text
    _, _, safe = text.partition("safe to delete")
    for key in listed(f"\n{safe}"):
        assert values[key] in (None, "", [], {}), key
    unknown = text.partition("not known:\n")[2]
    for key in ("adapter", "finetuning_type", "lora_rank", "actor_learning_rate", "orchestrator"):
        assert key not in values or f"\n  {key}  [line" in f"\n{unknown}"


def test_few_keys_of_a_known_tool_do_not_make_it_a_config_of_that_tool(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("bf16: true\nuse_liger_kernel: true\nfirst: 1\nsecond: 2\nthird: 3\n")
    with pytest.raises(ConfigError, match="of a tool whose keys are not known") as error:
        load_config("sft", path)
    assert "use_liger_kernel" in str(error.value).partition("not known:\n")[2]
    assert "safe to delete" not in str(error.value)
