"""Complete runs whose rollouts are programs with the `openai` client."""

from __future__ import annotations

from nemo_like.algorithms.grpo.loop import run_grpo
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

PROGRAM = (
    "environment.kind=program",
    "environment.path=tests.algorithms.agent_programs.solves",
    "~reward.functions.digits",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=2",
    "policy.train_global_batch_size=8",
    "data.max_validation_rows=2",
    "policy.max_total_sequence_length=128",
)


def test_a_program_with_the_openai_client_is_trained(recipe: Recipe) -> None:
    run = run_grpo(recipe.grpo(*PROGRAM)).directory.path
    for line in read_metrics(run)[1:]:
        assert line["episodes/started"] == line["episodes/trained"] == 8
        assert line["mismatch/logprob_diff_max"] < 1e-4
