"""Starts without a config: the choices as a function, and the commands that use them."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.registry import ALGORITHMS, detect_kind, job_schema, load_config
from nemo_like.cli import main
from nemo_like.commands.choices import Chosen, Machine, Task, choose
from nemo_like.commands.init import example_configs
from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import policy_layout
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.models.spec import ModelSpec, load_spec
from nemo_like.prediction.memory import MemoryModel, usable_bytes
from nemo_like.prediction.placement import policy_placement

LAPTOP = Machine(memory_gib=16, num_cores=8)
NODE = Machine(memory_gib=79, num_gpus=8)


def task(
    kind: str = "sft",
    model: str = "135m",
    lengths: tuple[int, ...] = (40, 90, 200),
    machine: Machine = LAPTOP,
    num_examples: int = 300,
    overrides: tuple[str, ...] = (),
) -> Task:
    """Lengths are of the sampled rows; half of a row has a loss, or one token of a rollout."""
    named = {
        "run_name": ("mine", ""),
        "policy.model_name": (model, "--model"),
        "data.train_path": ("data.jsonl", "--data"),
    }
    if kind == "grpo":
        named["reward.functions.answer.path"] = ("my_rewards.answer", "--reward")
    if kind == "distill":
        named["distill.teacher"] = ("teacher", "--teacher")
    counts = np.array(lengths)
    trained = np.ones_like(counts) if kind == "grpo" else counts // 2
    return Task(
        job=job_schema(kind),
        named=named,
        spec=load_spec(model),
        teachers=(load_spec("135m"),) if kind == "distill" else (),
        counts=TokenCounts(counts, trained),
        num_examples=num_examples,
        machine=machine,
        overrides=overrides,
    )


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(ALGORITHMS)),
    model=st.sampled_from(["135m", "1b", "8b"]),
    # Both rows of a pair.
    lengths=st.lists(st.integers(2, 3000), min_size=1, max_size=10).map(lambda half: half * 2),
    num_gpus=st.integers(0, 9),
    memory_gib=st.sampled_from([8.0, 24.0, 80.0, 500.0]),
    num_examples=st.integers(1, 10**6),
)
def test_every_choice_is_a_config_that_fits_and_has_room_for_the_longest_row(
    kind: str, model: str, lengths: list[int], num_gpus: int, memory_gib: float, num_examples: int
):
    machine = Machine(memory_gib=memory_gib, num_gpus=num_gpus)
    needed = task(kind, model, tuple(lengths), machine, num_examples)
    try:
        chosen = choose(needed)
    except ConfigError as error:
        # Only a model that is too large has no config.
        assert "does not fit" in str(error) and (model != "135m" or memory_gib < 24)
        return
    config = chosen.config
    longest = config.policy.max_total_sequence_length
    is_complete = len(lengths) // config.needs.batch.rows_per_example >= num_examples
    assert longest >= max(lengths)
    assert is_complete == (config.policy.oversize_rows == "error")
    budget = config.policy.sequence_packing.train_mb_tokens
    assert budget >= config.needs.batch.rows_per_example * longest
    placement = policy_placement(
        config.policy,
        policy_layout(config.parallel, config.cluster),
        needs_reference=config.needs.reference,
        device_type="cuda" if num_gpus else "cpu",
        teachers=needed.teachers,
        keeps_teacher_embeddings=config.needs.keeps_teacher_embeddings,
    )
    memory = MemoryModel(needed.spec.with_output_head(config.needs.head), placement)
    assert memory.peak(budget) <= usable_bytes(memory_gib)
    assert config.cluster.gpus_per_node == num_gpus
    assert config.policy.train_global_batch_size >= max(num_gpus, 1)
    assert chosen.num_steps >= 1 and all(each.reason for each in chosen.choices[1:])


def test_the_device_decides_precision_and_backend():
    on_cpu = choose(task()).config
    assert (on_cpu.cluster.backend, on_cpu.policy.precision) == ("local", "float32")
    on_gpu = choose(task(machine=replace(NODE, num_gpus=1))).config
    assert (on_gpu.cluster.backend, on_gpu.policy.precision) == ("local", "bfloat16")
    on_node = choose(task(machine=NODE)).config
    assert (on_node.cluster.backend, on_node.cluster.gpus_per_node) == ("ray", 8)


def sections(chosen: Chosen) -> Any:
    """The configuration, whose sections depend on the job."""
    return chosen.config


def test_the_epochs_are_kept_on_every_cpu_and_the_estimate_names_the_key_that_shortens_the_run():
    # 300 rows, 16 per step: 19 steps per epoch.
    minutes = []
    for num_cores in (1, 2, 64):
        chosen = choose(task(machine=replace(LAPTOP, num_cores=num_cores)))
        assert chosen.num_steps == 57 and sections(chosen).sft.max_num_steps is None
        *_, length, validation = chosen.lines()
        found = re.fullmatch(
            r"57 steps, about (\d+) minutes? on (\d+) CPU cores?;"
            r" sft\.max_num_steps=N shortens the run",
            length,
        )
        assert found is not None and int(found[2]) == num_cores, length
        assert validation == "validation is off without data.validation_path=FILE"
        minutes.append(int(found[1]))
    # 3 passes of 57 * 16 rows of 110 tokens at 2e10 FLOP/s of a core: 2 FLOP per weight and token,
    # and the products of attention and of the output head for half of the tokens.
    assert minutes[0] == pytest.approx(3 * 57 * 16 * 110 * 2 * 134.5e6 / 2e10 / 60, rel=0.15)
    assert minutes[1] == pytest.approx(minutes[0] / 2, abs=1)
    for machine, given_length in ((LAPTOP, "40"), (NODE, "40")):
        overrides = (f"sft.max_num_steps={given_length}",)
        assert choose(task(machine=machine, overrides=overrides)).num_steps == 40
    # Null is no limit, and not a key to choose.
    assert choose(task(overrides=("sft.max_num_steps=null",))).num_steps == 57
    lines = list(choose(task(machine=NODE)).lines())
    assert lines[-2] == "57 steps; sft.max_num_steps=N shortens the run"
    assert choose(task("grpo")).num_steps == 100


def test_a_validation_file_is_used_during_the_run():
    given_file = ("data.validation_path=held_out.jsonl",)
    chosen = choose(task(overrides=given_file))
    assert sections(chosen).sft.val_period == 57 // 5
    assert not any("validation is off" in line for line in chosen.lines())
    assert sections(choose(task(overrides=(*given_file, "sft.val_period=7")))).sft.val_period == 7
    assert sections(choose(task("grpo", overrides=given_file))).grpo.val_period == 20
    # A run of fewer steps than validations validates after each of them.
    short = choose(task(overrides=(*given_file, "sft.max_num_steps=3")))
    assert sections(short).sft.val_period == 1


def test_nearly_all_steps_fit_into_one_microbatch_of_the_chosen_budget():
    rng = np.random.default_rng(0)
    lengths = tuple(rng.integers(20, 100, 300).tolist())
    policy = choose(task(lengths=lengths)).config.policy
    budget = policy.sequence_packing.train_mb_tokens
    rows = policy.train_global_batch_size
    sums = [sum(rng.choice(lengths, rows, replace=False)) for _ in range(2000)]
    assert np.mean(np.array(sums) <= budget) > 0.99
    expected = rows * np.mean(lengths) + 3 * np.sqrt(rows) * np.std(lengths)
    assert budget == 64 * np.ceil(expected / 64) < 1.3 * np.mean(sums) + 64
    # A pair of preferences counts both rows, and completions have a random length up to the limit.
    pairs = choose(task("dpo", lengths=lengths, machine=replace(NODE, num_gpus=1)))
    sizes = np.array(lengths).reshape(-1, 2).sum(axis=1)
    rows = pairs.config.policy.train_global_batch_size
    expected = rows * sizes.mean() + 3 * np.sqrt(rows) * sizes.std()
    assert pairs.config.policy.sequence_packing.train_mb_tokens == 64 * np.ceil(expected / 64)
    large = Machine(memory_gib=500, num_gpus=1)
    sampled = choose(task("grpo", lengths=(60, 60), machine=large))
    # 32 prompts of 59 tokens, 8 completions of 1 to 1,024 tokens each.
    sums = [sum(59 + rng.integers(1, 1025, 256)) for _ in range(2000)]
    budget = sampled.config.policy.sequence_packing.train_mb_tokens
    assert max(np.mean(sums), np.quantile(sums, 0.99)) < budget < 1.2 * np.mean(sums)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("sft", "--model", "m", "--data", "d", "--reward", "does.not.exist"),
            "--reward is an option of grpo, and the job is sft; leave it out, or use grpo",
        ),
        (
            ("grpo", "--model", "m", "--data", "d", "--teacher", "t"),
            "--teacher is an option of distill, and the job is grpo; leave it out, or use distill",
        ),
        (
            ("grpo", "--config", "c.yaml", "--reward", "my.score"),
            "--reward belongs to --model and --data; with --config set reward.functions.NAME.path",
        ),
    ],
)
def test_options_of_other_jobs_are_errors(capsys, arguments: tuple[str, ...], text: str):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {text}\n"


def test_the_help_of_a_job_has_its_own_options(capsys):
    shown = {}
    for kind in ("sft", "grpo", "distill"):
        with pytest.raises(SystemExit):
            main([kind, "--help"])
        shown[kind] = capsys.readouterr().out.partition("examples:")[0]
    assert [name for name, text in shown.items() if "--reward" in text] == ["grpo"]
    assert [name for name, text in shown.items() if "--teacher" in text] == ["distill"]


def test_longer_rows_are_cut_where_the_job_cuts_them():
    def reason(kind: str) -> str:
        choices = choose(task(kind)).choices
        return next(each.reason for each in choices if each.key == "policy.oversize_rows")

    assert reason("sft") == "longer rows lose their end"
    assert reason("grpo") == "longer prompts lose their beginning"


def test_overrides_have_priority_and_later_choices_follow_them():
    overrides = (
        "policy.lora.enabled=true",
        "policy.train_global_batch_size=6",
        "sft.max_num_epochs=2",
    )
    chosen = choose(task(overrides=overrides))
    policy = chosen.config.policy
    assert policy.train_global_batch_size == 6 and chosen.num_steps == 100
    assert policy.optimizer.lr == pytest.approx(10 * choose(task()).config.policy.optimizer.lr)
    dynamic = choose(task(overrides=("policy.dynamic_batching.enabled=true",))).config.policy
    assert not dynamic.sequence_packing.enabled and dynamic.dynamic_batching.train_mb_tokens >= 256
    grpo = choose(task("grpo", overrides=("grpo.num_prompts_per_step=3",))).config
    assert grpo.policy.train_global_batch_size == 12
    limited = (
        "policy.max_total_sequence_length=128",
        "policy.sequence_packing.train_mb_tokens=512",
    )
    short = choose(task("grpo", overrides=limited, lengths=(20, 60))).config.policy
    assert short.generation.max_new_tokens == 128 - 59
    assert short.sequence_packing.train_mb_tokens == 512
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.lr"):
        choose(task(overrides=("policy.optimizer.lr=-1",)))


def test_a_large_model_gets_checkpointing_then_lora_then_an_error():
    def policy(gib: float):
        one_gpu = Machine(memory_gib=gib, num_gpus=1)
        return choose(task(model="1b", lengths=(100, 8000), machine=one_gpu)).config.policy

    full, recomputed, adapted = policy(80), policy(32), policy(16)
    assert full.activation_checkpointing == "none" and not full.lora.enabled
    assert recomputed.activation_checkpointing == "full" and not recomputed.lora.enabled
    assert adapted.lora.enabled
    with pytest.raises(ConfigError, match="does not fit: with rows of 10,048 tokens, LoRA"):
        policy(6)


def rows(path: Path, *values: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def started(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A model, and the working directory with some rows of the demo for each job."""
    monkeypatch.chdir(tmp_path)
    for name in ("sft", "grpo", "dpo"):
        lines = (demo / f"{name}_train.jsonl").read_text().splitlines(keepends=True)
        Path(f"{name}.jsonl").write_text("".join(lines[:40]))
    return str(demo / "model"), tmp_path


