"""`nemo-like generate`, `eval` and `chat` on the demo's model: records, resume, errors, replies."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.cli import build_parser, main
from nemo_like.commands.answers import answer_config
from tests.reward_models import ReferenceScores, save_reward_model

CPU = ("cluster.gpus_per_node=0", "policy.precision=float32", "policy.generation.max_new_tokens=12")


@pytest.fixture
def model(demo: Path) -> str:
    return f"policy.model_name={demo}/model"


@pytest.fixture
def prompts(demo: Path, tmp_path: Path) -> Path:
    """Six prompts of different lengths."""
    path = tmp_path / "prompts.jsonl"
    lines = (demo / "validation.jsonl").read_text().splitlines()[:6]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def data(path: Path) -> str:
    return f"data.validation_path={path}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_completions_are_recorded_and_continued(demo, model, prompts, tmp_path, capsys):
    out = tmp_path / "out" / "answers.jsonl"
    arguments = ("generate", model, data(prompts), *CPU, "--num-samples", 2, "--token-ids")
    code, _, message = run(capsys, *arguments, "--out", out)
    assert code == 0 and "12 completions of 6 prompts" in message
    records = read(out)
    rows = [json.loads(line) for line in prompts.read_bytes().splitlines()]
    assert [record["row"] for record in records] == list(range(6))
    assert [record["prompt"] for record in records] == [row["prompt"] for row in rows]
    assert [record["location"] for record in records][4].endswith("prompts.jsonl:5")
    _check_with_transformers(str(demo / "model"), records)

    # Without --out, one at a time, and with fewer rows: the same completions.
    fewer = ("policy.generation.hf.batch_size=1", "data.max_validation_rows=3")
    code, printed, _ = run(capsys, *arguments, *fewer)
    assert code == 0
    for record, other in zip(records, map(json.loads, printed.splitlines()), strict=False):
        assert other["token_ids"] == record["token_ids"]
        assert other["logprob_sums"] == pytest.approx(record["logprob_sums"], abs=1e-4)

    # Stopped after two prompts, with an incomplete line after them.
    code, _, message = run(capsys, *arguments, "--out", out)
    assert code == 2 and "continue it with --resume" in message
    code, _, message = run(capsys, *arguments, "--out", out, "--resume", "seed=1")
    assert code == 2 and "has other values of seed" in message
    out.write_text("\n".join(out.read_text().split("\n")[:2]) + '\n{"row": 5, "comple')
    assert run(capsys, *arguments, "--out", out, "--resume")[0] == 0
    continued = read(out)
    assert [each["token_ids"] for each in continued] == [each["token_ids"] for each in records]
    assert [each["row"] for each in continued] == list(range(6))
    # A resume with fewer rows keeps the records of the others.
    assert run(capsys, *arguments, "--out", out, "--resume", fewer[1])[0] == 0
    assert read(out) == continued
    changed = prompts.read_text().replace("+", "+1", 1)
    prompts.write_text(changed)
    code, _, message = run(capsys, *arguments, "--out", out, "--resume")
    assert code == 2 and "row 0 of the prompts has changed" in message


def _check_with_transformers(model: str, records: list[dict[str, Any]]) -> None:
    """Texts and log-prob sums are those of transformers; the two samples of a prompt differ."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model)
    for record in records:
        turns = [{"role": "user", "content": record["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for sample, token_ids in enumerate(record["token_ids"]):
            ids = torch.tensor([prompt_ids + token_ids])
            with torch.no_grad():
                logits = reference(ids).logits[0, len(prompt_ids) - 1 : -1].double()
            logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])
            assert record["logprob_sums"][sample] == pytest.approx(logprobs.sum().item(), abs=1e-3)
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
            assert record["completions"][sample] == text
            is_ended = token_ids[-1] == tokenizer.eos_token_id
            assert record["finish_reasons"][sample] == ("stop" if is_ended else "length")
            assert record["num_tokens"][sample] == len(token_ids) <= 12
    assert any(record["token_ids"][0] != record["token_ids"][1] for record in records)


def test_answers_are_scored_by_functions(model, prompts, tmp_path, capsys, monkeypatch):
    first = json.loads(prompts.read_bytes().splitlines()[0])["prompt"]
    stop = tmp_path / "stop"
    rewards = tmp_path / "length_rewards.py"
    rewards.write_text(
        "from pathlib import Path\n"
        "def length(sample):\n"
        f"    if Path({str(stop)!r}).exists():\n"
        "        raise KeyboardInterrupt\n"
        f"    if sample.prompt == {first!r}:\n"
        "        raise KeyError(sample.row['answer'])\n"
        "    return len(sample.completion) / 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "results"
    arguments = (
        *("eval", model, f"data.validation_sets={{sums: {prompts}}}", *CPU),
        "reward.functions.length.path=length_rewards.length",
        *("grpo.val_num_samples=2", "grpo.val_temperature=1", "--out", out),
    )
    code, _, message = run(capsys, *arguments)
    assert code == 2 and "length_rewards.length) raised KeyError" in message
    shutil.rmtree(out)
    drop = "reward.on_error=drop"
    code, _, message = run(capsys, *arguments, drop)
    assert code == 2 and "reward.max_error_share 0.1" in message
    shutil.rmtree(out)
    code, table, _ = run(capsys, *arguments, drop, "reward.max_error_share=0.2")
    assert code == 0 and "sums: 6 prompts, 2 failed rewards" in table
    answers = out / "answers.jsonl"
    records = read(answers)
    assert records[0]["is_scored"] == [False, False] and "KeyError" in records[0]["errors"][1]
    lengths = [len(text) / 10 for record in records[1:] for text in record["completions"]]
    text = (out / "results.json").read_text()
    metrics = json.loads(text)["sets"]["sums"]["metrics"]
    assert metrics["length_mean"]["value"] == pytest.approx(np.mean(lengths))
    num_tokens = [record["num_tokens"] for record in records]
    length = metrics["generation_completion_length_mean"]
    assert length["value"] == pytest.approx(np.mean(num_tokens))
    assert length["low"] < length["value"] < length["high"]

    # The same results after a resume that has to sample two prompts again.
    answers.write_text("\n".join(answers.read_text().split("\n")[1:5]) + "\n")
    code, _, message = run(capsys, *arguments, drop, "reward.max_error_share=0.2")
    assert code == 2 and "has results already" in message
    options = (drop, "reward.max_error_share=0.5", "--resume", "--json")
    stop.touch()
    code, _, message = run(capsys, *arguments, *options)
    assert code == 130 and "4 of 6 prompts finished" in message and "--resume" in message
    assert len(read(answers)) == 4
    stop.unlink()
    code, printed, _ = run(capsys, *arguments, *options)
    assert code == 0
    resumed = json.loads(printed)["sets"]["sums"]["metrics"]
    assert {name: each["value"] for name, each in resumed.items()} == pytest.approx(
        {name: each["value"] for name, each in metrics.items()}
    )


def test_answers_are_scored_by_reward_models(model, prompts, recipe, tmp_path, capsys):
    directory = save_reward_model(tmp_path / "quality")
    out = tmp_path / "results"
    recipe.grpo()
    arguments = (
        *("eval", "--config", recipe.folder / "grpo.yaml", data(prompts), *CPU[2:]),
        f"reward.models={{quality: {{model_name: {directory}, weight: 0.5}}}}",
        *("grpo.val_num_samples=2", "grpo.val_temperature=1", "--out", out),
    )
    code, table, _ = run(capsys, *arguments)
    assert code == 0 and "quality_mean" in table
    answers = out / "answers.jsonl"
    records = read(answers)
    reference = ReferenceScores(directory)
    for record in records:
        functions = [values for name, values in record["components"].items() if name != "quality"]
        for sample, completion in enumerate(record["completions"]):
            score = reference.answer(record["prompt"], completion)
            assert record["components"]["quality"][sample] == pytest.approx(score, abs=1e-4)
            total = sum(values[sample] for values in functions) + 0.5 * score
            assert record["rewards"][sample] == pytest.approx(total, abs=1e-4)

    # Stopped before the scores of two prompts, and before the last answer.
    lines = [*records[:2], *map(_without_scores, records[2:4]), records[4]]
    answers.write_text("".join(json.dumps(record) + "\n" for record in lines))
    (out / "results.json").unlink()
    code, _, message = run(capsys, *arguments, "--resume")
    assert code == 0, message
    for record, resumed in zip(records, read(answers), strict=True):
        assert resumed["completions"] == record["completions"]
        assert resumed["rewards"] == pytest.approx(record["rewards"], abs=1e-4)

    options = (f"reward.models.judge.model_name={directory}", "~reward.functions.answer")
    rows = ("--json", "data.max_validation_rows=2")
    code, printed, _ = run(capsys, "eval", model, data(prompts), *CPU, *options, *rows)
    metrics = json.loads(printed)["sets"]["data"]["metrics"]
    assert code == 0 and metrics["reward_mean"] == metrics["judge_mean"]


def test_a_run_directory_stands_for_its_config_and_exported_model(
    model, prompts, recipe, tmp_path, capsys
):
    recipe.grpo()
    shutil.copy(recipe.folder / "grpo.yaml", tmp_path / "config.yaml")
    arguments = ("eval", "--config", tmp_path, data(prompts), *CPU[2:], "--json")
    code, _, message = run(capsys, *arguments)
    assert code == 2 and "nemo-like export" in message and "--out DIR" in message
    named = json.loads(run(capsys, *arguments, model)[1])
    shutil.copytree(recipe.demo / "model", tmp_path / "hf")
    found = json.loads(run(capsys, *arguments)[1])
    assert found["settings"]["model_name"] == str(tmp_path / "hf")
    assert found["sets"] == named["sets"]


def _without_scores(record: dict[str, Any]) -> dict[str, Any]:
    components = dict(record["components"])
    scores = components.pop("quality")
    rewards = [total - 0.5 * score for total, score in zip(record["rewards"], scores, strict=True)]
    return record | {"components": components, "rewards": rewards}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ["{prompts}", "policy.model_name=nowhere"], "policy.model_name is 'nowhere'"),
        ("generate", ["data.validation_path=nowhere.jsonl"], "there is no '{cwd}/nowhere.jsonl'"),
        ("generate", ["{empty}"], "empty.jsonl has no rows"),
        ("generate", ["{long}"], "long.jsonl:2: the prompt has 307 tokens"),
        ("generate", ["{prompts}", "policy.generation.top_p=2"], "policy.generation.top_p is 2"),
        ("generate", [], "set data.validation_path"),
        ("generate", ["{prompts}", "--resume"], "name them with --out"),
        ("generate", ["{prompts}", "data.columns={{x: y}}"], "'x' is not a known meaning"),
        ("generate", ["--prompts", "{prompts}"], "unknown argument '--prompts'"),
        ("eval", ["{prompts}", "~reward.functions.answer"], "reward"),
        ("eval", ["{prompts}", "reward.models.judge.model_name={cwd}"], "reward.models.judge"),
        ("eval", ["{prompts}", "reward.functions.f.path=math.f"], "reward.functions.f.path"),
        ("eval", ["{prompts}", "grpo.val_num_samples=2"], "greedy"),
        ("chat", ["policy.model_name={cwd}/plain"], "has no chat template"),
    ],
)
def test_wrong_input_is_one_message(
    demo,
    model,
    prompts,
    tmp_path,
    capsys,
    command: str,
    options: list[str],
    message: str,
    monkeypatch,
):
    (tmp_path / "empty.jsonl").write_text("\n")
    _write_long(tmp_path / "long.jsonl")
    if command == "chat":
        shutil.copytree(demo / "model", tmp_path / "plain")
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            _remove_template(tmp_path / "plain" / name)
    monkeypatch.chdir(tmp_path)
    names = ("prompts", "empty", "long")
    places = {name: data(tmp_path / f"{name}.jsonl") for name in names} | {"cwd": str(tmp_path)}
    given = [option.format(**places) for option in options]
    if not any(option.startswith("policy.model_name") for option in given):
        given.append(model)
    code, _, text = run(capsys, command, *given)
    assert code == 2
    assert text.startswith("error: ") and "Traceback" not in text
    assert message.format(**places) in text


