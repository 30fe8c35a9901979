"""`policy.activation_checkpointing=auto`: the fastest mode whose predicted peak fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.parallel import policy_layout
from nemo_like.prediction.memory import GIB, fitting_checkpointing, usable_bytes
from nemo_like.training.model_files import open_model_spec, policy_memory
from tests.recipe import Recipe

MODES = ("none", "selective", "full")


@given(st.lists(st.floats(1e6, 1e12), min_size=3, max_size=3), st.floats(1.0, 1000.0))
def test_the_first_mode_that_fits_is_taken(sizes: list[float], memory_gib: float) -> None:
    sizes.sort(reverse=True)
    usable = 0.9 * max(memory_gib - 2.0, 0.0) * 2**30
    assert usable_bytes(memory_gib) == pytest.approx(usable)
    mode = fitting_checkpointing(dict(zip(MODES, sizes, strict=True)), memory_gib * GIB)
    index = MODES.index(mode)
    # No faster mode fits, and this one does unless it is the last.
    assert all(size > usable_bytes(memory_gib) for size in sizes[:index])
    assert sizes[index] <= usable_bytes(memory_gib) or index == 2


def test_a_device_without_a_limit_recomputes_nothing() -> None:
    assert fitting_checkpointing({"none": 1e15, "full": 1e12}, None) == "none"
    assert fitting_checkpointing({}, 1e9) == "none"


def test_the_peaks_fall_with_recomputation(recipe: Recipe) -> None:
    keys = ("policy.activation_checkpointing=auto", "policy.sequence_packing.train_mb_tokens=65536")
    config = recipe.sft(*keys, "cluster.gpus_per_node=1")
    layout = policy_layout(config.parallel, config.cluster)
    spec = open_model_spec(config.policy)
    max_tokens, memory = policy_memory(config.policy, layout, config.needs, spec, "cuda")
    assert max_tokens == 65536
    peaks = memory.checkpointing_peaks(max_tokens)
    assert tuple(peaks) == MODES
    assert peaks["none"] > peaks["selective"] > peaks["full"]
    # Devices of which each mode is the fastest that fits, with room for the CUDA context.
    for mode, peak in peaks.items():
        assert fitting_checkpointing(peaks, (peak / 0.9) + 2 * GIB + 1024) == mode


def test_a_run_on_the_cpu_recomputes_nothing(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for mode in ("auto", "none"):
        keys = ("sft.max_num_steps=1", "sft.val_at_start=false", "sft.val_period=0")
        result = run_sft(
            recipe.sft(*keys, f"run_name={mode}", f"policy.activation_checkpointing={mode}")
        )
        losses.append((result.last["policy/loss"], result.last["policy/grad_norm"]))
    assert losses[0] == losses[1]
    assert "activation checkpointing: none (the workers have no GPU)" in capsys.readouterr().out