JOBS = [("sft", "sft"), ("grpo", "grpo"), ("dpo", "dpo"), ("rm", "dpo"), ("distill", "sft")]


@pytest.mark.parametrize(("kind", "data"), JOBS)
def test_init_writes_a_config_with_reasons_that_validates(started, capsys, kind: str, data: str):
    model, _ = started
    teacher = ["--teacher", model] if kind == "distill" else []
    arguments = ["--model", model, "--data", f"{data}.jsonl", "--kind", kind, *teacher]
    assert main(["init", *arguments, "--out", "new.yaml", "seed=7"]) == 0
    text = Path("new.yaml").read_text()
    assert detect_kind(Path("new.yaml")) == kind
    config = load_config(kind, Path("new.yaml"))
    assert config.seed == 7 and config.run_name == f"{kind}_{data}"
    assert yaml.safe_load(text)["data"]["train_path"] == f"{data}.jsonl"
    leaves = [line for line in text.splitlines() if not line.rstrip().endswith(":")]
    assert all("  # " in line for line in leaves[1:]) and "{" not in text
    assert "next: nemo-like validate --config new.yaml" in capsys.readouterr().out
    assert main(["validate", "--config", "new.yaml"]) == 0
    assert main(["init", *arguments, "--out", "new.yaml"]) == 2
    assert Path("new.yaml").read_text() == text


