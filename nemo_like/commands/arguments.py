"""The commands of nemo-like: name, help, arguments and module of each.

A module is imported when its command runs, because many need torch or transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.commands import plan

ALL_KINDS = "all"
"""JOB of `nemo-like config` for the keys of every job."""
SORT_KEYS = ("reward", "length", "difference")
"""Orders of the rows of `nemo-like show`."""


class CommandParser(argparse.ArgumentParser):
    """Accepts positional arguments after an option. Example: `replay RUN --step 3 KEY=VALUE`.

    argparse assigns all positional arguments at the first of them otherwise, so that those after an
    option would be unknown.
    """

    _is_inner = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the arguments and those that are unknown."""
        # `parse_known_intermixed_args` calls this method for each of its passes.
        if self._is_inner:
            return super().parse_known_args(args, namespace)
        self._is_inner = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inner = False


@dataclass(frozen=True)
class Command:
    """One command."""

    name: str
    summary: str
    function: str
    """Module and function in `nemo_like.commands`; it gets the arguments and returns the exit
    code."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    examples: str = ""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command. Raises ConfigError for wrong input."""
        module, _, function = self.function.partition(".")
        return getattr(import_module(f"nemo_like.commands.{module}"), function)(arguments)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        metavar="FILE",
        help="a YAML file; `nemo-like init DIR` writes examples",
    )
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="keys to set (a.b=1), add (+a.b=1) or put back (~a.b)",
    )


def _add_kind(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        choices=tuple(ALGORITHMS),
        help="the job of the config; default: detected from its keys",
    )


def _add_any_config(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    _add_kind(parser)


def _add_topic(topic: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("topic", choices=(topic,), metavar=topic)
        _add_any_config(parser)

    return add


def _add_reference(parser: argparse.ArgumentParser) -> None:
    kinds = (*ALGORITHMS, ALL_KINDS)
    parser.add_argument(
        "kind", choices=kinds, metavar="JOB", help=f"{', '.join(kinds)}: the keys of a job, or all"
    )
    parser.add_argument(
        "key",
        nargs="?",
        default="",
        metavar="KEY",
        help="a key or section, e.g. policy.optimizer; default: every key",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the config of a command that samples answers."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a config, or the directory of a run, whose exported model is used; default: one for"
        " policy.model_name=DIR on a GPU, or on the CPU without one",
    )
    _add_overrides(parser)
    _add_kind(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="completions per prompt; default 1"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a JSON-lines file, one object per prompt, written while the command runs; default:"
        " the standard output, at the end",
    )
    _add_resume(parser)
    parser.add_argument(
        "--token-ids", action="store_true", help="also write the token ids of the completions"
    )


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--perplexity",
        action="store_true",
        help="compute loss, perplexity and token accuracy of SFT rows instead of sampling answers",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="level of the intervals; default 0.95",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of results.json and answers.jsonl, which is written while the command runs",
    )
    _add_resume(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON instead of a table"
    )


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the finished prompts of --out and continue with the others",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN", help="the directory of a GRPO run")
    parser.add_argument(
        "--step", required=True, type=int, metavar="N", help="the step, counted from 1"
    )


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--rows",
        default="0-9",
        metavar="ROWS",
        help="rows to print, counted from 0 after sorting, e.g. 0-3,8; default 0-9",
    )
    parser.add_argument(
        "--sort",
        choices=SORT_KEYS,
        help="largest first; `difference` is the max log-prob difference of a token between"
        " generator and training engine; default: in the order of the batch",
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="decode the recorded token ids: special tokens and every trained span are visible",
    )


