"""`nemo-like generate`, `eval` and `chat` on the demo's model: records, resume, errors, replies."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.cli import main
from nemo_like.commands.answer_config import AnswerRunConfig, answer_config
from nemo_like.commands.answer_files import AnswerFile
from nemo_like.commands.chat import Conversation
from nemo_like.config.errors import ConfigError
from nemo_like.distributed.local_group import local_context
from nemo_like.training.model_files import open_encoder
from nemo_like.training.rollout_workers import generation_worker
from tests.reward_models import ReferenceScores, save_reward_model

CPU = ("--device", "cpu", "--max-new-tokens", "12")


@pytest.fixture
def model(demo: Path) -> str:
    return str(demo / "model")


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


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_completions_are_recorded_and_continued(model, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out" / "answers.jsonl"
    arguments = ("generate", "--model", model, "--prompts", prompts, *CPU, "--num-samples", 2)
    code, _, message = run(capsys, *arguments, "--out", out, "--token-ids")
    assert code == 0 and "12 completions of 6 prompts" in message
    records = read(out)
    rows = [json.loads(line) for line in prompts.read_bytes().splitlines()]
    assert [record["row"] for record in records] == list(range(6))
    assert [record["prompt"] for record in records] == [row["prompt"] for row in rows]
    assert [record["location"] for record in records][4].endswith("prompts.jsonl:5")
    _check_with_transformers(model, records)

    # Without --out, one at a time, and with fewer rows: the same completions.
    code, printed, _ = run(capsys, *arguments, "--batch-size", 1, "--max-rows", 3, "--token-ids")
    assert code == 0
    for record, other in zip(records, map(json.loads, printed.splitlines()), strict=False):
        assert other["token_ids"] == record["token_ids"]
        assert other["logprob_sums"] == pytest.approx(record["logprob_sums"], abs=1e-4)

    # Stopped by Ctrl-C after two prompts, with an incomplete line after them.
    stopped = tmp_path / "stopped.jsonl"
    add = AnswerFile.add

    def interrupted(self: AnswerFile, record: dict[str, Any]) -> None:
        add(self, record)
        if len(self.records) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerFile, "add", interrupted)
    code, _, message = run(capsys, *arguments, "--out", stopped, "--token-ids", "--batch-size", 4)
    monkeypatch.undo()
    assert code == 130 and "2 of 6 prompts finished" in message and "--resume" in message
    assert len(read(stopped)) == 2
    with stopped.open("a") as file:
        file.write('{"row": 5, "comple')
    code, _, message = run(capsys, *arguments, "--out", stopped, "--token-ids")
    assert code == 2 and "continue it with --resume" in message
    code, _, message = run(capsys, *arguments, "--out", stopped, "--resume", "--seed", 1)
    assert code == 2 and "has other values of seed" in message
    assert run(capsys, *arguments, "--out", stopped, "--resume", "--token-ids")[0] == 0
    continued = read(stopped)
    assert [each["token_ids"] for each in continued] == [each["token_ids"] for each in records]
    assert [each["row"] for each in continued] == list(range(6))
    changed = prompts.read_text().replace("+", "+1", 1)
    prompts.write_text(changed)
    code, _, message = run(capsys, *arguments, "--out", stopped, "--resume", "--token-ids")
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


def test_answers_are_scored_by_functions_of_files(model, prompts, tmp_path, capsys):
    first = json.loads(prompts.read_bytes().splitlines()[0])["prompt"]
    rewards = tmp_path / "length_rewards.py"
    rewards.write_text(
        "def length(sample):\n"
        f"    if sample.prompt == {first!r}:\n"
        "        raise KeyError(sample.row['answer'])\n"
        "    return len(sample.completion) / 10\n"
    )
    out = tmp_path / "results"
    arguments = (
        *("eval", "--model", model, "--data", f"sums={prompts}", *CPU),
        *("--reward", "answer", "--reward", f"{rewards}:length"),
        *("--num-samples", 2, "--temperature", 1, "--out", out),
    )
    code, _, message = run(capsys, *arguments)
    assert code == 2 and "length_rewards.length) raised KeyError" in message
    shutil.rmtree(out)
    drop = ("--on-reward-error", "drop")
    code, _, message = run(capsys, *arguments, *drop)
    assert code == 2 and "--max-error-share 0.1" in message
    shutil.rmtree(out)
    code, table, _ = run(capsys, *arguments, *drop, "--max-error-share", 0.2)
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
    code, _, message = run(capsys, *arguments, *drop, "--max-error-share", 0.2)
    assert code == 2 and "has results already" in message
    options = (*drop, "--max-error-share", 0.5, "--resume", "--json")
    code, printed, _ = run(capsys, *arguments, *options)
    assert code == 0
    resumed = json.loads(printed)["sets"]["sums"]["metrics"]
    assert {name: each["value"] for name, each in resumed.items()} == pytest.approx(
        {name: each["value"] for name, each in metrics.items()}
    )


def test_answers_are_scored_by_reward_models(model, prompts, recipe, tmp_path, capsys):
    directory = save_reward_model(tmp_path / "quality")
    out = tmp_path / "results"
    config = tmp_path / "grpo.yaml"
    recipe.grpo()
    text = (recipe.folder / "grpo.yaml").read_text().replace("backend: local", "backend: ray")
    keys = f"{{model_name: {directory}, weight: 0.5, num_workers: 2}}"
    config.write_text(text.replace("reward:\n", f"reward:\n  models: {{quality: {keys}}}\n"))
    arguments = (
        *("eval", "--model", model, "--from-config", config, "--data", prompts, *CPU),
        *("--num-samples", 2, "--temperature", 1, "--out", out),
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
    code, _, message = run(capsys, *arguments, "--resume")
    assert code == 0, message
    for record, resumed in zip(records, read(answers), strict=True):
        assert resumed["completions"] == record["completions"]
        assert resumed["rewards"] == pytest.approx(record["rewards"], abs=1e-4)

    options = ("--reward-model", directory, "--json", "--max-rows", 2)
    code, printed, _ = run(capsys, "eval", "--model", model, "--data", prompts, *CPU, *options)
    metrics = json.loads(printed)["sets"]["data"]["metrics"]
    assert code == 0 and metrics["reward_mean"] == metrics["reward_model_mean"]


def _without_scores(record: dict[str, Any]) -> dict[str, Any]:
    components = dict(record["components"])
    scores = components.pop("quality")
    rewards = [total - 0.5 * score for total, score in zip(record["rewards"], scores, strict=True)]
    return record | {"components": components, "rewards": rewards}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ["--prompts", "{prompts}", "--model", "nowhere"], "--model is 'nowhere'"),
        ("generate", ["--prompts", "nowhere.jsonl"], "--prompts: there is no 'nowhere.jsonl'"),
        ("generate", ["--prompts", "{empty}.jsonl"], "empty.jsonl has no rows"),
        ("generate", ["--prompts", "{empty}.txt"], "empty.txt has no rows"),
        (
            "generate",
            ["--prompts", "{long}"],
            "long.txt:2: the prompt has 307 tokens, --max-length",
        ),
        ("generate", ["--prompts", "{prompts}", "--top-p", "2"], "--top-p is 2.0; it must be"),
        ("generate", ["--prompts", "{prompts}", "--max-length", "300"], "has 256 positions"),
        ("generate", ["--prompts", "{prompts}", "--resume"], "name it with --out"),
        ("generate", ["--prompts", "{prompts}", "--num-samples", "0"], "--num-samples is 0"),
        ("generate", ["--prompts", "{prompts}", "--column", "x=y"], "'x' is not a known meaning"),
        ("generate", ["--prompts", "{prompts}", "--tensor-parallel", "2"], "needs --backend vllm"),
        ("eval", ["--data", "{prompts}"], "give --reward, e.g. one of answer, format"),
        ("eval", ["--data", "{prompts}", "--reward", "answers"], "functions are answer, format"),
        (
            "eval",
            ["--data", "{prompts}", "--reward-model", "{prompts}"],
            "reward.models.reward_model.model_name",
        ),
        ("eval", ["--data", "{prompts}", "--reward", "math.py:f"], "there is no file"),
        ("eval", ["--reward", "answer"], "give --data FILE"),
        ("eval", ["--data", "{prompts}", "--reward", "answer", "--num-samples", "2"], "greedy"),
        ("eval", ["--data", "{prompts}", "--data", "{long}"], "two files without a name"),
        (
            "eval",
            ["--data", "{prompts}", "--reward", "answer", "--confidence", "95"],
            "--confidence",
        ),
        ("chat", ["--model", "{plain}"], "has no chat template"),
    ],
)
def test_wrong_input_is_one_message(
    model, prompts, tmp_path, capsys, command: str, options: list[str], message: str
):
    for suffix in ("jsonl", "txt"):
        (tmp_path / f"empty.{suffix}").write_text("\n")
    (tmp_path / "long.txt").write_text("1+1\n" + 302 * "1" + "+1\n")
    plain = tmp_path / "plain"
    if "{plain}" in options:
        shutil.copytree(model, plain)
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            _remove_template(plain / name)
    places = {"prompts": prompts, "empty": tmp_path / "empty", "long": tmp_path / "long.txt"}
    given = [option.format(**places, plain=plain) for option in options]
    if "--model" not in given:
        given += ["--model", model]
    code, _, text = run(capsys, command, *given)
    assert code == 2
    assert text.startswith("error: ") and "Traceback" not in text
    assert message in text


def _remove_template(path: Path) -> None:
    if path.suffix == ".jinja":
        path.unlink(missing_ok=True)
        return
    values = json.loads(path.read_text())
    values.pop("chat_template", None)
    path.write_text(json.dumps(values))


def test_rows_that_are_too_long_are_left_out_and_reported(model, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("1+1\n" + 302 * "1" + "+1\n\n2+2\n")
    arguments = ("generate", "--model", model, "--prompts", tmp_path / "long.txt", *CPU)
    code, printed, message = run(capsys, *arguments, "--oversize-rows", "drop")
    assert code == 0 and "1 row left out, too long" in message and "long.txt:2" in message
    assert [json.loads(line)["row"] for line in printed.splitlines()] == [0, 2]
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "completion": 302 * "1"}) + "\n")
    arguments = ("eval", "--model", model, "--data", path, "--perplexity", "--device", "cpu")
    code, _, message = run(capsys, *arguments, "--oversize-rows", "drop")
    assert code == 2 and f"no row of {path} is short enough" in message


@pytest.fixture
def settings(model) -> AnswerRunConfig:
    from nemo_like.cli import build_parser

    arguments = build_parser().parse_args(
        ["chat", "--model", model, *CPU, "--temperature", "0", "--max-length", "40"]
    )
    return answer_config(arguments, files={})


def test_replies_of_a_pipe_are_those_of_generate(model, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompts.txt").write_text("12+7\n3+4\n")
    arguments = ("--model", model, *CPU, "--temperature", 0)
    _, printed, _ = run(capsys, "generate", *arguments, "--prompts", tmp_path / "prompts.txt")
    expected = [json.loads(line)["completions"][0] for line in printed.splitlines()]
    saved = tmp_path / "saved.jsonl"
    lines = f"12+7\n/reset\n/save {saved}\n/unknown\n3+4\n\n/save {saved}\n/exit\n5+5\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, printed, message = run(capsys, "chat", *arguments)
    # A refused command is a message without a reply: the lines of a pipe keep their places.
    assert code == 1 and printed == f"{expected[0]}\n\n\n{expected[1]}\n"
    assert "[there is no reply to save yet]" in message
    assert "[unknown command; the commands are /reset" in message
    roles = {"user": "3+4", "assistant": expected[1]}
    turns = [{"role": role, "content": text} for role, text in roles.items()]
    assert read(saved) == [{"messages": turns}]


def test_a_closed_input_is_refused(model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--model", str(model)]) == 2
    assert "the standard input is closed" in capsys.readouterr().err


def test_a_message_that_is_not_utf8_is_refused(model, capsys, monkeypatch):
    # As Python reads the bytes ff fe in a UTF-8 locale.
    monkeypatch.setattr("sys.stdin", io.StringIO("\udcff\udcfe\n3+4\n"))
    code, printed, message = run(capsys, "chat", "--model", model, *CPU, "--temperature", 0)
    assert code == 1 and "[the message is not UTF-8 text]" in message
    # The empty line of the refused message, and the reply to the next.
    assert printed.startswith("\n") and len(printed) > 2


def test_a_reply_is_streamed_and_can_be_stopped(settings):
    encoder = open_encoder(settings, None)
    worker_class, kwargs = generation_worker(settings, encoder.end_token_ids)
    worker = worker_class(local_context(), **kwargs)
    worker._end_ids = frozenset()
    conversation = Conversation(worker, encoder, settings)
    pieces: list[str] = []
    remark = conversation.reply("12+7", pieces.append, lambda: False)
    complete = "".join(pieces)
    assert remark == "cut at --max-new-tokens 12" and len(pieces) > 3
    assert [turn["content"] for turn in conversation.messages] == ["12+7", complete]

    conversation.reset()
    parts: list[str] = []
    remark = conversation.reply("12+7", parts.append, lambda: len(parts) >= 3)
    assert remark == "stopped" and complete.startswith("".join(parts)) and len(parts) < len(pieces)
    assert conversation.messages[1]["content"] == "".join(parts)
    assert worker.poll(0.0).num_unfinished == 0

    # The second turn has room for some tokens, the third for none.
    empty = {"role": "user", "content": ""}
    num_tokens = len(conversation._encode([*conversation.messages, empty]))
    remark = conversation.reply("1" * (37 - num_tokens), parts.append, lambda: False)
    assert remark is not None and "the context of 40 tokens is full" in remark
    messages = list(conversation.messages)
    with pytest.raises(ConfigError, match="the context of the model is 40; /reset starts"):
        conversation.reply("1", parts.append, lambda: False)
    assert conversation.messages == messages


def test_ctrl_c_stops_the_reply_and_not_the_program(settings):
    from nemo_like.commands.chat import _stoppable

    before = signal.getsignal(signal.SIGINT)
    with _stoppable() as is_stopped:
        assert not is_stopped()
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
