"""The policy-gradient losses on Megatron-Core: pipeline stages, tensor, context and expert
parallelism.
"""

from __future__ import annotations

import itertools

import pytest

from tests.exhaustive import usually
from tests.policy.megatron.ranks import Step, of_model, take_steps
from tests.policy.megatron.reference import assert_step_is
from tests.policy.members import LOSSES, MEMBERS, gradients_by_definition
from tests.policy.test_gradient_equality import packed, sharing
from tests.policy.tiny import grouped_batch

LAYOUTS = ("dp2", "tp2 + sp", "cp2", "pp2", "ep2", "tp2 x pp2 + sp", "pp2 x cp2")


@pytest.mark.parametrize("parallel", usually(LAYOUTS, "cp2"))
def test_a_layout_does_not_change_the_gradient_of_a_member(parallel, model_dir, on_ranks):
    model = model_dir("qwen3_moe" if "ep" in parallel else "qwen3")
    configs = [of_model(keys, model) for keys in (packed(48), sharing(28))]
    cases = list(itertools.product(LOSSES, configs))
    steps = [Step(config, grouped_batch(), LOSSES[name]) for name, config in cases]
    ranks = on_ranks(take_steps, parallel, steps)
    for index, (name, config) in enumerate(cases):
        gradients, loss = gradients_by_definition(model, grouped_batch(), MEMBERS[name])
        results = [steps_of_rank[index] for steps_of_rank in ranks]
        assert_step_is(results, gradients, loss, (parallel, name, config.shared_prefix))