def _write_long(path: Path) -> None:
    """The prompt of the second of three rows does not fit into the model."""
    rows = [{"prompt": text} for text in ("1+1", 302 * "1" + "+1", "2+2")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _remove_template(path: Path) -> None:
    if path.suffix == ".jinja":
        path.unlink(missing_ok=True)
        return
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))


def test_rows_that_are_too_long_are_left_out_and_reported(model, tmp_path, capsys):
    _write_long(tmp_path / "long.jsonl")
    drop = "policy.oversize_rows=drop"
    code, printed, message = run(
        capsys, "generate", model, data(tmp_path / "long.jsonl"), *CPU, drop
    )
    assert code == 0 and "1 row left out, too long" in message and "long.jsonl:2" in message
    assert [json.loads(line)["row"] for line in printed.splitlines()] == [0, 2]
    path = tmp_path / "completed.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "completion": 302 * "1"}) + "\n")
    code, _, message = run(capsys, "eval", model, data(path), "--perplexity", *CPU, drop)
    assert code == 2 and f"no row of {path} is short enough" in message


GREEDY = "policy.generation.temperature=0"


def test_replies_of_a_pipe_are_those_of_generate(model, tmp_path, capsys, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "12+7"}\n{"prompt": "3+4"}\n')
    _, printed, _ = run(capsys, "generate", model, data(path), *CPU, GREEDY)
    expected = [json.loads(line)["completions"][0] for line in printed.splitlines()]
    # As Python reads the bytes ff fe in a UTF-8 locale.
    lines = "12+7\n/reset\n\udcff\udcfe\n3+4\n\n/exit\n5+5\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, printed, message = run(capsys, "chat", model, *CPU, GREEDY)
    # A refused message has an empty line: the lines of a pipe keep their places.
    assert code == 1 and printed == f"{expected[0]}\n\n{expected[1]}\n"
    assert "[the message is not UTF-8 text]" in message


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({}, (0.7, 0.95, None, 0.0)),
        ({"eos_token_id": 2, "do_sample": False}, (0.0, 1.0, None, 0.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20}, (0.6, 0.8, 20, 0.0)),
        # What is not declared has the default of transformers.
        ({"temperature": 0.3, "min_p": 0.1}, (0.3, 1.0, 50, 0.1)),
    ],
)
def test_chat_samples_as_the_model_declares(demo, tmp_path, declared, expected):
    copied = tmp_path / "model"
    shutil.copytree(demo / "model", copied)
    (copied / "generation_config.json").write_text(json.dumps(declared))

    def sampling(command: str, *overrides: str) -> tuple[object, ...]:
        arguments = build_parser().parse_args([command, "--model", str(copied), *overrides])
        arguments.command = command
        generation = answer_config(arguments).policy.generation
        return generation.temperature, generation.top_p, generation.top_k, generation.min_p

    assert sampling("chat") == expected
    assert sampling("chat", "policy.generation.temperature=0.9") == (0.9, *expected[1:])
    assert sampling("generate") == (1.0, 1.0, None, 0.0)


