"""Preference losses on Megatron-Core: pipeline stages, tensor, context and expert parallelism."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nemo_like.algorithms.preferences.loss import PreferenceLoss
from tests.exhaustive import usually
from tests.policy.megatron.ranks import Step, of_model, take_steps
from tests.policy.megatron.reference import assert_step_is
from tests.policy.preferences import LOSSES, PAIR_LENGTHS, gradients_by_definition, pair_batch
from tests.policy.test_gradient_equality import dynamic, packed, sharing

BATCHING = {"packed": packed(48), "dynamic": dynamic(48), "shared": sharing(32)}
LAYOUTS = {
    "cp2": ("packed", "dynamic", "shared"),
    "tp2 + sp": ("shared",),
    "pp2": ("shared",),
    "ep2": ("shared",),
    "tp2 x pp2 + sp": ("packed", "shared"),
    "pp2 x cp2": ("dynamic", "shared"),
}
"""Layout -> its ways of batching."""


@pytest.fixture(scope="module")
def definitions(model_dir) -> dict[str, dict[str, Any]]:
    """Gradients and loss of each preference loss in float64, by architecture."""
    return {
        architecture: {
            name: gradients_by_definition(model_dir(architecture), pair_batch(), loss)
            for name, loss in LOSSES.items()
        }
        for architecture in ("llama_tied", "qwen3_moe")
    }


@pytest.mark.parametrize("parallel", usually(LAYOUTS, "cp2"))
def test_a_layout_does_not_change_the_gradient_of_a_preference(
    parallel, model_dir, definitions, on_ranks
):
    architecture = "qwen3_moe" if "ep" in parallel else "llama_tied"
    steps = []
    cases = list(itertools.product(LAYOUTS[parallel], LOSSES))
    for batching, name in cases:
        keys = of_model(BATCHING[batching], model_dir(architecture))
        assert keys.train_global_batch_size == len(PAIR_LENGTHS)
        steps.append(Step(keys, pair_batch(), PreferenceLoss(config=LOSSES[name])))
    ranks = on_ranks(take_steps, parallel, steps)
    for index, (batching, name) in enumerate(cases):
        gradients, loss = definitions[architecture][name]
        results = [steps_of_rank[index] for steps_of_rank in ranks]
        assert_step_is(results, gradients, loss, (parallel, batching, name))
