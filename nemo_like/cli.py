"""The command line `nemo-like COMMAND`: name, help and arguments of each command, and exit codes.

Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 3 a health rule ended the run, 75 the
run was stopped by SIGTERM, SIGHUP or `cluster.time_limit` and can be resumed, 130 interrupted.

The module of a command is imported when it runs, because many need torch or transformers.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like import __version__
from nemo_like.algorithms.registry import ALGORITHMS, job_schema
from nemo_like.commands import arguments as command_arguments
from nemo_like.commands.train import FAILED, WRONG_INPUT, report_failure
from nemo_like.config.foreign import unknown_text
from nemo_like.config.keys import type_at
from nemo_like.console import lasting_console, quiet_libraries, say_error

_EPILOG = """examples:
  nemo-like demo
  nemo-like sft --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl
  nemo-like chat --model runs/sft_chat
  nemo-like init --model models/SmolLM2-135M-Instruct --data chat.jsonl --out sft.yaml
  nemo-like validate --config sft.yaml
  nemo-like sft --config sft.yaml policy.optimizer.lr=1e-5
"""


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


class _Command(NamedTuple):
    """One command."""

    summary: str
    function: str
    """Module in `nemo_like.commands`, or its full name, and function; it gets the arguments and
    returns the exit code, and raises ConfigError for wrong input."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    examples: str = ""


