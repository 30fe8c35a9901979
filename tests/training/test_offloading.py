"""`cluster.offload=auto` offloads exactly if the predicted peaks do not fit together."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.registry import load_any_config
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.models.spec import load_spec
from nemo_like.prediction.memory import CONTEXT_BYTES, GIB, MemoryModel
from nemo_like.prediction.placement import policy_placement
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.model_files import policy_memory
from nemo_like.training.workers import decide_offload

SIZES = st.floats(0, 1e12)


@given(policy=SIZES, generator=SIZES, device=SIZES)
def test_always_and_never_do_not_depend_on_memory(policy, generator, device):
    sizes = {"policy_bytes": policy, "generator_bytes": generator, "device_bytes": device}
    assert decide_offload(True, **sizes).offloads
    assert not decide_offload(False, **sizes).offloads
    assert decide_offload(False, **sizes).reason == "cluster.offload is false"


@given(policy=SIZES, generator=SIZES, device=SIZES, more=SIZES)
def test_auto_offloads_what_does_not_fit_and_is_monotonic(policy, generator, device, more):
    decision = decide_offload(
        "auto", policy_bytes=policy, generator_bytes=generator, device_bytes=device
    )
    usable = max(0.0, 0.9 * (device - 2 * CONTEXT_BYTES))
    assert decision.offloads == (policy + generator > usable)
    larger = decide_offload(
        "auto", policy_bytes=policy, generator_bytes=generator, device_bytes=device + more
    )
    assert decision.offloads or not larger.offloads


def test_the_reason_has_the_sizes() -> None:
    decision = decide_offload(
        "auto", policy_bytes=25 * GIB, generator_bytes=10 * GIB, device_bytes=139 * GIB
    )
    assert not decision.offloads
    assert decision.reason == (
        "predicted peaks of policy 25.0 GiB and generator 10.0 GiB; 121.5 GiB of a GPU's 139.0 GiB"
        " are usable"
    )


def grpo_config(tmp_path: Path, backend: str) -> RunConfig:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
run_name: test
policy:
  model_name: {tmp_path}
  precision: bfloat16
  max_total_sequence_length: 1024
  sequence_packing: {{enabled: true, train_mb_tokens: 8192}}
  generation: {{backend: {backend}}}
cluster: {{gpus_per_node: 1}}
grpo: {{max_num_steps: 1}}
data: {{train_path: {tmp_path}/train.jsonl}}
reward: {{functions: {{math: {{path: nemo_like.environments.math.math_reward}}}}}}
"""
    )
    return load_any_config(path)


def test_the_peaks_of_a_1b_model_fit_on_a_large_gpu_and_not_on_a_small_one(tmp_path) -> None:
    config = grpo_config(tmp_path, "hf")
    spec = load_spec("1b")
    layout = policy_layout(config.parallel, config.cluster)
    max_tokens, memory = policy_memory(config.policy, layout, config.needs, spec, "cuda")
    policy = memory.peak(max_tokens)
    placement = policy_placement(config.policy, layout, needs_reference=config.needs.reference)
    assert policy == MemoryModel(spec, placement).peak(8192)
    generator = generation_backend(config.policy).peak_bytes(config.policy, spec, 139 * GIB)
    # Weights in bfloat16, and at least the KV cache of 64 rows of 1,024 tokens.
    cache = 16 * 2 * 8 * 64 * 2 * 64 * 1024
    assert 2 * spec.num_params + cache < generator < 1.3 * (2 * spec.num_params + cache)
    for device_gib, offloads in ((139, False), (24, True)):
        decision = decide_offload(
            "auto", policy_bytes=policy, generator_bytes=generator, device_bytes=device_gib * GIB
        )
        assert decision.offloads == offloads, decision.reason


def test_vllm_takes_its_share_of_the_gpu(tmp_path) -> None:
    config = grpo_config(tmp_path, "vllm")
    peak = generation_backend(config.policy).peak_bytes(config.policy, load_spec("1b"), 100 * GIB)
    assert peak == 60 * GIB