def test_a_conversation_ends_at_the_length_of_the_config(model, capsys, monkeypatch):
    lines = "12+7\n" + 40 * "1" + "\n/reset\n12+7\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    short = "policy.max_total_sequence_length=40"
    code, printed, message = run(capsys, "chat", model, *CPU, GREEDY, short)
    assert code == 1 and "policy.max_total_sequence_length is 40; /reset starts" in message
    assert "[the reply was cut; policy.generation.max_new_tokens is " in message
    replies = printed.removesuffix("\n")
    first = replies[: (len(replies) - 2) // 2]
    assert replies == f"{first}\n\n{first}"


def test_a_closed_input_is_refused(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", str(model)]) == 2
    assert "the standard input is closed" in capsys.readouterr().err


def test_ctrl_c_stops_the_reply_and_not_the_program(model):
    """The reply of 200 tokens is streamed; the part that was printed is followed by the next."""
    long = "policy.generation.max_new_tokens=200"
    command = [sys.executable, "-m", "nemo_like", "chat", model, *CPU, long, "seed=3"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"12+7\n")
        assert select.select([process.stdout], [], [], 120)[0]
        shown = os.read(process.stdout.fileno(), 1000)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"3+4\n/exit\n")
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors.decode()
    assert shown and printed.endswith(b"\n") and b"Traceback" not in errors
