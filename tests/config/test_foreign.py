"""Configs of other tools are refused with one list of what to change, and the list is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_like.algorithms.registry import RUN_CONFIGS, detect_kind, job_schema, load_config
from nemo_like.cli import main
from nemo_like.config.build import build_config, register_arithmetic
from nemo_like.config.errors import ConfigError
from nemo_like.config.foreign import find_foreign, unknown_text
from nemo_like.config.keys import Entry, all_entries, child_types, same_keys, tool_tables, type_at

CONFIGS = Path(__file__).parent / "foreign"
CASES: dict[str, str] = {
    "nemo_rl_grpo": "grpo",
    "nemo_rl_async_grpo": "grpo",
    "nemo_rl_sft": "sft",
    "verl_grpo": "grpo",
    "verl_async_grpo": "grpo",
    "verl_sft": "sft",
    "trl_grpo": "grpo",
    "trl_async_grpo": "grpo",
    "trl_sft": "sft",
    "trl_rm": "rm",
    "nemo_rl_rm": "rm",
    "cosmos_rl_sft": "sft",
}
NEEDED = {
    "run_name": "a",
    "data.train_path": "t.jsonl",
    "data.validation_path": "v.jsonl",
    "policy.model_name": "m",
    "reward.functions": {"answer": {"path": "nemo_like.environments.math.answer_reward"}},
}
OUR_KEY = re.compile(
    r"\b(?:policy|grpo|sft|dpo|rm|distill|data|reward|cluster|parallel|checkpointing|logger|loss_fn)\.[a-z_0-9.]*[a-z_0-9]"
)


def message(path: Path, *overrides: str) -> str:
    """What the user is told."""
    with pytest.raises(ConfigError) as caught:
        load_config(detect_kind(path), path, overrides)
    return str(caught.value)


def leaves(values: Any, prefix: str = "") -> list[str]:
    """Every dotted key with a value; an empty mapping is a value."""
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [
        leaf
        for name, inner in values.items()
        for leaf in leaves(inner, f"{prefix}.{name}" if prefix else name)
    ]


def unknown_leaves(kind: str, values: dict[str, Any]) -> list[str]:
    return [leaf for leaf in leaves(values) if type_at(RUN_CONFIGS[kind], leaf) is None]


def listed(text: str) -> list[str]:
    """The old keys that the message lists, of all its groups."""
    keys = []
    for line in text.splitlines()[1:]:
        if not line.startswith("  ") or line.startswith("  ("):
            continue
        if " -> " in line:
            keys += [old.split(":")[0].strip() for old in line.split(" -> ")[0].split(", ")]
        elif not line.endswith(":"):
            keys += [name.strip() for name in line.rpartition(": ")[2].split(",") if name.strip()]
    return keys


def pop(values: dict[str, Any], path: str) -> Any:
    *parents, name = path.split(".")
    for parent in parents:
        values = values[parent]
    return values.pop(name)


def put(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values.setdefault(name, value)


def without_empty(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    kept = {name: without_empty(inner) for name, inner in values.items()}
    return {name: inner for name, inner in kept.items() if inner != {}}


def follow(text: str, values: dict[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """The config after every change that the message lists."""
    renames = []
    for line in text.splitlines():
        if " -> " not in line or not line.startswith("  "):
            continue
        olds, _, rest = line.strip().partition(" -> ")
        target, _, note = re.sub(r"  \[.*\]$", "", rest).partition(" (")
        keys, colon, new = target.partition(": ")
        first, *others = [old.split(": ")[0] for old in olds.split(", ")]
        source = resolved if "write the value out" in note else values
        value = (
            OmegaConf.select(OmegaConf.create(resolved), first)
            if source is resolved
            else pop(values, first)
        )
        if source is resolved:
            pop(values, first)
        for other in others:
            pop(values, other)
        if type_at(RUN_CONFIGS["grpo"], first) is not None:
            keys, colon, new = first, ": ", target
        value = yaml.safe_load(new) if colon and "${" not in new else (new if colon else value)
        if "in place of the section there" in note:
            pop(values, keys)
        renames.append(
            (
                keys.split(" and "),
                OmegaConf.to_container(value) if OmegaConf.is_config(value) else value,
            )
        )
    for path in listed(text.rsplit("unsupported (", maxsplit=1)[-1]):
        pop(values, path)
    for targets, value in renames:
        for index, target in enumerate(targets):
            is_divided = isinstance(value, list) and len(targets) > 1
            put(values, target, value[index] if is_divided else value)
    wanted = re.search(r"^to be set as well: (.*)$", text, re.MULTILINE)
    for key in wanted[1].split(", ") if wanted else ():
        put(values, key, NEEDED[key])
    return without_empty(values)


@pytest.mark.parametrize("name", CASES)
def test_a_config_of_another_tool_loads_after_all_changes_of_its_message(
    name: str, tmp_path: Path
) -> None:
    path, kind = CONFIGS / f"{name}.yaml", CASES[name]
    values = yaml.safe_load(path.read_text())
    register_arithmetic()
    resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    assert isinstance(resolved, dict)
    assert detect_kind(path) == kind
    text = message(path)
    found = listed(text)
    for leaf in unknown_leaves(kind, values):
        covering = [key for key in found if leaf == key or leaf.startswith(f"{key}.")]
        assert len(covering) == 1, (leaf, covering)
    assert len(found) == len(set(found))
    for other in found:
        is_same = other in same_keys()
        assert (
            is_same
            or text.count(f" {other} ") + text.count(f" {other},") + text.count(f" {other}:") <= 1
        ), other
    changed = tmp_path / "changed.yaml"
    changed.write_text(
        yaml.safe_dump(follow(text, values, {str(key): item for key, item in resolved.items()}))
    )
    load_config(kind, changed)


def test_the_groups_of_a_nemo_rl_config() -> None:
    text = message(CONFIGS / "nemo_rl_grpo.yaml")
    assert (
        len(unknown_leaves("grpo", yaml.safe_load((CONFIGS / "nemo_rl_grpo.yaml").read_text())))
        >= 60
    )
    assert "as NeMo RL has them" in text
    headings = [line.split(" (")[0] for line in text.splitlines() if not line.startswith(" ")][1:]
    missing = "run_name, data.train_path, reward.functions, data.validation_path"
    assert headings == ["renamed", "unsupported", "safe to delete", f"to be set as well: {missing}"]
    renamed, unsupported, deletable = re.split(r"\n(?:unsupported|safe to delete).*\n", text)
    assert (
        "grpo.normalize_rewards: true -> grpo.advantage.normalize: group_std (leave_one_out_std"
        in renamed
    )
    assert (
        "grpo.use_leave_one_out_baseline: true -> grpo.advantage.baseline: leave_one_out" in renamed
    )
    assert "loss_fn.token_level_loss: true -> loss_fn.normalization: token" in renamed
    assert "policy.dtensor_cfg.tensor_parallel_size -> parallel.tensor" in renamed
    assert "policy.generation.backend" not in text, "vLLM has the same name in both"
    assert "policy.scheduler as a section with kind" in unsupported
    assert "policy.generation.vllm_cfg" not in unsupported
    for key in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager"):
        old = f"policy.generation.vllm_cfg.{key} -> policy.generation.vllm.{key}"
        assert old in renamed
    assert all(key in deletable for key in ("policy.megatron_cfg", "grpo.reward_shaping"))
    assert "policy.megatron_cfg." not in text


VLLM = "policy.generation.vllm"
OWN_WORKERS = "write the number of workers that only generate"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "nemo_rl_async_grpo",
            [
                "grpo.async_grpo.max_trajectory_age_steps -> grpo.max_staleness  ",
                "grpo.async_grpo.in_flight_weight_updates: true -> grpo.weight_update: in_flight  ",
                "policy.generation.backend: sglang -> vllm  ",
                "policy.generation.vllm_kwargs.max_num_seqs -> policy.generation.vllm.max_num_seqs",
                "colocated.resources.gpus_per_node -> cluster.generation_workers (times colocated",
                "_size only: policy.generation.vllm_cfg.pipeline_parallel_size",
                "computes in policy.precision: policy.generation.vllm_cfg.precision",
                "policy.generation.vllm_cfg.env_vars, policy.generation.vllm_kwargs.compilation_",
            ],
        ),
        (
            "verl_async_grpo",
            [
                "async_training.staleness_threshold: 0.5 -> grpo.max_staleness: 1 (",
                "async_training.partial_rollout: true -> grpo.weight_update: in_flight  ",
                "actor_rollout_ref.rollout.name: trtllm -> policy.generation.backend: vllm  ",
                f"rollout.tensor_model_parallel_size -> {VLLM}.tensor_parallel_size  ",
                "rollout.n_gpus_per_node -> cluster.generation_workers (times rollout.nnodes)  ",
                "weights after every step: async_training.trigger_parameter_sync_step",
                f"options in {VLLM}: actor_rollout_ref.rollout.engine_kwargs",
            ],
        ),
        ("verl_grpo", ["computes in policy.precision: actor_rollout_ref.rollout.dtype"]),
        (
            "trl_grpo",
            [
                "use_vllm: true -> policy.generation.backend: vllm  ",
                f"vllm_gpu_memory_utilization -> {VLLM}.gpu_memory_utilization  ",
                f"vllm_tensor_parallel_size -> {VLLM}.tensor_parallel_size  ",
                "entropy_coef -> loss_fn.entropy_coefficient  ",
                "loss_fn.entropy_coefficient is constant: use_adaptive_entropy",
            ],
        ),
        (
            "trl_async_grpo",
            [
                "max_staleness -> grpo.max_staleness  ",
                "weights after every step: weight_sync_steps",
                "GPUs only: vllm_mode",
            ],
        ),
    ],
)
def test_keys_of_the_inference_engine_and_of_asynchronous_training(
    name: str, lines: list[str]
) -> None:
    text = message(CONFIGS / f"{name}.yaml")
    for line in lines:
        assert line in text, line
    assert (OWN_WORKERS in text) == ("async" in name)


LORA_LINES = {
    "trl_sft": [
        "use_peft: true -> policy.lora.enabled: true",
        "lora_r -> policy.lora.rank  ",
        "lora_alpha -> policy.lora.alpha  ",
        "lora_target_modules -> policy.lora.target_modules  ",
        "use_rslora -> policy.lora.use_rslora  ",
        "adapters have no dropout: the log-probs of one policy must agree",
        "load_in_4bit: true -> policy.lora.quantization: nf4",
        "with a float32 scale per 64 values: use_bnb_nested_quant",
    ],
    "verl_sft": [
        "model.lora_rank -> policy.lora.rank (together with policy.lora.enabled: true)",
        "model.lora_alpha -> policy.lora.alpha  ",
    ],
    "nemo_rl_grpo": [
        "policy.dtensor_cfg.lora_cfg.enabled: true -> policy.lora.enabled: true",
        "policy.dtensor_cfg.lora_cfg.dim -> policy.lora.rank  ",
        "policy.dtensor_cfg.lora_cfg.alpha -> policy.lora.alpha  ",
    ],
    "nemo_rl_sft": [
        "policy.megatron_cfg.peft.enabled: true -> policy.lora.enabled: true",
        "policy.megatron_cfg.peft.dim -> policy.lora.rank  ",
        "k_proj and v_proj for linear_qkv",
    ],
}


@pytest.mark.parametrize("name", LORA_LINES)
def test_keys_of_adapters(name: str) -> None:
    text = message(CONFIGS / f"{name}.yaml")
    for line in LORA_LINES[name]:
        assert line in text, line


def test_keys_of_adapters_that_are_off_can_be_deleted() -> None:
    text = message(CONFIGS / "trl_sft.yaml", "use_peft=false", "lora_dropout=0")
    assert "policy.lora" not in text
    deletable = text.split("safe to delete")[1]
    for key in ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "use_rslora"):
        assert key in deletable


@pytest.mark.parametrize(
    ("enabled", "is_renamed"), [("true", False), ("false", True), ("null", True)]
)
def test_gpus_for_generation_count_only_where_generation_is_not_colocated(
    enabled: str, is_renamed: bool
) -> None:
    text = message(
        CONFIGS / "nemo_rl_async_grpo.yaml", f"policy.generation.colocated.enabled={enabled}"
    )
    assert ("resources.gpus_per_node -> cluster.generation_workers" in text) == is_renamed


def test_a_key_with_the_same_name_and_meaning_is_not_listed() -> None:
    text = message(CONFIGS / "nemo_rl_async_grpo.yaml")
    assert "max_new_tokens" not in text and "stop_token_ids" not in text


@pytest.mark.parametrize(
    ("kind", "text", "lines"),
    [
        (
            "grpo",
            (
                "data: {train_files: [a.parquet, b.parquet], prompt_key: q, max_prompt_length: 9}\n"
                "trainer: {nnodes: 1}\n"
            ),
            [
                "data.train_files -> data.train_path (one file; the others of a list by name in",
                "data.max_prompt_length -> data.max_prompt_tokens (if filter_overlong_prompts is",
                "data.prompt_key -> data.columns.prompt  ",
            ],
        ),
        (
            "sft",
            (
                "dataset_name: room/sums\ndataset_config: main\ndataset_text_field: story\n"
                "datasets: [{path: a}, {path: b}]\nassistant_only_loss: false\n"
            ),
            [
                "dataset_name -> data.train_path (as hf://NAME?split=SPLIT, or a file)",
                "dataset_text_field -> data.columns.text  ",
                "assistant_only_loss: false -> data.train_on: all",
                "hf://NAME?config=CONFIG&split=SPLIT: dataset_config",
                " in data.train_sets and weights in data.train_weights: datasets",
            ],
        ),
        (
            "sft",
            (
                "learning_rate: 1.0e-5\noptim: adamw_bnb_8bit\n"
                "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs:\n"
                "  {num_decay_steps: 9, decay_type: 1-sqrt, warmup_type: cosine}\n"
            ),
            [
                "optim: adamw_bnb_8bit -> policy.optimizer.name: adamw_8bit",
                "lr_scheduler_type: warmup_stable_decay -> policy.scheduler.kind: wsd",
                "lr_scheduler_kwargs.num_decay_steps -> policy.scheduler.wsd_decay_steps",
                "lr_scheduler_kwargs.decay_type: 1-sqrt -> policy.scheduler.wsd_decay_shape: sqrt",
                "num_cycles and min_ratio: lr_scheduler_kwargs.warmup_type",
            ],
        ),
        (
            "distill",
            ("teacher_model_name_or_path: t\nlmbda: 0.5\nbeta: 0.3\nseq_kd: true\nmax_steps: 4\n"),
            [
                "teacher_model_name_or_path -> distill.teacher  ",
                "lmbda -> distill.on_policy_fraction  ",
                "beta -> distill.divergence_weight  ",
                "max_steps -> distill.max_num_steps  ",
                "completions of the teacher: seq_kd",
            ],
        ),
        (
            "dpo",
            "beta: 0.1\nnum_train_epochs: 3\nlabel_smoothing: 0.1\neval_steps: 20\n",
            [
                "beta -> loss_fn.beta  ",
                "num_train_epochs -> dpo.max_num_epochs",
                "label_smoothing -> loss_fn.label_smoothing  ",
                "eval_steps -> dpo.val_period  ",
            ],
        ),
        (
            "distill",
            (
                "distillation: {max_num_steps: 9, topk_logits_k: 64, num_prompts_per_step: 8}\n"
                "teacher: {model_name: t, precision: bfloat16}\n"
                "loss_fn: {kl_type: mixed, mixed_kl_weight: 0.3, zero_outside_topk: false}\n"
            ),
            [
                "loss_fn.kl_type: mixed -> distill.divergence: mixed_kl",
                "loss_fn.mixed_kl_weight -> distill.divergence_weight",
                "distillation.topk_logits_k -> distill.top_k  ",
                "teacher.model_name -> distill.teacher  ",
                "distillation.num_prompts_per_step -> policy.train_global_batch_size  ",
                "the precision of the policy: teacher.precision",
            ],
        ),
        (
            "rm",
            "center_rewards_coefficient: 0.01\neval_steps: 5\nmodel_init_kwargs: {num_labels: 2}\n",
            [
                "center_rewards_coefficient -> rm.center_coefficient  ",
                "eval_steps -> rm.val_period  ",
                "own configuration is used: model_init_kwargs",
            ],
        ),
        (
            "dpo",
            "learning_rate: 1.0e-6\nmax_steps: 4\nnum_train_epochs: 2\neval_on_start: true\n",
            [
                "max_steps -> dpo.max_num_steps  ",
                "num_train_epochs -> dpo.max_num_epochs (a whole number)",
                "eval_on_start -> dpo.val_at_start  ",
            ],
        ),
        (
            "grpo",
            "grpo: {seed: 1}\ndata: {train: {data_path: a.jsonl, input_key: q, output_key: a}}\n",
            [
                "data.train.data_path -> data.train_path  ",
                "data.train.input_key -> data.columns.prompt  ",
                "data.train.output_key -> data.columns.answer  ",
            ],
        ),
        (
            "sft",
            (
                "sft: {seed: 1, only_unmask_final: true}\n"
                "data: {train: [{data_path: a.jsonl}, {data_path: b.jsonl}]}\n"
            ),
            [
                "sft.only_unmask_final: true -> data.train_on: last",
                " in data.train_sets and weights in data.train_weights: data.train",
            ],
        ),
    ],
)
def test_keys_of_training_sets_columns_and_schedules(
    tmp_path: Path, kind: Any, text: str, lines: list[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(kind, path)
    for line in lines:
        assert line in str(caught.value), line


def test_a_config_that_is_right_without_its_dead_keys_is_still_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "run_name: a\npolicy: {model_name: m, megatron_cfg: {enabled: false, lr: 1}, draft: null}\n"
        "data: {train_path: t.jsonl, num_workers: 1}\nsft: {val_at_end: true}\n"
    )
    assert main(["validate", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "policy.megatron_cfg, policy.draft, data.num_workers, sft.val_at_end" in error
    assert "renamed" not in error and "unsupported" not in error
    assert main(["sft", "--config", str(path)]) == 2


def test_sections_of_other_files_and_overrides_are_in_the_same_list(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "sft: {seed: 1}\npolicy: {dtensor_cfg: {tensor_parallel_size: 2}}\n"
    )
    path = tmp_path / "a.yaml"
    path.write_text(
        "defaults: base.yaml\nrun_name: a\nsft: {seed: 2}\npolicy: {dtensor_cfg: {cpu_offload:"
        " true}}\n1: 2\n"
    )
    text = message(path, "trainer.n_gpus_per_node=2")
    assert text.count("sft.seed ->") == 1 and f"sft.seed -> seed  [{path}:3]" in text.replace(
        "[line 3", f"[{path}:3"
    )
    assert "parallel.tensor  [" in text and "base.yaml:2]" in text
    assert "trainer.n_gpus_per_node -> cluster.gpus_per_node  [the command line]" in text
    assert "not known:\n  1  [line" in text


def test_a_misspelled_key_is_not_taken_for_a_disabled_section(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "run_name: a\nsft: {seed: 2}\npolicy: {model_name: m, dtensor_cfg: {cpu_offload: true}}\n"
        "checkpointin: {enabled: false}\ndata: {train_path: t, whatever: 3}\n"
    )
    text = message(path)
    assert "checkpointin, did you mean checkpointing?" in text
    assert "data.whatever  [line 5]\n  (data has train_path" in text


def test_a_single_foreign_key_is_answered_with_the_right_hint() -> None:
    assert (
        unknown_text(job_schema("grpo"), "grpo.seed") == "unknown key grpo.seed; did you mean seed?"
    )
    assert "data.max_prompt_tokens" in unknown_text(job_schema("grpo"), "data.max_prompt_length")
    assert "no meaning here" in unknown_text(job_schema("sft"), "logger.log_dir")
    for path in ("critic.optim.lr", "env.math.num_workers", "nothing.num_workers"):
        assert "did you mean" not in unknown_text(job_schema("grpo"), path), path


def test_every_entry_of_the_tables_fits_the_schema() -> None:
    for path, entry in all_entries().items():
        assert not is_key(path), path
        check_entry(entry)
    for path, entry in same_keys().items():
        assert is_key(path), path
        check_entry(entry)


def check_entry(entry: Entry) -> None:
    """Every key that it names exists, and every value that it gives is legal."""
    text = f"{entry.note} {entry.when_null}"
    for key in OUR_KEY.findall(text):
        assert is_key(key), key
    if entry.kind == "renamed":
        targets = (*entry.targets, *([entry.sft] if entry.sft else []))
        assert targets and all(is_key(target) for target in targets)
        assert entry.switch is None or entry.switch in all_entries()
        for value in (entry.values or {}).values():
            if value not in (None, "*") and "${" not in value:
                assert all(is_legal(target, value) for target in targets), value


def is_key(path: str) -> bool:
    if path in ("reward.functions", "reward.functions.NAME"):
        return True
    return any(type_at(config, path) is not None for config in RUN_CONFIGS.values())


def is_legal(path: str, value: str) -> bool:
    """Whether the schema takes the value for the key."""
    kind = next(name for name, config in RUN_CONFIGS.items() if type_at(config, path) is not None)
    plain: dict[str, Any] = {}
    for key in ("run_name", "policy.model_name", "data.train_path"):
        put(plain, key, "x")
    if path.startswith("reward.models.model."):
        put(plain, "reward.models.model.model_name", "x")
    put(plain, path, yaml.safe_load(value))
    return not build_config(RUN_CONFIGS[kind], plain)[1]


TEXTS = ("0", "1", "-1", "grpo", "fsdp", "${seed}", "")
VALUES = st.sampled_from([None, True, False, *TEXTS, {}, {"enabled": False}, {"x": "1"}, ["1"]])


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["sft", "grpo", "rm"]),
    chosen=st.dictionaries(st.sampled_from(sorted(all_entries())), VALUES, min_size=1, max_size=40),
)
def test_every_unknown_key_is_in_exactly_one_finding(kind: str, chosen: dict[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for path, value in chosen.items():
        if not any(
            path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in chosen
        ):
            put(tree, path, value)
    found = find_foreign(job_schema(kind), tree).found
    for leaf in unknown_leaves(kind, tree) if tree else []:
        section = leaf.split(".")[0]
        if is_key(section) and type_at(RUN_CONFIGS[kind], section) is None:
            continue  # a section of the other job, which has a message of its own
        covering = [one for one in found if leaf == one.path or leaf.startswith(f"{one.path}.")]
        assert len(covering) == 1, leaf
        for target in covering[0].targets:
            assert type_at(RUN_CONFIGS[kind], target) is not None
            assert child_types(type_at(RUN_CONFIGS[kind], target)) is None


def test_the_tables_do_not_contradict_each_other() -> None:
    names = list(tool_tables())
    shared = {
        path
        for first in names
        for other in names
        if first != other
        for path in set(tool_tables()[first]) & set(tool_tables()[other])
    }
    assert shared <= {"optim"}, "what one key means depends on the tool"


def test_one_section_of_another_tool_is_enough_for_the_list(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "run_name: a\npolicy: {model_name: m, dtensor_cfg: {cpu_offload: true}}\ndata: {train_path:"
        " t}\nsft: {}\n"
    )
    assert "nothing is offloaded to the CPU: policy.dtensor_cfg" in message(path)
    assert "trainer.nnodes -> cluster.num_nodes" in message(path, "trainer.nnodes=2")


def test_thousands_of_unknown_keys_make_a_message_of_readable_length(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    keys = "".join(f"  max_k{n}_sizes: {n}\n" for n in range(150))
    path.write_text(
        f"run_name: a\npolicy: {{model_name: m}}\ndata: {{train_path: t, num_workers: 1}}\nsft:\n "
        f" seed: 1\n{keys}"
    )
    text = message(path)
    assert "sft.seed -> seed" in text and "and 90 more" in text
    assert len(text) < 4_000
