"""Runs of the command on a local Ray cluster, two policy workers: killed workers, a resume in
one process, and no room.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nemo_like.cli import main
from nemo_like.config.load import to_yaml
from tests.algorithms.test_runs import read_metrics
from tests.forked import Forked
from tests.recipe import Recipe
from tests.reward_models import save_reward_model


@pytest.fixture
def config(recipe: Recipe) -> Path:
    """GRPO on Ray with two policy workers of half a core each, and packing on."""
    path = recipe.folder / "ray.yaml"
    path.write_text(
        to_yaml(
            recipe.grpo(
                "cluster.backend=ray",
                "cluster.workers_per_node=2",
                "cluster.cpus_per_worker=0.5",
                "grpo.max_num_steps=6",
                "grpo.val_period=0",
                "grpo.val_at_start=false",
                "cluster.restart.max_restarts=0",
            )
        )
    )
    return path


def worker_pids(run: Path, group: str) -> list[int]:
    """Processes of a group's workers, as the run's own log names them."""
    log = (run / "logs" / "driver.log").read_text()
    return [int(pid) for pid in re.findall(rf"of the {group} group: pid (\d+)", log)]


def wait_for(path: Path, has: Callable[[str], bool], timeout_s: float = 240) -> None:
    """Until the text of a file satisfies `has`."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not has(path.read_text()):
        assert time.monotonic() < deadline, f"{path} does not have what the test waits for"
        time.sleep(0.1)


def wait_for_step(run: Path, step: int) -> None:
    wait_for(run / "metrics.jsonl", lambda text: len(text.splitlines()) >= step)


def test_sigterm_of_a_driver_that_joined_a_cluster_lets_it_finish_a_long_step(
    config: Path, recipe: Recipe, joined_ray: None
) -> None:
    """As `ray job stop` sends it to the driver of a job. Ray's own handler aborts after 3 s."""
    run = recipe.folder / "grpo"
    rewards = recipe.folder / "rewards.log"
    options = [
        "reward.functions.digits.path=tests.algorithms.rewards.slow_digit_share",
        f"reward.functions.digits.options={{log: {rewards}, num_quick: 32}}",
        "checkpointing.save_period=100",
    ]
    command = ["grpo", "--config", str(config), *options]
    address = {"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}
    driver = Forked(main, command, folder=recipe.folder, variables=address)
    try:
        # Step 2, as a step has 32 samples. The metrics of step 1 are written before it ends.
        wait_for(rewards, lambda text: len(text) > 32)
    finally:
        driver.process.terminate()
        code = driver.wait()
    assert code == 75, driver.errors
    assert "stopped by SIGTERM after step 2" in driver.errors
    assert (run / "latest").read_text() == "checkpoints/step_2\n"
    # Not `read_metrics`, which leaves out times.
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["timing/step_s"] > 3


LORA = (
    "policy.lora.enabled=true",
    "policy.lora.rank=4",
    "policy.lora.use_rslora=true",
    "policy.optimizer.lr=1e-2",
    "grpo.num_prompts_per_step=4",
    "policy.generation.max_new_tokens=8",
    "data.validation_path=null",
)
LOCAL = ("cluster.backend=local", "cluster.workers_per_node=1")


@pytest.mark.exhaustive
def test_a_killed_worker_ends_a_megatron_run_with_one_message_and_it_resumes_with_fsdp(
    config: Path, recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
):
    """LoRA on two Megatron ranks, with two equal reward models: one on the policy's workers, one on
    a worker of its own. The checkpoint is of any engine and layout.
    """
    reward_model = save_reward_model(recipe.folder / "reward_model")
    run = recipe.folder / "grpo"
    command = ["grpo", "--config", str(config), *LORA]

    def kill_workers() -> list[int]:
        wait_for_step(run, 1)
        # The worker of a reward model: it is started again, and the run goes on.
        os.kill(worker_pids(run, "reward_model-own")[0], signal.SIGKILL)
        wait_for_step(run, 3)
        victims = worker_pids(run, "policy")
        os.kill(victims[1], signal.SIGKILL)
        groups = ("policy", "reward_model-own", "reward_model-shared")
        return [len(worker_pids(run, group)) for group in groups]

    with ThreadPoolExecutor() as threads:
        num_started = threads.submit(kill_workers)
        code = main(
            [
                *command,
                "policy.engine=megatron",
                "parallel.tensor=2",
                "grpo.max_num_steps=9",
                f"++reward.models.shared.model_name={reward_model}",
                f"++reward.models.own.model_name={reward_model}",
                "++reward.models.own.num_workers=1",
            ]
        )
    output, errors = capfd.readouterr()
    assert code == 1, errors
    assert num_started.result() == [2, 2, 2]
    paragraph = next(line for line in errors.splitlines() if line.startswith("error: "))
    for word in ("worker", "policy", "pid", "resume=true"):
        assert word in paragraph, errors
    assert "Traceback" not in errors.split("The last lines of its log")[0]
    assert "LoRA: rank 4, scale 16" in output
    assert "packed" in output, "the packing efficiency of each step is in the log"
    for line in read_metrics(run):
        # Sharded over two workers and on one.
        own = line["reward/own_mean"]
        assert line["reward/shared_mean"] == pytest.approx(own, abs=1e-5) and own != 0

    saved = int((run / "latest").read_text().rpartition("_")[2])
    saved_adapter = recipe.folder / "saved"
    assert main(["export", str(run), "--adapter", "--out", str(saved_adapter)]) == 0
    steps = f"grpo.max_num_steps={saved + 1}"
    resumed = main([*command, *LOCAL, "resume=true", steps])
    assert resumed == 0, capfd.readouterr().err
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, saved + 2))
    for line in lines:
        assert line["packing/utilization"] > 0 and line["policy/grad_norm"] > 0
        # The generator has the merged weights.
        assert line["mismatch/gen_kl_k3"] < 1e-6
    # The KL to the base model grows on: the last step began with the adapters of the one before.
    kl = [line["policy/reference_kl_k3"] for line in lines]
    assert kl[saved] > kl[saved - 1] > 0
    assert json.loads((run / "hf" / "config.json").read_text())["model_type"]
    exported = load_file(saved_adapter / "adapter_model.safetensors")
    continued = load_file(run / "hf" / "adapter" / "adapter_model.safetensors")
    assert continued.keys() == exported.keys()
    assert all(float((continued[name] - exported[name]).abs().max()) < 3e-2 for name in exported)


