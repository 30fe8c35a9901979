"""Each thing that cannot work whatever the data is has its message, with the arithmetic and the
nearest legal values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.batching import StreamableDataConfig as DataConfig
from nemo_like.config.build import build_config
from nemo_like.config.check import batching_section, derivation, find_problems
from nemo_like.config.loss import CorrectionKind
from nemo_like.config.parallel import num_policy_workers, policy_layout
from nemo_like.config.plain import to_dict
from nemo_like.config.rollout import RewardConfig, RewardFunctionConfig, RewardModelConfig
from nemo_like.config.schema import AdapterConfig, ClusterConfig, PolicyConfig, RunConfig
from tests.recipe import Recipe

POLICY = PolicyConfig(model_name="models/tiny")
DATA = DataConfig(train_path="data/train.jsonl")
REWARD = RewardConfig(
    functions={"answer": RewardFunctionConfig(path="nemo_like.environments.math.answer_reward")}
)
SFT = SftRunConfig(run_name="r", policy=POLICY, data=DATA)
GRPO = GrpoRunConfig(run_name="r", policy=POLICY, data=DATA, reward=REWARD)


def with_keys(config: Any, keys: dict[str, Any]) -> Any:
    """`config` with dotted keys replaced."""
    for key, value in keys.items():
        name, _, rest = key.partition(".")
        config = replace(
            config, **{name: with_keys(getattr(config, name), {rest: value}) if rest else value}
        )
    return config


def problems(config: RunConfig, **keys: Any) -> list[str]:
    """What is wrong once keys, written with `__` for dots, are replaced."""
    changed = with_keys(config, {key.replace("__", "."): value for key, value in keys.items()})
    return texts(changed)


def texts(config: RunConfig) -> list[str]:
    """The problems of single values, or else those between keys."""
    _, found = build_config(type(config), to_dict(config))
    return [problem.text for problem in found or find_problems(config)]


def test_a_restart_cannot_need_more_nodes_than_the_run_has() -> None:
    assert problems(SFT, cluster__num_nodes=2, cluster__restart__min_nodes=2) == []
    (text,) = problems(SFT, cluster__num_nodes=2, cluster__restart__min_nodes=3)
    assert text == (
        "cluster.restart.min_nodes is 3, but the run has cluster.num_nodes 2: set it to at most 2"
    )


@pytest.mark.parametrize("name", ["LD_PRELOAD", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "A-B"])
def test_variables_that_workers_cannot_set_are_refused_without_their_value(name: str) -> None:
    (text,) = problems(SFT, cluster__env={name: "secret", "MY_VARIABLE": "1"})
    assert text.startswith(f"cluster.env.{name} ")
    assert "secret" not in text


def test_keys_of_the_environment_need_completions_and_an_environment() -> None:
    path = "nemo_like.environments.included.Calculator"
    (text,) = problems(SFT, environment__path=path)
    assert text.startswith(f"environment.path is {path}, which has no effect")
    assert problems(GRPO, environment__path=path) == []


def test_a_program_is_a_function_or_a_command() -> None:
    def found(**keys: Any) -> list[str]:
        return problems(GRPO, **{f"environment__{key}": value for key, value in keys.items()})

    path, command = "my_agent.solve", ["python", "agent.py"]
    assert found(kind="program", path=path, python="/usr/bin/python3") == []
    assert found(kind="program", command=command) == []
    (text,) = found(kind="program")
    assert "needs either environment.path or environment.command, and none is set" in text
    (text,) = found(kind="program", path=path, command=command)
    assert text.endswith("both are set")
    (text,) = found(command=command)
    assert "environment.command is set, but environment.kind is class" in text
    assert found(kind="program", path=path, options={"a": 1}) == []
    (text,) = found(kind="program", command=command, options={"a": 1})
    assert text.startswith("environment.options is set")
    (text,) = problems(SFT, environment__kind="program", environment__command=command)
    assert text.startswith("environment.command is python agent.py, which has no effect")
    models = {"judge": RewardModelConfig(model_name="judge")}
    (text,) = problems(
        GRPO, environment__kind="program", environment__path=path, reward__models=models
    )
    assert text.startswith("reward.models is set")


def test_the_defaults_are_fine() -> None:
    assert problems(SFT) == []
    assert problems(GRPO) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"policy.train_global_batch_size": 0},
            "policy.train_global_batch_size is 0; it must be at least 1",
        ),
        ({"policy.optimizer.lr": 0.0}, "policy.optimizer.lr is 0.0; it must be above 0"),
        (
            {"policy.optimizer.beta2": 1.0},
            "policy.optimizer.beta2 is 1.0; it must be at least 0 and below 1",
        ),
        (
            {"policy.generation.top_p": 1.5},
            "policy.generation.top_p is 1.5; it must be above 0 and at most 1",
        ),
        ({"policy.generation.top_k": -2}, "policy.generation.top_k is -2; it must be at least -1"),
        (
            {"policy.generation.min_p": 1.5},
            "policy.generation.min_p is 1.5; it must be at least 0 and at most 1",
        ),
        (
            {"policy.generation.min_p": -0.5},
            "policy.generation.min_p is -0.5; it must be at least 0 and at most 1",
        ),
        (
            {"policy.scheduler.min_ratio": -0.1},
            "policy.scheduler.min_ratio is -0.1; it must be at least 0 and at most 1",
        ),
        (
            {"policy.max_total_sequence_length": 1},
            "policy.max_total_sequence_length is 1; it must be at least 2",
        ),
        ({"loss_fn.ratio_clip_c": 1.0}, "loss_fn.ratio_clip_c is 1.0; it must be above 1"),
        (
            {"loss_fn.reference_policy_kl_penalty": -1.0},
            "loss_fn.reference_policy_kl_penalty is -1.0; it must be at least 0",
        ),
        ({"checkpointing.keep_latest": 0}, "checkpointing.keep_latest is 0; it must be at least 1"),
        ({"run_name": "a/b"}, "run_name is 'a/b'; it must be a directory name of letters"),
        ({"run_name": ""}, "run_name is ''; "),
        ({"policy.model_name": ""}, "policy.model_name is ''; it must be not empty"),
        (
            {"data.prompt_template": "Solve: "},
            "data.prompt_template is 'Solve: '; it must be a format string with {prompt} and",
        ),
        (
            {"data.prompt_template": "{prompt} {x}"},
            "and no other field ({{ and }} stand for literal braces)",
        ),
        (
            {"data.prompt_template": "{prompt"},
            "data.prompt_template is '{prompt'; it must be a format string with {prompt}",
        ),
        (
            {"reward.functions": {"a": RewardFunctionConfig(path="answer")}},
            "reward.functions.a.path is 'answer'; it must be an import path module.function",
        ),
        (
            {"reward.timeout_s": 1800.0},
            "reward.timeout_s 1800 must be below cluster.progress_timeout_s 1800",
        ),
        ({"reward.timeout_s": 0.0}, "reward.timeout_s is 0.0; it must be above 0"),
        ({"reward.max_error_share": 1.5}, "reward.max_error_share is 1.5; it must be"),
        (
            {"reward.functions": {}},
            "reward.functions and reward.models are empty, so nothing scores the",
        ),
        (
            {"reward.functions": {"a": RewardFunctionConfig(path="m.f", weight=0.0)}},
            "every weight in reward.functions and reward.models is 0, so the reward is always 0",
        ),
        (
            {"policy.scheduler.decay_steps": 5, "policy.scheduler.warmup_steps": 5},
            (
                "policy.scheduler.decay_steps is 5, which includes the 5 warm-up steps; it must be"
                " above 5"
            ),
        ),
        (
            {
                "policy.scheduler.kind": "wsd",
                "policy.scheduler.decay_steps": 10,
                "policy.scheduler.warmup_steps": 4,
                "policy.scheduler.wsd_decay_steps": 7,
            },
            "policy.scheduler.wsd_decay_steps is 7, but only 6 steps are between",
        ),
        ({"grpo.val_period": 5}, "grpo.val_period is 5, but data.validation_path is not set"),
        (
            {"policy.generation.temperature": 0.0},
            "policy.generation.temperature is 0: greedy completions of one prompt are all equal",
        ),
        (
            {"policy.generation.max_new_tokens": 1024},
            "is 1024 and policy.max_total_sequence_length 1024, prompt included",
        ),
        (
            {"policy.generation.stop_strings": ("",)},
            (
                "policy.generation.stop_strings is ['']; it must be a list of texts that are not"
                " empty"
            ),
        ),
        (
            {"grpo.num_generations_per_prompt": 1, "policy.train_global_batch_size": 8},
            "grpo.num_generations_per_prompt is 1; it must be at least 2 (the advantage compares",
        ),
        (
            {"policy.oversize_rows": "singleton"},
            "policy.oversize_rows is singleton, which needs a token budget",
        ),
        (
            {"cluster.backend": "local", "cluster.workers_per_node": 4},
            (
                "cluster.workers_per_node is 4, but cluster.backend local is one worker in this"
                " process: set it to 1"
            ),
        ),
        (
            {"cluster.backend": "local", "cluster.generation_workers": 1},
            "cluster.generation_workers is 1, but cluster.backend local",
        ),
    ],
)
def test_each_value_that_cannot_work_has_its_message(keys: dict[str, Any], expected: str) -> None:
    found = texts(with_keys(GRPO, keys))
    assert len(found) == 1
    assert expected in found[0]


def test_sft_does_not_need_what_only_rollouts_need() -> None:
    assert (
        problems(SFT, policy__generation__temperature=0.0, policy__max_total_sequence_length=64)
        == []
    )
    assert problems(SFT, sft__val_generate=True) == [
        "sft.val_generate is true, but data.validation_path is not set",
        (
            "sft.val_generate is true, but reward.functions and reward.models have nothing to score"
            " answers with"
        ),
    ]


def test_rows_must_divide_into_optimizer_steps() -> None:
    assert problems(GRPO, grpo__num_prompts_per_step=6, policy__train_global_batch_size=16) == [
        (
            "6 prompts x 4 generations = 24 rows per step, and 24 / policy.train_global_batch_size"
            " 16 = 1.5 optimizer steps, not a whole number: set policy.train_global_batch_size to"
            " 12 or 24, or grpo.num_prompts_per_step to 4 or 8"
        )
    ]
    # More rows per optimizer step than there are is the same mistake.
    assert problems(GRPO, grpo__num_prompts_per_step=2)[0].endswith(
        "= 0.25 optimizer steps, not a whole number: set policy.train_global_batch_size to 8, or"
        " grpo.num_prompts_per_step to 8"
    )


@given(st.integers(1, 40), st.integers(2, 12), st.integers(1, 600), st.sampled_from([1, 2, 4]))
def test_every_value_that_is_suggested_is_legal(
    prompts: int, group: int, batch: int, workers: int
) -> None:
    sizes = {
        "policy.train_global_batch_size": batch,
        "grpo.num_prompts_per_step": prompts,
        "grpo.num_generations_per_prompt": group,
    }
    packed = {"policy.sequence_packing.enabled": True, "cluster.workers_per_node": workers}
    config = with_keys(GRPO, {**packed, **sizes})
    for problem in find_problems(config):
        if "whole number" not in problem.text:
            continue
        for part in problem.text.partition("set ")[2].split(", or "):
            key, _, legal = part.partition(" to ")
            for value in legal.split(" or "):
                again = find_problems(with_keys(config, {key: int(value)}))
                assert all("whole number" not in other.text for other in again), (key, value)


def test_workers_share_a_global_batch() -> None:
    assert problems(
        SFT, cluster__num_nodes=2, cluster__workers_per_node=4, policy__train_global_batch_size=12
    ) == [
        (
            "policy.train_global_batch_size 12 / 8 data-parallel ranks (cluster.num_nodes 2 x"
            " cluster.workers_per_node 4) = 1.5 rows each; without packing or dynamic batching"
            " every rank needs equally many: set it to 8 or 16"
        )
    ]
    packed = {
        "policy__sequence_packing": replace(POLICY.sequence_packing, enabled=True),
        "cluster__gpus_per_node": 8,
    }
    assert problems(SFT, policy__train_global_batch_size=12, **packed) == []
    assert problems(SFT, policy__train_global_batch_size=4, **packed) == [
        (
            "policy.train_global_batch_size 4 / 8 data-parallel ranks (cluster.num_nodes 1 x"
            " cluster.gpus_per_node 8) = 0.5 rows each; every rank needs at least one: set it to 8"
            " or more, or use fewer workers"
        )
    ]


def test_the_longest_row_must_fit_the_budget_unless_it_is_said_what_to_do() -> None:
    packing = replace(
        POLICY.sequence_packing, enabled=True, train_mb_tokens=1000, sequence_length_round=64
    )
    small = {"policy__sequence_packing": packing, "policy__max_total_sequence_length": 1000}
    assert problems(SFT, **small) == [
        (
            "policy.sequence_packing.train_mb_tokens is 1000, but a row may have 1000 tokens"
            " (policy.max_total_sequence_length, 1024 when rounded up to"
            " policy.sequence_packing.sequence_length_round 64) and would stop the run: set"
            " train_mb_tokens to at least 1024, or policy.oversize_rows to truncate or singleton"
        )
    ]
    assert problems(SFT, **small, policy__oversize_rows="truncate") == []
    assert problems(SFT, **small, policy__oversize_rows="singleton") == []
    tiny = replace(packing, logprob_mb_tokens=32)
    assert problems(SFT, policy__sequence_packing=tiny, policy__oversize_rows="truncate") == [
        (
            "policy.sequence_packing.logprob_mb_tokens is 32, below the 64 tokens to which the"
            " shortest row is padded (policy.sequence_packing.sequence_length_round 64): no row"
            " would fit"
        )
    ]


def test_balanced_packing_needs_a_balance() -> None:
    packing = replace(POLICY.sequence_packing, enabled=True, balance="none")
    assert problems(SFT, policy__sequence_packing=packing) == [
        (
            "policy.sequence_packing.balance is none, but policy.sequence_packing.algorithm"
            " balanced assigns rows to ranks by work: set balance to flops or tokens, or algorithm"
            " to a bin packer such as best_fit_decreasing"
        )
    ]
    round_robin = replace(packing, algorithm="best_fit_decreasing")
    assert problems(SFT, policy__sequence_packing=round_robin) == []
    disabled = replace(packing, enabled=False)
    assert problems(SFT, policy__sequence_packing=disabled) == []


def test_policy_workers_are_counted() -> None:
    assert num_policy_workers(ClusterConfig(num_nodes=2, workers_per_node=3)) == 6
    assert num_policy_workers(ClusterConfig(num_nodes=2, gpus_per_node=8, workers_per_node=3)) == 16
    assert num_policy_workers(ClusterConfig(backend="local", gpus_per_node=1)) == 1


def test_workers_must_be_a_multiple_of_the_replica_size() -> None:
    def parallel_problems(**keys: object) -> list[str]:
        return problems(
            SFT, **{"cluster__workers_per_node": 6, "policy__train_global_batch_size": 12, **keys}
        )

    assert parallel_problems(parallel__tensor=2) == []
    assert parallel_problems(parallel__tensor=2, parallel__context=2) == [
        (
            "parallel.tensor 2 x parallel.context 2 x parallel.pipeline 1 = 4 workers per model"
            " replica, and 6 workers / 4 = 1.5 replicas, not a whole number: use 4 or 8 workers"
            " (workers: cluster.num_nodes 1 x cluster.workers_per_node 6)"
        )
    ]
    assert parallel_problems(parallel__pipeline=2) == [
        (
            "parallel.pipeline is 2, but policy.engine dtensor has no pipeline: set it to 1, or"
            " policy.engine to megatron"
        )
    ]
    assert parallel_problems(parallel__pipeline=2, policy__engine="megatron") == []
    (no_tensor,) = parallel_problems(parallel__sequence=True)
    assert "parallel.tensor is 1" in no_tensor
    (share,) = parallel_problems(parallel__tensor=2, policy__train_global_batch_size=4)
    assert "4 / 3 data-parallel ranks" in share and "2 workers each" in share


def test_experts_must_divide_among_the_workers_of_a_stage() -> None:
    megatron: dict[str, object] = {
        "policy__engine": "megatron",
        "policy__train_global_batch_size": 12,
    }
    assert (
        problems(
            SFT, **megatron, cluster__workers_per_node=12, parallel__pipeline=2, parallel__expert=3
        )
        == []
    )
    assert problems(
        SFT, **megatron, cluster__workers_per_node=12, parallel__pipeline=2, parallel__expert=4
    ) == [
        (
            "parallel.expert 4 must divide the workers of a pipeline stage, 12 workers /"
            " parallel.pipeline 2 = 6, and 6 / 4 = 1.5, not a whole number: set parallel.expert to"
            " 3 or 6 (workers: cluster.num_nodes 1 x cluster.workers_per_node 12)"
        )
    ]
    # FSDP shards over the data- and context-parallel ranks.
    workers = {"cluster__workers_per_node": 4, "policy__train_global_batch_size": 4}
    assert problems(SFT, **workers, parallel__expert=2, parallel__tensor=2) == []
    (on_dtensor,) = problems(SFT, **workers, parallel__expert=4, parallel__tensor=2)
    assert "parallel.replicas 1 = 2: set parallel.expert to 2 (workers: cluster" in on_dtensor


def test_copies_of_the_weights_must_divide_the_data_parallel_ranks() -> None:
    workers: dict[str, object] = {
        "cluster__workers_per_node": 12,
        "parallel__tensor": 2,
        "policy__train_global_batch_size": 12,
    }
    assert problems(SFT, **workers, parallel__replicas=3, parallel__reshard=False) == []
    assert problems(SFT, **workers, parallel__replicas=4) == [
        "parallel.replicas 4 must divide the data-parallel size, 6: set it to 3 or 6"
    ]


def test_options_of_the_dtensor_engine_are_refused_by_the_other() -> None:
    megatron: dict[str, object] = {"policy__engine": "megatron", "cluster__workers_per_node": 2}
    (replicas,) = problems(SFT, **megatron, parallel__replicas=2)
    assert replicas.startswith("parallel.replicas is 2, but policy.engine megatron has")
    assert replicas.endswith("set it to 1, or policy.engine to dtensor")
    (reshard,) = problems(SFT, **megatron, parallel__reshard=False)
    assert "set it to auto, or policy.engine to dtensor" in reshard
    (compiled,) = problems(SFT, **megatron, policy__compile="layers")
    assert "set policy.compile to none, or policy.engine to dtensor" in compiled


def derived(config: RunConfig) -> str:
    layout = policy_layout(config.parallel, config.cluster)
    return derivation(config.policy, config.cluster, config.needs, layout)


def test_the_derivation_is_spelled_out() -> None:
    assert batching_section(GRPO.policy) is None
    assert derived(
        with_keys(GRPO, {"policy.train_global_batch_size": 16, "cluster.workers_per_node": 2})
    ) == (
        "8 prompts x 4 generations = 32 rows per step\n"
        "32 rows / 16 rows per optimizer step = 2 optimizer steps\n"
        "100 steps = 200 optimizer steps over 3,200 rows\n"
        "16 rows / 2 workers = 8 rows each\n"
        "training: 8 rows / 4 rows per microbatch = 2 microbatches\n"
        "log-probs: 8 rows / 4 rows per microbatch = 2 microbatches"
    )
    single_step = derived(GRPO)
    assert "1 optimizer step\n" in single_step
    assert "previous log-probs: from the training pass" in single_step
    assert "log-probs: 32 rows" not in single_step
    bypass = {"loss_fn.importance_correction.kind": "bypass"}
    for batch in (16, 32):
        text = derived(with_keys(GRPO, {**bypass, "policy.train_global_batch_size": batch}))
        assert "previous log-probs: from the generator\n" in text
        assert "log-probs: 32 rows" not in text
    penalty = {"loss_fn.reference_policy_kl_penalty": 0.1}
    assert "log-probs: 32 rows / 4" in derived(with_keys(GRPO, {**bypass, **penalty}))
    packed = with_keys(
        SFT, {"policy.sequence_packing.enabled": True, "policy.max_total_sequence_length": 1000}
    )
    assert derived(packed) == (
        "32 rows per step = 1 optimizer step\n"
        "32 rows / 1 worker = 32 rows each\n"
        "training: packed in microbatches of at most 4096 tokens, which fit 4 of the longest rows"
        " (1000 tokens) and more of shorter ones"
    )


def test_the_collective_timeout_is_below_the_progress_deadline(recipe: Recipe) -> None:
    assert recipe.sft("cluster.progress_timeout_s=900").cluster.collective_timeout_s == 300
    assert recipe.sft("cluster.progress_timeout_s=0").cluster.collective_timeout_s == 600


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"upper": 2.0},
            "loss_fn.importance_correction.kind none has no weights to bound: remove upper, or set",
        ),
        ({"kind": "bypass", "lower": 0.5}, "kind bypass has no weights to bound: remove lower"),
        (
            {"kind": "token_mask", "upper": 1.0, "lower": 1.0},
            "lower must be below upper, e.g. the defaults 0.5 and 5 of kind token_mask",
        ),
        ({"kind": "token_truncate", "upper": 0.9}, "upper is 0.9; it must be at least 1"),
        ({"kind": "sequence_mask", "lower": 1.2}, "lower is 1.2; it must be at least 0 and at"),
    ],
)
def test_bounds_of_the_importance_correction(keys: dict[str, Any], expected: str) -> None:
    prefixed = {f"loss_fn.importance_correction.{name}": value for name, value in keys.items()}
    found = texts(with_keys(GRPO, prefixed))
    assert any(expected in text for text in found), found


def test_every_kind_of_importance_correction_has_legal_defaults() -> None:
    for kind in get_args(CorrectionKind):
        assert problems(GRPO, loss_fn__importance_correction__kind=kind) == []


def test_adapters_are_sent_in_bfloat16_where_nothing_prevents_it() -> None:
    adapters = AdapterConfig(enabled=True)
    policy = PolicyConfig(model_name="m", precision="bfloat16", lora=adapters)
    assert policy.sends_adapters
    assert not replace(policy, precision="float32").sends_adapters
    sent = replace(adapters, weight_sync="adapter")
    assert replace(policy, precision="float32", lora=sent).sends_adapters
    for changes in (
        {"enabled": False},
        {"weight_sync": "merged"},
        {"quantization": "nf4"},
        {"rank": 513},
    ):
        assert not replace(policy, lora=replace(adapters, **changes)).sends_adapters, changes


def test_adapters_need_target_modules() -> None:
    (targets,) = problems(SFT, policy__lora__enabled=True, policy__lora__target_modules=())
    assert targets.startswith("policy.lora.target_modules is empty")
    (sync,) = problems(SFT, policy__lora__weight_sync="adapter")
    assert sync.startswith("policy.lora.weight_sync is adapter, but policy.lora.enabled is false")
    large = {"policy__lora__enabled": True, "policy__lora__rank": 600}
    large["policy__generation__backend"] = "vllm"
    assert problems(GRPO, **large) == []
    assert problems(GRPO, **large, policy__precision="bfloat16") == []
    (rank,) = problems(GRPO, **large, policy__lora__weight_sync="adapter")
    assert "vLLM has adapters up to rank 512: lower policy.lora.rank" in rank
    quantized = {"policy__lora__enabled": True, "policy__lora__quantization": "nf4"}
    (sync,) = problems(GRPO, **quantized, policy__lora__weight_sync="adapter")
    assert "the policy the weights in 4 bits. Set policy.lora.weight_sync to merged" in sync
    assert problems(GRPO, **quantized, policy__precision="bfloat16") == []
    assert problems(SFT, policy__lora__enabled=True) == []
    (disabled,) = problems(SFT, policy__lora__quantization="nf4")
    assert disabled.startswith("policy.lora.quantization is nf4, but policy.lora.enabled is false")
    nf4 = {"policy__lora__enabled": True, "policy__lora__quantization": "nf4"}
    assert problems(SFT, **nf4) == []
    (engine,) = problems(SFT, **nf4, policy__engine="megatron")
    assert "Megatron-Core have no 4-bit weights: set policy.engine to dtensor" in engine
