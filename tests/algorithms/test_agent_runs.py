"""Complete runs whose rollouts are programs with the `openai` client: resumed in this process, and
asynchronously on Ray with programs that fail.
"""

from __future__ import annotations

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.environments.reward import RewardError
from tests.algorithms.test_runs import interrupt_at, read_metrics, read_rollout
from tests.recipe import Recipe

PROGRAM = (
    "environment.kind=program",
    "environment.path=tests.algorithms.agent_programs.converses",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=2",
    "policy.train_global_batch_size=4",
    "policy.max_total_sequence_length=128",
    "checkpointing.save_period=1",
    "checkpointing.keep_latest=5",
)


def test_a_resumed_run_of_programs_continues_a_straight_one(recipe: Recipe) -> None:
    options = (*PROGRAM, "data.max_validation_rows=2")
    # The last bits of log-probs depend on what is decoded together, and so on time.
    options = (*options, "policy.generation.hf.batch_size=1")
    run = run_grpo(recipe.grpo(*options)).directory.path
    expected = read_metrics(run)
    assert "validation/environment_mean" in expected[0]
    for line in expected[1:]:
        assert line["episodes/started"] == line["episodes/trained"] == 8
        assert line["policy/grad_norm"] > 0
        # The ids of the rows are those that the generator has seen.
        assert line["mismatch/logprob_diff_max"] < 1e-4
        # The reward of the program and that of a function.
        parts = line["reward/environment_mean"] + line["reward/digits_mean"]
        assert line["reward/mean"] == pytest.approx(parts)
    records = read_rollout(run, 2)
    assert [each["episode"] for each in records] == list(range(8))
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert record["completion"] == record["messages"][-1]["content"]
        assert (record["status"], record["attempts"], record["num_turns"]) == ("done", 1, 2)
    interrupt_at(run, 1)
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert read_rollout(run, 2) == records
    found = read_metrics(run)[2]
    clocks = ("timing/", "performance/", "policy/rank_time", "policy/peak_memory", "weight_sync/")
    clocks = (*clocks, "unix_time_s", "episodes/seconds")
    same = {name: value for name, value in found.items() if not name.startswith(clocks)}
    assert same == {name: expected[2].get(name) for name in same}
    assert same["policy/grad_norm"] > 0


@pytest.mark.exhaustive
def test_a_run_that_is_stopped_in_its_rollouts_trains_every_episode_once(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_LIKE_TEST_MARKERS", str(recipe.folder))
    options = (*PROGRAM, "grpo.val_period=0", "grpo.val_at_start=false")
    options = (*options, "environment.path=tests.algorithms.agent_programs.stops_the_run")
    options = (*options, "environment.on_error=stop", "environment.retries=0")
    options = (*options, "data.validation_path=null", "policy.parity_check=false")
    (recipe.folder / "limit").write_text("1000")
    straight = run_grpo(recipe.grpo(*options, "run_name=straight")).directory.path
    run = recipe.folder / "grpo"
    # In the first step twice, then in the second.
    for limit in (1, 6, 10, 3):
        (recipe.folder / "limit").write_text(str(limit))
        (recipe.folder / "ends").unlink()
        with pytest.raises(RewardError, match="it stops the run"):
            run_grpo(recipe.grpo(*options, "resume=true"))
    (recipe.folder / "limit").write_text("1000")
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    for step in (1, 2):
        records, expected = read_rollout(run, step), read_rollout(straight, step)
        assert [each["episode"] for each in records] == list(range(8))
        assert [each["messages"] for each in records] == [each["messages"] for each in expected]
        assert [each["source"] for each in records] == [each["source"] for each in expected]


def test_a_program_that_cannot_be_started_is_a_problem(recipe: Recipe) -> None:
    assert "can be started" in str(validate(recipe.grpo(*PROGRAM)))
    missing = validate(recipe.grpo(*PROGRAM, "environment.path=tests.no_module.solve"))
    (problem,) = missing.problems
    assert "environment.path is 'tests.no_module.solve'" in problem
    assert "No module named 'tests.no_module'" in problem
    options = (*PROGRAM, "environment.path=null", "environment.command=[no_such_program]")
    (problem,) = validate(recipe.grpo(*options)).problems
    assert "environment.command: 'no_such_program' is not a program on PATH" in problem


@pytest.mark.exhaustive
def test_an_asynchronous_run_on_ray_replaces_failed_episodes(
    recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    markers = recipe.folder / "markers"
    markers.mkdir()
    options = [
        *PROGRAM[2:],
        "environment.kind=program",
        "environment.path=tests.algorithms.agent_programs.fails_sometimes",
        "environment.retries=1",
        f"cluster.env={{NEMO_LIKE_TEST_MARKERS: {markers}}}",
        "cluster.backend=ray",
        "cluster.cpus_per_worker=0.5",
        "~reward.functions.digits",
        "grpo.max_num_steps=3",
        "grpo.max_staleness=1",
        "grpo.weight_update=in_flight",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "data.validation_path=null",
    ]
    recipe.grpo(*options)
    code = main(["grpo", "--config", str(recipe.folder / "grpo.yaml"), *options])
    output, errors = capfd.readouterr()
    assert code == 0, output[-3000:] + errors[-3000:]
    lines = read_metrics(recipe.folder / "grpo")
    for line in lines:
        counts = ("trained", "dropped", "cancelled", "replaced")
        assert line["episodes/started"] == sum(line[f"episodes/{name}"] for name in counts)
        assert line["episodes/trained"] == 8
    # Later steps are sampled with older weights.
    assert lines[0]["mismatch/logprob_diff_max"] < 1e-4
    # The first attempts at some rows fail.
    assert len(list(markers.iterdir())) > 0
    assert sum(line["episodes/replaced"] for line in lines) >= len(list(markers.iterdir()))