def test_more_workers_than_the_cluster_has_is_one_message(
    config: Path, joined_ray: None, capfd: pytest.CaptureFixture[str]
):
    too_many = ("cluster.workers_per_node=64", "cluster.placement_timeout_s=1")
    assert main(["grpo", "--config", str(config), *too_many, "run_name=crowded"]) == 2
    errors = capfd.readouterr().err
    assert "cluster.workers_per_node" in errors and "Traceback" not in errors


RESTARTS = (
    "cluster.backend=ray",
    "cluster.cpus_per_worker=0.5",
    "cluster.restart.max_restarts=3",
    "cluster.restart.backoff_s=0.1",
    "sft.val_period=0",
    "sft.val_at_start=false",
    "checkpointing.save_period=2",
    "checkpointing.export_hf=false",
    "logger.tensorboard=false",
)


@pytest.mark.exhaustive
def test_a_run_whose_worker_was_killed_ends_with_the_metrics_of_an_undisturbed_run(
    recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    config = recipe.folder / "config.yaml"
    options = ("cluster.workers_per_node=2", "sft.max_num_steps=12")
    config.write_text(to_yaml(recipe.sft(*RESTARTS, *options)))

    def kill_worker() -> None:
        wait_for_step(recipe.folder / "killed", 3)
        os.kill(worker_pids(recipe.folder / "killed", "policy")[1], signal.SIGKILL)

    with ThreadPoolExecutor() as threads:
        kill = threads.submit(kill_worker)
        code = main(["sft", "--config", str(config), "run_name=killed"])
        kill.result()
    errors = capfd.readouterr().err
    assert code == 0, errors
    assert (
        "No result is lost: the run continues from step_" in errors
        and "restart 1 of at most 3" in errors
    )
    assert main(["sft", "--config", str(config), "run_name=straight"]) == 0
    losses = {}
    for name in ("killed", "straight"):
        losses[name] = [line["policy/loss"] for line in read_metrics(recipe.folder / name)]
    assert losses["killed"] == losses["straight"]