def _add_replay(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    _add_overrides(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN",
        help="a run directory (its latest checkpoint) or a step folder",
    )
    parser.add_argument(
        "--step",
        metavar="N",
        help="the step of a run directory to export, or `best` (checkpointing.keep_best)",
    )
    parser.add_argument(
        "--ema", action="store_true", help="export the averaged weights (policy.ema)"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the LoRA adapter alone, in the format of PEFT, and not the merged model",
    )
    _add_overrides(parser)
    _add_target(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FILE.gguf")
    _add_target(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR")


_TRAINING = [
    Command(kind, each.summary, "train.run", _add_config) for kind, each in ALGORITHMS.items()
]

COMMANDS: tuple[Command, ...] = (
    *_TRAINING,
    Command(
        "validate",
        "check a config, its data and its batches without starting Ray; takes seconds",
        "validate.run",
        _add_any_config,
    ),
    Command(
        "check",
        "`check parity` compares engine and parallel layout with plain transformers, on a tiny copy"
        " of the model",
        "check_parity.run",
        _add_topic("parity"),
    ),
    Command(
        "explain",
        "`explain loss` prints the formula of a config's loss, and keys without effect",
        "explain.run",
        _add_topic("loss"),
    ),
    Command(
        "plan",
        "predict padding, rank balance, step time and memory from row lengths alone, in seconds",
        "plan.run",
        plan.add_arguments,
        plan.EPILOG,
    ),
    Command(
        "config",
        "print the keys of a config: types, defaults, bounds and descriptions",
        "config.print_keys",
        _add_reference,
        """examples:
  nemo-like config sft                                   every key of a config for `nemo-like sft`
  nemo-like config grpo policy.optimizer                 the keys of one section
  nemo-like config grpo loss_fn.ratio_clip_max           one key
  nemo-like config all --markdown > docs/configuration.md
""",
    ),
    Command(
        "init",
        "write the example configs into a directory",
        "config.write_examples",
        _add_directory,
    ),
    Command(
        "show",
        "print the rollouts of one step of a GRPO run",
        "rollouts.show",
        _add_show,
        """examples:
  nemo-like show runs/demo_grpo --step 20
  nemo-like show runs/demo_grpo --step 20 --sort reward --rows 0-4
  nemo-like show runs/demo_grpo --step 20 --sort difference --rows 0 --tokens
""",
    ),
    Command(
        "replay",
        "repeat an optimizer step of a GRPO run from its record, also with another loss or packer,"
        " and compare loss and gradient norm",
        "rollouts.replay",
        _add_replay,
        """examples:
  nemo-like replay runs/demo_grpo --step 1
  nemo-like replay runs/demo_grpo --step 1 loss_fn.ratio_clip_max=0.28
  nemo-like replay runs/demo_grpo --step 1 policy.sequence_packing.algorithm=first_fit_decreasing
""",
    ),
    Command(
        "generate",
        "sample completions of the prompts of data.validation_path",
        "generate.run",
        _add_generate,
        """examples:
  nemo-like generate policy.model_name=runs/demo_sft/hf \\
      data.validation_path=runs/demo/validation.jsonl data.max_validation_rows=5
  nemo-like generate --config runs/demo_sft --out answers.jsonl --num-samples 4
  nemo-like generate --config runs/demo_sft --out answers.jsonl --num-samples 4 --resume
""",
    ),
    Command(
        "chat",
        "talk to a model in the terminal",
        "chat.run",
        _add_model,
        """commands in a conversation:
  /reset          forget the conversation
  /system TEXT    start a new conversation with this system prompt
  /save FILE      append the conversation to FILE as a row of `messages`
  /exit           end

examples:
  nemo-like chat policy.model_name=runs/demo_sft/hf
  echo '12+7=?' | nemo-like chat --config runs/demo_sft policy.generation.temperature=0
""",
    ),
    Command(
        "eval",
        "score a model on its validation files: mean reward, avg@k and pass@k with confidence"
        " intervals",
        "evaluate.run",
        _add_eval,
        """examples:
  nemo-like eval --config runs/demo_grpo
  nemo-like eval --config examples/configs/demo_grpo.yaml policy.model_name=DIR \\
      grpo.val_num_samples=8 grpo.val_temperature=0.8 --out results
  nemo-like eval policy.model_name=DIR 'data.validation_sets={gsm8k: a.jsonl, hard: b.jsonl}'
  nemo-like eval policy.model_name=DIR data.validation_path=conversations.jsonl --perplexity
""",
    ),
    Command(
        "export",
        "write a checkpoint of a run, of any engine and layout, as a Hugging Face model",
        "export.run",
        _add_export,
    ),
    Command(
        "convert",
        "turn a GGUF file into a Hugging Face model directory",
        "export.convert",
        _add_convert,
    ),
)

REPLACED_OPTIONS = {
    "--model": "policy.model_name=DIR",
    "--tokenizer": "policy.tokenizer_name=DIR",
    "--chat-template": "policy.chat_template=FILE",
    "--precision": "policy.precision=bfloat16",
    "--max-length": "policy.max_total_sequence_length=N",
    "--oversize-rows": "policy.oversize_rows=drop",
    "--backend": "policy.generation.backend=vllm",
    "--temperature": "policy.generation.temperature=T (eval: grpo.val_temperature=T)",
    "--top-p": "policy.generation.top_p=P",
    "--top-k": "policy.generation.top_k=K",
    "--min-p": "policy.generation.min_p=P",
    "--max-new-tokens": "policy.generation.max_new_tokens=N",
    "--stop": "policy.generation.stop_strings=[TEXT]",
    "--batch-size": "policy.generation.hf.batch_size=N",
    "--tensor-parallel": "policy.generation.vllm.tensor_parallel_size=N with cluster.backend=ray",
    "--replicas": "cluster.backend=ray with cluster.gpus_per_node=N",
    "--device": "cluster.gpus_per_node=0 for the CPU",
    "--seed": "seed=N",
    "--prompts": "data.validation_path=FILE",
    "--data": "data.validation_path=FILE or data.validation_sets={NAME: FILE}",
    "--column": "data.columns={MEANING: COLUMN}",
    "--max-rows": "data.max_validation_rows=N",
    "--source-column": "data.source_column=COLUMN",
    "--system-prompt": "data.system_prompt=TEXT",
    "--prompt-template": "data.prompt_template=TEXT",
    "--reward": "reward.functions={NAME: {path: MODULE.FUNCTION}}",
    "--reward-model": "reward.models={NAME: {model_name: DIR}}",
    "--reward-timeout": "reward.timeout_s=SECONDS",
    "--on-reward-error": "reward.on_error=drop",
    "--max-error-share": "reward.max_error_share=SHARE",
    "--num-samples": "grpo.val_num_samples=N",
    "--pass-reward": "grpo.val_pass_reward=R",
    "--from-config": "--config FILE",
}
"""Options of earlier versions of `generate`, `chat` and `eval`, and what replaces them."""
