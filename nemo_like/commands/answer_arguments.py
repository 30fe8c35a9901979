"""Arguments of `nemo-like generate`, `nemo-like chat` and `nemo-like eval`.

The commands themselves are imported when they run: they need torch and transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nemo_like.commands.argument_parser import CommandParser

COMMANDS = ("generate", "chat", "eval")
_GENERATE = """examples:
  nemo-like generate --model runs/demo_sft/hf --prompts runs/demo/validation.jsonl --max-rows 5
  nemo-like generate --model DIR --prompts questions.txt --num-samples 4 --temperature 0.8
  nemo-like generate --model DIR --prompts prompts.jsonl --out answers.jsonl --resume
"""
_CHAT = """commands in a conversation:
  /reset          forget the conversation
  /system TEXT    start a new conversation with this system prompt
  /save FILE      append the conversation to FILE as a row of `messages`
  /exit           end

examples:
  nemo-like chat --model runs/demo_sft/hf
  echo '12+7=?' | nemo-like chat --model runs/demo_sft/hf --temperature 0
"""
_EVAL = """examples:
  nemo-like eval --model runs/demo_sft/hf --data runs/demo/validation.jsonl --reward answer
  nemo-like eval --model DIR --data gsm8k=gsm8k.jsonl --data hard=hard.jsonl --reward answer \\
      --num-samples 8 --temperature 0.8 --out results
  nemo-like eval --model DIR --data rows.jsonl --reward my_rewards.py:brevity
  nemo-like eval --from-config examples/configs/demo_grpo.yaml --model runs/demo_grpo/hf
  nemo-like eval --model DIR --data conversations.jsonl --perplexity
"""


def add_commands(commands: Any) -> None:
    """Add the three commands to the parser of `nemo-like`."""
    text = "sample completions of the prompts of a file"
    generate = _add_command(commands, "generate", text, _GENERATE)
    _add_generate(generate)
    text = "talk to a model in the terminal"
    chat = _add_command(commands, "chat", text, _CHAT)
    _add_model(chat, temperature=0.7)
    text = (
        "score a model on files of prompts: mean reward, avg@k and pass@k with confidence intervals"
    )
    _add_eval(_add_command(commands, "eval", text, _EVAL))


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code. Raises ConfigError for wrong input."""
    from nemo_like.commands.answer_config import naming_options

    with naming_options(arguments):
        if arguments.command == "generate":
            from nemo_like.commands import generate

            return generate.run(arguments)
        if arguments.command == "chat":
            from nemo_like.commands import chat

            return chat.run(arguments)
        from nemo_like.commands import evaluate

        return evaluate.run(arguments)


def _add_command(commands: Any, name: str, text: str, epilog: str) -> CommandParser:
    return commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_generate(command: CommandParser) -> None:
    _add_model(command, temperature=1.0)
    _add_rows(command)
    command.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="rows in any format of the training data (docs/data.md), or a .txt file with one"
        " prompt per line",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a JSON-lines file, one object per prompt, written while the command runs; default:"
        " the standard output, at the end",
    )
    command.add_argument(
        "--token-ids", action="store_true", help="also write the token ids of the completions"
    )


def _add_eval(command: CommandParser) -> None:
    _add_model(command, temperature=None, is_required=False)
    _add_rows(command)
    command.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="rows in any format of the training data; several with names",
    )
    command.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME|MODULE.FUNCTION|FILE.py:FUNCTION",
        help="reward function; several are added up",
    )
    command.add_argument(
        "--reward-model",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="reward model, as `nemo-like rm` exports it, whose score is added to the reward; it"
        " scores in this process when all answers are sampled",
    )
    command.add_argument(
        "--from-config",
        type=Path,
        metavar="FILE",
        help="take model, validation files, rewards, sampling and prompts of a training config;"
        " other options replace its values",
    )
    command.add_argument(
        "--perplexity",
        action="store_true",
        help="compute loss, perplexity and token accuracy of SFT rows instead of sampling answers",
    )
    command.add_argument(
        "--pass-reward",
        type=float,
        metavar="R",
        help="an answer with at least this reward is correct; default 1",
    )
    command.add_argument(
        "--source-column",
        metavar="COLUMN",
        help="also report the results of each value of this column",
    )
    command.add_argument(
        "--reward-timeout",
        type=float,
        metavar="SECONDS",
        help="max time of one call of a reward function, as `reward.timeout_s`",
    )
    command.add_argument(
        "--on-reward-error",
        choices=("stop", "zero", "drop"),
        help="what happens when a reward function fails, as `reward.on_error`; default stop",
    )
    command.add_argument(
        "--max-error-share",
        type=float,
        metavar="SHARE",
        help="max share of failed answers, as `reward.max_error_share`; default 0.1",
    )
    command.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="level of the intervals; default 0.95",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory for results.json and answers.jsonl, which is written while the command"
        " runs",
    )
    command.add_argument(
        "--json", action="store_true", help="print the results as JSON instead of a table"
    )


def _add_model(
    command: CommandParser, *, temperature: float | None, is_required: bool = True
) -> None:
    """Add the options of the model and of sampling."""
    group = command.add_argument_group("model")
    group.add_argument(
        "--model",
        required=is_required,
        metavar="DIR",
        help="directory of a Hugging Face model, or a hub name",
    )
    group.add_argument("--tokenizer", metavar="DIR", help="default: the model's")
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file that replaces the tokenizer's chat template",
    )
    group.add_argument(
        "--system-prompt", metavar="TEXT", help="system message of conversations that have none"
    )
    group.add_argument(
        "--prompt-template",
        metavar="TEXT",
        help='format string of user messages, e.g. "Solve: {prompt}"',
    )
    group.add_argument(
        "--backend",
        choices=("hf", "vllm"),
        help="inference engine; default hf, which is for small models",
    )
    group.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        help="default: bfloat16 on a GPU, float32 on CPU",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default auto: a GPU if there is one",
    )
    group.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="max tokens of prompt and completion together; default: the limit of the model",
    )
    _add_sampling(command, temperature)


def _add_sampling(command: CommandParser, temperature: float | None) -> None:
    group = command.add_argument_group("sampling")
    shown = (
        "0, with --from-config the temperature of its validation"
        if temperature is None
        else temperature
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="T",
        help=f"0 takes the most likely token; default {shown}",
    )
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling; default 1 (off)")
    group.add_argument("--top-k", type=int, metavar="K", help="the K most likely tokens only")
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="tokens with at least this share of the largest probability only",
    )
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="max tokens of a completion; default 256, at most half of --max-length",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="text that ends a completion; may be repeated",
    )
    group.add_argument("--seed", type=int, metavar="N", help="default 42")


def _add_rows(command: CommandParser) -> None:
    """Add the options of files of prompts and of parallel work."""
    group = command.add_argument_group("rows")
    group.add_argument(
        "--num-samples", type=int, metavar="K", help="completions per prompt; default 1"
    )
    group.add_argument(
        "--max-rows", type=int, metavar="N", help="use the first N rows of each file"
    )
    group.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="MEANING=COLUMN",
        help="column of the file, e.g. prompt=problem, as `data.columns`; may be repeated",
    )
    group.add_argument(
        "--oversize-rows",
        choices=("error", "truncate", "drop"),
        help="prompts that leave no room for a completion: error (default), truncate removes their"
        " beginning, drop leaves them out and reports them",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="completions that the hf backend decodes at a time; default 64",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="copies of the model, each on a separate GPU or CPU worker, on Ray; default 1",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of one copy of the model, with --backend vllm and --replicas 1; default 1",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="keep the finished rows of --out and continue with the others",
    )