_COMMANDS = {
    **{
        kind: _Command(
            each.summary,
            "train.run",
            partial(command_arguments.add_training, kind=kind),
            command_arguments.training_examples(kind),
        )
        for kind, each in ALGORITHMS.items()
    },
    "demo": _Command(
        "train a tiny model on arithmetic by SFT and GRPO, in minutes on a CPU",
        "nemo_like.demo.__main__.run",
        command_arguments.add_demo,
    ),
    "validate": _Command(
        "check a config, its data and its batches without starting Ray; takes seconds",
        "validate.run",
        command_arguments.add_validate,
        """examples:
  nemo-like validate --config sft.yaml
  nemo-like validate --model models/SmolLM2-135M-Instruct --data chat.jsonl
""",
    ),
    "check": _Command(
        "`check parity` compares engine and parallel layout with plain transformers, on a tiny copy"
        " of the model; with --model TYPE all layouts of a model type",
        "check_model_type.run",
        command_arguments.add_check,
    ),
    "explain": _Command(
        "`explain loss` prints the formula of a config's loss, and keys without effect",
        "explain.run",
        command_arguments.add_topic("loss"),
    ),
    "plan": _Command(
        "predict padding, rank balance, step time and memory from row lengths alone, in seconds",
        "plan.run",
        command_arguments.add_plan,
        """examples:
  nemo-like plan --config demo_grpo.yaml policy.sequence_packing.train_mb_tokens=4096
  nemo-like plan --lengths lengths.txt --memory-gb 80 policy.model_name=7b cluster.gpus_per_node=8
  nemo-like plan --lengths conv.csv --column ContextTokens,GeneratedTokens --html plan.html
  nemo-like plan --model models/SmolLM2-135M-Instruct --data chat.jsonl
  nemo-like plan data.train_path=train.jsonl policy.tokenizer_name=models/SmolLM2-135M-Instruct
  nemo-like plan --metrics runs/demo_grpo/metrics.jsonl
""",
    ),
    "config": _Command(
        "print the keys of a config: types, defaults, bounds and descriptions",
        "config.print_keys",
        command_arguments.add_reference,
        """examples:
  nemo-like config sft                                   every key of a config for `nemo-like sft`
  nemo-like config grpo policy.optimizer                 the keys of one section
  nemo-like config grpo loss_fn.ratio_clip_max           one key
  nemo-like config all --markdown > docs/configuration.md
""",
    ),
    "init": _Command(
        "write a config for a model and a data file, or the example configs into a directory",
        "init.run",
        command_arguments.add_init,
        """examples:
  nemo-like init --model models/SmolLM2-135M-Instruct --data chat.jsonl
  nemo-like init --model models/SmolLM2-135M-Instruct --data problems.jsonl --kind grpo \\
      --out math.yaml grpo.max_num_steps=50
  nemo-like init configs
  nemo-like init --scripts cluster      ray_jobs/ and examples/
""",
    ),
    "migrate": _Command(
        "write a config from one of NeMo RL, verl, TRL, axolotl, LLaMA-Factory, OpenRLHF, prime-rl"
        " or Cosmos-RL, and list what could not be carried over",
        "migrate.run",
        command_arguments.add_migrate,
        """examples:
  nemo-like migrate grpo_math_1B.yaml --out run.yaml
  nemo-like migrate run_qwen3-8b.sh --out run.yaml
  nemo-like migrate rl.toml > run.yaml
""",
    ),
    "show": _Command(
        "print the rollouts of one step of a GRPO run",
        "rollouts.show",
        command_arguments.add_show,
        """examples:
  nemo-like show runs/demo_grpo
  nemo-like show runs/demo_grpo --step 20 --sort reward --rows 0-4
  nemo-like show runs/demo_grpo --step 20 --sort difference --rows 0 --tokens
""",
    ),
    "report": _Command(
        "write a page about a run: curves, packing, time of a step, rollouts, warnings; or compare"
        " several runs",
        "report.run",
        command_arguments.add_report,
        """examples:
  nemo-like report runs/demo_grpo
  nemo-like report runs/demo_grpo --serve
  nemo-like report runs/seed_0 runs/seed_1 --out comparison.html
""",
    ),
    "doctor": _Command(
        "show versions, devices, Ray, disks and limits of this machine, and the last steps, end and"
        " stacks of a run; write an archive for a bug report",
        "doctor.run",
        command_arguments.add_doctor,
        """examples:
  nemo-like doctor
  nemo-like doctor runs/demo_grpo
  nemo-like doctor runs/demo_grpo --archive report.tar.gz
""",
    ),
    "chaos": _Command(
        "run a config undisturbed, then with killed, stopped and delayed processes and a full disk,"
        " and compare what the runs leave",
        "chaos.run",
        command_arguments.add_chaos,
        """examples:
  nemo-like chaos sft.yaml --kills 10
  nemo-like chaos grpo.yaml --kills 20 --kinds kill,stop --targets policy,generation
  nemo-like chaos sft.yaml --kills 5 --targets raylet,head cluster.num_nodes=2
""",
    ),
    "replay": _Command(
        "repeat an optimizer step of a GRPO run from its record, also with another loss or packer,"
        " and compare loss and gradient norm",
        "rollouts.replay",
        command_arguments.add_replay,
        """examples:
  nemo-like replay runs/demo_grpo --step 1
  nemo-like replay runs/demo_grpo --step 1 loss_fn.ratio_clip_max=0.28
  nemo-like replay runs/demo_grpo --step 1 policy.sequence_packing.algorithm=first_fit_decreasing
""",
    ),
    "generate": _Command(
        "sample completions of the prompts of data.validation_path",
        "answers.generate",
        command_arguments.add_generate,
        """examples:
  nemo-like generate --model runs/demo_sft \\
      data.validation_path=runs/demo/validation.jsonl data.max_validation_rows=5
  nemo-like generate --config runs/demo_sft --out answers.jsonl --num-samples 4
  nemo-like generate --config runs/demo_sft --out answers.jsonl --num-samples 4 --resume
""",
    ),
    "chat": _Command(
        "talk to a model in the terminal",
        "chat.run",
        command_arguments.add_model,
        """commands in a conversation:
  /reset          forget the conversation
  /exit           end

examples:
  nemo-like chat --model runs/demo_sft
  echo '12+7=?' | nemo-like chat --model runs/demo_sft policy.generation.temperature=0
""",
    ),
    "eval": _Command(
        "score a model on its validation files: mean reward, avg@k and pass@k with confidence"
        " intervals",
        "evaluate.run",
        command_arguments.add_eval,
        """examples:
  nemo-like eval --config runs/demo_grpo
  nemo-like eval --config examples/configs/demo_grpo.yaml policy.model_name=DIR \\
      grpo.val_num_samples=8 grpo.val_temperature=0.8 --out results
  nemo-like eval policy.model_name=DIR 'data.validation_sets={gsm8k: a.jsonl, hard: b.jsonl}'
  nemo-like eval policy.model_name=DIR data.validation_path=conversations.jsonl --perplexity
""",
    ),
    "export": _Command(
        "write a checkpoint of a run, of any engine and layout, as a Hugging Face model",
        "export.run",
        command_arguments.add_export,
    ),
    "convert": _Command(
        "turn a GGUF file into a Hugging Face model directory",
        "export.convert",
        command_arguments.add_convert,
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="nemo-like",
        description="Post-training of language models on a Ray cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nemo-like {__version__}")
    parsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    for name, command in _COMMANDS.items():
        command_parser = parsers.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(command_parser)
    return parser


@lasting_console(stdout=False)
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Every user error is one message, no traceback.

    Without `argv` the arguments of this process are used, and it ends with the command.
    """
    _log_to_console()
    quiet_libraries()
    command, *_ = [*(sys.argv[1:] if argv is None else argv), "--help"]
    if command not in _COMMANDS and not command.startswith("-"):
        say_error(f"error: {command!r} is not a command{_similar_commands(command)}")
        return WRONG_INPUT
    # argparse does not accept options and trailing positionals in every order; `parse_known_args`
    # returns the rest, and the message for it names the form of an override.
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        say_error(
            f"error: unknown argument {unknown[0]!r}; {_form_of_overrides(unknown[0], arguments)}"
        )
        return WRONG_INPUT
    # A process that ends with the command may be changed for good, e.g. import transformers without
    # torch.
    arguments.owns_process = argv is None
    try:
        Path.cwd()
    except FileNotFoundError:
        say_error("error: the working directory was removed; change to another one with cd")
        return WRONG_INPUT
    module, _, function = _COMMANDS[arguments.command].function.rpartition(".")
    # The demo uses the commands, and is not one of them.
    name = module if "." in module else f"nemo_like.commands.{module}"
    try:
        code = getattr(import_module(name), function)(arguments)
        # Output that is still in the buffer must fail here and not while the interpreter exits.
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (one message for each)
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            return FAILED
        return report_failure(error)


def _similar_commands(name: str) -> str:
    """Return the commands that an unknown name may mean."""
    similar = difflib.get_close_matches(name, _COMMANDS, n=1)
    meant = f" (did you mean {similar[0]}?)" if similar else ""
    return f"{meant}; jobs are {', '.join(ALGORITHMS)}, and nemo-like --help lists all commands"


def _form_of_overrides(option: str, arguments: argparse.Namespace) -> str:
    """Return how the key that an unknown option seems to mean is written."""
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    kind = arguments.command if arguments.command in ALGORITHMS else "sft"
    job = job_schema(getattr(arguments, "kind", None) or kind)
    form = "overrides are written KEY=VALUE"
    if type_at(job.run_config, name) is not None:
        return f"{form}: {name}=VALUE"
    hint = unknown_text(job, name).partition("; did you mean ")[2]
    if hint:
        return f"{form}: did you mean {hint.removesuffix('?')}=VALUE?"
    return f"{form}, see nemo-like {arguments.command} --help"


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout, such as `head`, has ended."""
    # A pipe without a reader is in the error state; other broken pipes belong to workers.
    poller = select.poll()
    poller.register(sys.stdout.fileno(), select.POLLOUT)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def _log_to_console() -> None:
    """Send warnings to the console; a run adds a handler for details, `logs/driver.log`."""
    console = logging.StreamHandler()
    console.setLevel(os.environ.get("NEMO_LIKE_LOG_LEVEL", "WARNING"))
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[console]
    )
    logging.getLogger("nemo_like").setLevel(logging.INFO)
