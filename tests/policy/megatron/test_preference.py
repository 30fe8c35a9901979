"""Preference losses on Megatron-Core: pipeline stages, tensor and context parallelism."""

from __future__ import annotations

import pytest

from nemo_like.algorithms.dpo.loss import PreferenceLoss
from tests.policy.megatron.ranks import Step, of_model, take_steps
from tests.policy.megatron.reference import assert_step_is
from tests.policy.preferences import LOSSES, PAIR_LENGTHS, gradients_by_definition, pair_batch
from tests.policy.test_gradient_equality import dynamic, packed


@pytest.mark.parametrize("parallel", ["cp2", "tp2 x pp2 + sp", "pp2 x cp2"])
def test_a_layout_does_not_change_the_gradient_of_a_preference(parallel, model_dir, on_ranks):
    model = model_dir("llama_tied")
    steps = []
    for config in (packed(48), dynamic(48)):
        for loss in LOSSES.values():
            keys = of_model(config, model)
            assert keys.train_global_batch_size == len(PAIR_LENGTHS)
            steps.append(Step(keys, pair_batch(), PreferenceLoss(config=loss)))
    ranks = on_ranks(take_steps, parallel, steps)
    for index in range(len(steps)):
        name = list(LOSSES)[index % len(LOSSES)]
        gradients, loss = gradients_by_definition(model, pair_batch(), LOSSES[name])
        results = [steps_of_rank[index] for steps_of_rank in ranks]
        assert_step_is(results, gradients, loss, (parallel, name))
