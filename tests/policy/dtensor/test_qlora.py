"""QLoRA: gradients, outputs and files are those of PEFT on a model in NF4, in every layout of
ranks. The reference is rounded by NumPy, and the adapter is loaded on a model of bitsandbytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.config.schema import ParallelConfig
from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from tests.policy.adapters import (
    TRAINED,
    look,
    of_architecture,
    train,
    use,
)
from tests.policy.dtensor.adapter_ranks import DTensorSide
from tests.policy.peft_reference import Reference, assert_look, assert_use
from tests.policy.test_gradient_equality import TOLERANCE
from tests.policy.tiny import context, run_ranks

nf4 = pytest.importorskip("nemo_like.policy.nf4")
pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")

MODEL = "qwen2_blocks"
LAYOUTS = {
    "dp 2": ParallelConfig(),
    "tp 2, sequence": ParallelConfig(tensor=2, sequence=True),
    "cp 2": ParallelConfig(context=2),
}


def program(
    worker_context: WorkerContext,
    parallel: ParallelConfig,
    model: str,
    straight: Path,
    out: Path,
) -> dict[str, Any]:
    """Every operation of a layout, in one process group."""
    if worker_context.world_size > 1:
        process_groups.init_process_group(worker_context)
    try:
        side = DTensorSide(worker_context, parallel)
        found = look(side, MODEL, model, recomputes=True)
        return found | {"use": use(side, MODEL, model, straight, out)}
    finally:
        if worker_context.world_size > 1:
            process_groups.destroy()


@pytest.fixture(scope="module")
def reference(model_dir) -> Reference:
    return Reference(MODEL, model_dir(MODEL))


@pytest.fixture(scope="module")
def straight(model_dir, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """What one process finds, and its checkpoints."""
    out = tmp_path_factory.mktemp("straight")
    return program(context(), ParallelConfig(), model_dir(MODEL), out, out), out


def test_one_process_has_the_gradients_of_peft_on_nf4(reference, straight):
    found, out = straight
    assert_look([found], reference, MODEL)
    assert_use([found["use"]], reference, found["use"]["losses"], out)
    assert found["use"]["losses"][-1] != found["use"]["losses"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_nothing(
    layout, reference, straight, model_dir, rank_pool, meeting, tmp_path
):
    single, folder = straight
    arguments = (LAYOUTS[layout], model_dir(MODEL), folder, tmp_path)
    ranks = run_ranks(rank_pool, program, 2, meeting, *arguments)
    assert_look(ranks, reference, layout)
    losses = single["use"]["losses"]
    assert_use([rank["use"] for rank in ranks], reference, losses, tmp_path)
    side = DTensorSide(context(), ParallelConfig())
    alone = side.worker(of_architecture(TRAINED, MODEL, model_dir(MODEL)))
    alone.load(tmp_path / "half")
    assert train(side, alone, range(2, 4)) == pytest.approx(losses[2:], rel=TOLERANCE)
