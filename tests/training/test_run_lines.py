"""The lines that a run prints about its steps."""

from __future__ import annotations

from nemo_like.training.reporting import step_line

GRPO = {
    "policy/loss": -0.00001,
    "policy/approx_kl_k3": 0.0,
    "reward/mean": 0.53,
    "reward/std": 0.2,
    "reward/answer_mean": 0.5,
    "reward/answer_std": 0.2,
    "reward/frac_groups_zero_std": 0.25,
    "generation/truncated_share": 1.0,
    "generation/completion_length_mean": 48.2,
    "timing/step_s": 4.25,
}


def test_a_grpo_step_shows_the_quality_of_its_completions() -> None:
    line = "step 3/9  reward 0.530  equal rewards 25%  truncated 100%  length 48  4.2 s"
    assert step_line("grpo", 3, 9, GRPO) == line


def test_the_kl_to_the_reference_is_shown_where_the_loss_has_it() -> None:
    assert "length 48  kl 0.013  4.2 s" in step_line(
        "grpo", 3, 9, GRPO | {"policy/reference_kl_k3": 0.0131}
    )


def test_several_rewards_are_shown_one_by_one_without_penalties() -> None:
    rewards = {
        "reward/format_mean": 0.03,
        "reward/format_std": 0.1,
        "reward/overlong_penalty_mean": -0.2,
    }
    line = step_line("grpo", 3, None, GRPO | rewards)
    assert line.startswith("step 3  reward 0.530 (answer 0.500, format 0.030)  equal rewards")


def test_pairs_show_accuracy_and_margin() -> None:
    metrics = {"policy/loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 1.234}
    line = "step 1/2  loss 0.5000  accuracy 75%  margin 1.23"
    assert step_line("dpo", 1, 2, metrics) == line
    of_model = {"policy/loss": 0.5, "rm/accuracy": 0.75, "rm/margin": 1.234}
    assert step_line("rm", 1, 2, of_model) == line


def test_another_algorithm_shows_its_loss() -> None:
    assert step_line("mine", 1, 2, {"policy/loss": 1.5}) == "step 1/2  loss 1.5000"


def test_validation_has_a_line_of_its_own() -> None:
    validation = {"validation/loss": 1.25, "validation/perplexity": 3.49}
    line = "step 2/4  validation: loss 1.25, perplexity 3.49"
    assert step_line("sft", 2, 4, validation) == line
    both = step_line("sft", 2, 4, {"policy/loss": 1.5, **validation})
    assert both.splitlines() == ["step 2/4  loss 1.5000", line]