def test_a_run_names_the_next_commands_which_accept_its_directory(started, capsys, monkeypatch):
    model, folder = started
    arguments = ["--model", model, "--data", "sft.jsonl", "sft.max_num_steps=1"]
    # A start that has failed after its directory was made.
    Path("runs/sft_sft/logs").mkdir(parents=True)
    Path("runs/sft_sft/logs/driver.log").write_text("it failed")
    overrides = ["logger.num_samples_shown=0", "policy.parity_check=false"]
    overrides += ["data.validation_path=sft.jsonl", "data.max_validation_rows=2"]
    assert main(["sft", *arguments, *overrides]) == 0
    shown = capsys.readouterr().out
    assert "policy.optimizer.lr" in shown and "full training" in shown
    lines = shown[shown.index("next: ") :].removeprefix("next: ").splitlines()
    assert [line.strip() for line in lines] == [
        "nemo-like report runs/sft_sft",
        "nemo-like chat --model runs/sft_sft",
        "nemo-like eval --model runs/sft_sft --perplexity",
    ]
    config = load_config("sft", folder / "runs" / "sft_sft" / "config.yaml")
    # A message may be longer than the rows of the run.
    message = "1" * config.policy.max_total_sequence_length
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{message}\n"))
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, line
    assert "perplexity" in capsys.readouterr().out
    assert config.policy.train_global_batch_size == 8
    # The next run has another name, and starts from the model of this one.
    assert main(["validate", "--model", "runs/sft_sft", "--data", "sft.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "runs/sft_sft/hf" in shown and "directory runs/sft_sft_2" in shown
    overrides = ["data.max_validation_rows=1", "policy.generation.max_new_tokens=2"]
    data = "data.validation_path=grpo.jsonl"
    assert main(["generate", "--model", "runs/sft_sft", data, *overrides]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["completions"]


def test_the_job_is_detected_from_the_rows(started, capsys):
    model, folder = started
    prompts = rows(folder / "prompts.jsonl", {"prompt": "1+1"}, {"prompt": "2+2"})
    for data, kind in (("sft.jsonl", "sft"), ("dpo.jsonl", "dpo"), (prompts, "grpo")):
        code = main(["validate", "--model", model, "--data", data])
        captured = capsys.readouterr()
        assert f"job: {kind}, by" in captured.out
        assert code == (2 if kind == "grpo" else 0)
    assert "prompts.jsonl has no answers to compare" in captured.err
    assert main(["plan", "--model", model, "--data", "sft.jsonl", "--json", "-"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown[shown.index("{") :])


def test_a_config_without_a_section_of_a_job_is_read_by_its_rows(started, capsys):
    model, _ = started
    text = "run_name: a\npolicy: {model_name: MODEL}\ndata: {train_path: dpo.jsonl}\n"
    Path("plain.yaml").write_text(text.replace("MODEL", model))
    assert main(["validate", "--config", "plain.yaml"]) == 0
    assert "plain.yaml has no section of a job: read as a config of dpo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give --config FILE, or --model DIR and --data FILE"),
        (("--model", "MODEL"), "belong together"),
        (("--model", "MODEL", "--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--model", "MODEL", "--data", "sft.jsonl", "--config", "a.yaml"), "leave out --model"),
        (("--model", "MODEL", "--data", "sft.jsonl", "resume=true"), "--config runs/NAME/config"),
        (("--model", "MODEL", "--data", "sft.jsonl", "policy.optimzer.lr=1"), "policy.optimizer"),
    ],
)
def test_wrong_arguments_are_one_message(started, capsys, arguments: tuple[str, ...], text: str):
    model, _ = started
    assert main(["sft", *(model if each == "MODEL" else each for each in arguments)]) == 2
    message = capsys.readouterr().err
    assert text in message and "Traceback" not in message
    assert not os.path.exists("runs")


def test_the_demo_finds_its_configs_in_every_directory(started):
    assert {"demo_sft", "demo_grpo"} <= {path.stem for path in example_configs()}


def test_a_preset_is_no_model_to_train(started):
    assert isinstance(load_spec("135m"), ModelSpec)
    assert main(["sft", "--model", "135m", "--data", "sft.jsonl"]) == 2
