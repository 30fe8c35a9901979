"""Realistic mistakes: each is one message with its cause, its place and what to write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from nemo_like.cli import main
from tests.recipe import Recipe

PAIR = {"prompt": "2+2=?", "chosen": "4", "rejected": "5"}
CHAT = {"messages": [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]}
HUMAN = {"messages": [{"role": "human", "content": "2+2=?"}, {"role": "gpt", "content": "4"}]}


def lines(*rows: Any) -> str:
    """The rows as JSON lines; a text is a line as it is."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake: files in the working directory and a command, and what the message must have."""

    cause: str
    place: str
    fix: str
    kind: str = "sft"
    command: tuple[str, ...] = ("validate",)
    """The command; a config of `kind` follows, unless it has arguments of its own."""
    changes: tuple[str, ...] = ()
    """Overrides."""
    files: Mapping[str, str] = field(default_factory=dict)
    encoding: str = "utf-8"
    """Of the files."""
    yaml: tuple[str, str] = ("", "")
    """A text of the config, and the text in its place."""


MISTAKES = {
    "a value of another type": Mistake(
        changes=("policy.optimizer.lr=fast",),
        cause="policy.optimizer.lr is 'fast'",
        place="the command line",
        fix="a number above 0",
    ),
    "a misspelled name of another tool": Mistake(
        yaml=("  optimizer: {lr: 1.0e-3}", "  lerning_rate: 1.0e-3"),
        cause="unknown key policy.lerning_rate",
        place="sft.yaml:",
        fix="did you mean policy.optimizer.lr?",
    ),
    "a key that other tools have": Mistake(
        changes=("policy.attn_implementation=sdpa",),
        cause="unknown key policy.attn_implementation",
        place="the command line",
        fix="remove it: the kernel of attention is chosen",
    ),
    "a dropout of adapters": Mistake(
        yaml=("  optimizer: {lr: 1.0e-3}", "  lora: {dropout: 0.1}"),
        cause="unknown key policy.lora.dropout",
        place="sft.yaml:",
        fix="adapters have no dropout",
    ),
    "a list of rows in a JSONL file": Mistake(
        files={"rows.jsonl": json.dumps([CHAT, CHAT], indent=1)},
        changes=("data.train_path=rows.jsonl",),
        cause="begins with '['",
        place="rows.jsonl:1",
        fix="rows.json",
    ),
    "a completion that is null": Mistake(
        files={"rows.jsonl": lines({"prompt": "2+2=?", "completion": None}, CHAT)},
        changes=("data.train_path=rows.jsonl",),
        cause="column 'completion' is null",
        place="rows.jsonl:1",
        fix="remove the row",
    ),
    "a CSV file with semicolons": Mistake(
        files={"rows.csv": "prompt;completion\n2+2=?;4\n"},
        changes=("data.train_path=rows.csv",),
        cause="separated by commas, not by ';'",
        place="rows.csv:1",
        fix="write the file with commas",
    ),
    "a text file in UTF-16": Mistake(
        files={"rows.jsonl": lines(CHAT)},
        encoding="utf-16",
        changes=("data.train_path=rows.jsonl",),
        cause="is UTF-16 text",
        place="rows.jsonl",
        fix="iconv -f UTF-16 -t UTF-8 rows.jsonl",
    ),
    "a comma behind the last value": Mistake(
        files={"rows.jsonl": lines('{"prompt": "a, b", "completion": "b",}')},
        changes=("data.train_path=rows.jsonl",),
        cause="not valid JSON at column 38",
        place="rows.jsonl:1",
        fix="remove the comma before the bracket",
    ),
    "an option of another tool": Mistake(
        command=("sft", "--learning_rate", "1e-5"),
        cause="unknown argument '--learning_rate'",
        place="--learning_rate",
        fix="policy.optimizer.lr=VALUE",
    ),
    "a key as an option": Mistake(
        command=("sft", "--policy.optimizer.lr=1e-5"),
        cause="unknown argument '--policy.optimizer.lr=1e-5'",
        place="--policy.optimizer.lr",
        fix="written KEY=VALUE: policy.optimizer.lr=VALUE",
    ),
    "a key of another job": Mistake(
        changes=("grpo.num_prompts_per_step=4",),
        cause="keys of several jobs",
        place="sft.yaml and the command line",
        fix="sft of `sft` and grpo.num_prompts_per_step of `grpo`; remove those",
    ),
    "a misspelled command": Mistake(
        command=("gropo", "--model", "model"),
        cause="'gropo' is not a command",
        place="gropo",
        fix="did you mean grpo?",
    ),
    "a command that is not there": Mistake(
        command=("trian", "--config", "sft.yaml"),
        cause="'trian' is not a command",
        place="trian",
        fix="jobs are sft, grpo, dpo, distill, rm",
    ),
    "a size in place of a model": Mistake(
        changes=("policy.model_name=70b",),
        cause="policy.model_name is '70b'",
        place="policy.model_name",
        fix="a size is for `nemo-like plan` only; give the directory",
    ),
    "a model that is not beside the others": Mistake(
        files={"models/SmolLM2-135M-Instruct/config.json": "{}"},
        changes=("policy.model_name=models/Qwen3-0.6B",),
        cause="not a directory",
        place="policy.model_name",
        fix="models has SmolLM2-135M-Instruct",
    ),
    "a misspelled key": Mistake(
        yaml=("train_global_batch_size", "train_global_batchsize"),
        cause="unknown key policy.train_global_batchsize",
        place="sft.yaml:",
        fix="policy.train_global_batch_size",
    ),
    "a misspelled choice": Mistake(
        changes=("policy.oversize_rows=trunc",),
        cause="'trunc'",
        place="policy.oversize_rows",
        fix="did you mean truncate",
    ),
    "YAML without a space after the colon": Mistake(
        yaml=("cluster: {backend: local}", "cluster:\n  backend:local\n  num_nodes: 1"),
        cause="mapping values are not allowed",
        place="sft.yaml:1",
        fix="a space after the colon",
    ),
    "YAML indented by a tab": Mistake(
        yaml=("  optimizer:", "\toptimizer:"),
        cause="is not valid YAML",
        place="sft.yaml:",
        fix="indent with spaces",
    ),
    "two modes of batches": Mistake(
        changes=("policy.dynamic_batching.enabled=true",),
        cause="exclude each other",
        place="policy.dynamic_batching.enabled",
        fix="set one of them to false",
    ),
    "an environment variable that is not set": Mistake(
        changes=("data.train_path='${oc.env:MISSING_FOLDER}/train.jsonl'",),
        cause="'MISSING_FOLDER' not found",
        place="data.train_path",
        fix="export MISSING_FOLDER=",
    ),
    "a default below a variable that is not set": Mistake(
        changes=("data.train_path='${oc.env:MISSING_FOLDER,data}/train.jsonl'",),
        cause="there is no 'data/train.jsonl'",
        place="data.train_path",
        fix="in the working directory /",
    ),
    "a mistyped data file": Mistake(
        files={"chats.jsonl": lines(CHAT)},
        changes=("data.train_path=chat.jsonl",),
        cause="there is no 'chat.jsonl'",
        place="data.train_path",
        fix="did you mean 'chats.jsonl'?",
    ),
    "a CSV file with columns of other names": Mistake(
        files={"own.csv": "Question,Reply\n2+2=?,4\n"},
        changes=("data.train_path=own.csv",),
        cause="['Question', 'Reply'] match no known format",
        place="own.csv:2",
        fix="data.columns={prompt: Question, completion: Reply}",
    ),
    "columns of one file for another file": Mistake(
        files={"own.csv": "Question,Reply\n2+2=?,4\n", "chat.jsonl": lines(CHAT)},
        changes=(
            "data.train_path=own.csv",
            "data.validation_path=chat.jsonl",
            "data.columns={prompt: Question, completion: Reply}",
        ),
        cause="the row has ['messages']",
        place="chat.jsonl:1",
        fix="data.set_columns.validation={}",
    ),
    "roles of ShareGPT in messages": Mistake(
        files={"own.jsonl": lines(CHAT, HUMAN)},
        changes=("data.train_path=own.jsonl",),
        cause="unknown roles 'human' (write user), 'gpt' (write assistant)",
        place="own.jsonl:2",
        fix="conversations",
    ),
    "a file of two formats": Mistake(
        files={"own.jsonl": lines(CHAT, {"prompt": "2+2=?", "completion": "4"})},
        changes=("data.train_path=own.jsonl",),
        cause="column 'messages' is missing; the rows before have messages",
        place="own.jsonl:2",
        fix="give rows of another format a file of their own",
    ),
    "a key that is there twice": Mistake(
        yaml=("cluster: {backend: local}", "cluster: {backend: local}\ncluster: {num_nodes: 1}"),
        cause="has the key cluster again",
        place="sft.yaml:",
        fix="keep one of both",
    ),
    "a preference file for SFT": Mistake(
        files={"pairs.jsonl": lines(PAIR)},
        changes=("data.train_path=pairs.jsonl",),
        cause="chosen and rejected",
        place="pairs.jsonl:1",
        fix="nemo-like dpo",
    ),
    "a file of conversations for DPO": Mistake(
        kind="dpo",
        files={"chat.jsonl": lines(CHAT)},
        changes=("data.train_path=chat.jsonl",),
        cause="['messages'] match no known format",
        place="chat.jsonl:1",
        fix="nemo-like sft",
    ),
    "many bad rows": Mistake(
        files={
            "own.jsonl": lines(
                CHAT, "{broken", {"messages": []}, {"messages": None}, {"text": "a"}, HUMAN, "[]"
            )
        },
        changes=("data.train_path=own.jsonl",),
        cause="6 bad rows",
        place="own.jsonl:7",
        fix="data.on_bad_row=skip",
    ),
    "rows above the limit": Mistake(
        files={"own.jsonl": lines({"prompt": "1+1", "completion": "2" * 200})},
        changes=("data.train_path=own.jsonl",),
        cause="above policy.max_total_sequence_length 96",
        place="own.jsonl:1",
        fix="raise it to",
    ),
    "an empty cell of a table": Mistake(
        files={"own.csv": "prompt,completion\n2+2=?,NaN\n"},
        changes=("data.train_path=own.csv",),
        cause="column 'completion' is 'NaN'",
        place="own.csv:2",
        fix="remove the row",
    ),
    "a batch that does not divide": Mistake(
        kind="grpo",
        changes=("policy.train_global_batch_size=12",),
        cause="rows per step",
        place="policy.train_global_batch_size",
        fix="set",
    ),
    "a model that is not in the cache": Mistake(
        changes=("policy.model_name=HuggingFaceTB/SmolLM2-135M-Instruct",),
        cause="HF_HUB_OFFLINE",
        place="policy.model_name",
        fix="hf download HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "a model in a directory of a similar name": Mistake(
        files={"models/SmolLM2-135M-Instruct/config.json": "{}"},
        changes=("policy.model_name=models/SmolLM2-135M",),
        cause="not a directory",
        place="policy.model_name",
        fix="did you mean 'models/SmolLM2-135M-Instruct'?",
    ),
    "the directory of a run as a model": Mistake(
        files={"runs/acme/checkpoints/latest": "", "runs/acme/hf/config.json": "{}"},
        command=("chat", "policy.model_name=runs/acme"),
        cause="without config.json",
        place="runs/acme",
        fix="runs/acme/hf",
    ),
    "a run that does not exist": Mistake(
        files={"runs/acme/config.yaml": ""},
        command=("export", "runs/acmee", "--out", "model"),
        cause="runs/acmee",
        place="does not exist",
        fix="did you mean 'runs/acme'?",
    ),
    "a directory that is no run": Mistake(
        files={"runs/acme/config.yaml": ""},
        command=("export", "runs", "--out", "model"),
        cause="neither a run directory nor a step folder",
        place="runs",
        fix="runs/acme",
    ),
    "a reward without its folder on the path": Mistake(
        kind="grpo",
        files={"rewards/own_reward_a.py": "def score(sample):\n    return 1.0\n"},
        changes=("reward.functions.digits.path=own_reward_a.score",),
        cause="No module named 'own_reward_a'",
        place="reward.functions.digits.path",
        fix="rewards/own_reward_a.py exists: write its path as FILE.py:function",
    ),
    "a reward with a wrong name": Mistake(
        kind="grpo",
        files={"own_reward_b.py": "def score(sample):\n    return 1.0\n"},
        changes=("reward.functions.digits.path=own_reward_b.scores",),
        cause="has no 'scores'",
        place="reward.functions.digits.path",
        fix="it has score",
    ),
    "a syntax error in a reward": Mistake(
        kind="grpo",
        files={"own_reward_c.py": "def score(sample):\n    return (1.0\n"},
        changes=("reward.functions.digits.path=own_reward_c.score",),
        cause="SyntaxError: '(' was never closed",
        place="own_reward_c.py:2",
        fix="return (1.0",
    ),
    "an error of a reward": Mistake(
        kind="grpo",
        files={
            "own_reward_d.py": "def ratio(text):\n    return 1 / (len(text) - len(text))\n\n"
            "def score(sample):\n    return ratio(sample.completion)\n"
        },
        changes=("reward.functions.digits.path=own_reward_d.score",),
        cause="ZeroDivisionError: division by zero",
        place="own_reward_d.py:2",
        fix="reward.on_error=zero or drop",
    ),
    "a reward without a return": Mistake(
        kind="grpo",
        files={"own_reward_e.py": "def score(sample):\n    1.0 * len(sample.completion)\n"},
        changes=("reward.functions.digits.path=own_reward_e.score",),
        cause="returned None for the answer of",
        place="reward.functions.digits",
        fix="return a number",
    ),
    "a logger that is not installed": Mistake(
        changes=("logger.wandb_project=own",),
        cause="wandb",
        place="logger.wandb_project",
        fix="pip install",
    ),
    "rows without answers": Mistake(
        files={"chat.jsonl": lines(CHAT)},
        command=("eval", "--config", "grpo.yaml", "data.validation_path=chat.jsonl"),
        kind="grpo",
        yaml=("tests.algorithms.rewards.digit_share", "nemo_like.environments.math.answer_reward"),
        cause="no row of chat.jsonl has an answer",
        place="reward.functions.digits",
        fix="--perplexity",
    ),
    "rollouts of a run without any": Mistake(
        files={"runs/acme/config.yaml": ""},
        command=("show", "runs/acme"),
        cause="there is no runs/acme/rollouts/step_0.jsonl",
        place="runs/acme",
        fix="`nemo-like report runs/acme` shows any run",
    ),
    "a path of a config": Mistake(
        files={"own.yaml": ""},
        command=("validate", "--config", "ow.yaml"),
        cause="config file ow.yaml does not exist",
        place="ow.yaml",
        fix="did you mean own.yaml?",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_with_cause_place_and_fix(
    name: str, recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    mistake = MISTAKES[name]
    getattr(recipe, mistake.kind)()
    folder = recipe.folder
    config = folder / f"{mistake.kind}.yaml"
    config.write_text(config.read_text().replace(*mistake.yaml))
    for path, text in mistake.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, mistake.encoding)
    monkeypatch.chdir(folder)
    # Read when the library is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(str(folder))
    arguments = list(mistake.command)
    if len(arguments) == 1:
        arguments += ["--config", str(config), *mistake.changes]
    code = main(arguments)
    shown = capsys.readouterr()
    output = shown.err + shown.out
    assert code == 2, output
    output = re.sub(r"^\d+ problems? to solve$", "", output, flags=re.MULTILINE)
    messages = re.split(r"^(?:error|problem): ", output, flags=re.MULTILINE)
    has_all = [
        message
        for message in messages[1:]
        if all(part in message for part in (mistake.cause, mistake.place, mistake.fix))
    ]
    assert has_all, output
    assert "Traceback (most" not in output
