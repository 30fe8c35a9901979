"""Starts without a config: `--model DIR --data FILE` in place of `--config FILE`.

Model, data and machine are looked at here, and `choices` chooses the settings. Runs, `validate`,
`plan` and `init` all use this module, so that they have the same config.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from nemo_like.algorithms.registry import ALGORITHMS, detect_kind, job_schema, load_config
from nemo_like.commands.arguments import OPTIONS_OF_JOBS
from nemo_like.commands.choices import Chosen, Machine, Task, choose, nested
from nemo_like.config.errors import ConfigError, UnknownJobError, raise_problems, shown_path
from nemo_like.config.keys import JobSchema
from nemo_like.config.load import (
    Composition,
    YamlDumper,
    compose_files,
    load_values,
    with_overrides,
)
from nemo_like.config.schema import RunConfig
from nemo_like.console import say
from nemo_like.data.column_names import column_guesses, shown_columns
from nemo_like.data.formats import question
from nemo_like.data.preferences import job_of_row
from nemo_like.data.rows import first_row
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.models.spec import ModelSpec
from nemo_like.run.directory import is_unused
from nemo_like.run.progress import Progress
from nemo_like.training.model_files import load_checked_config, open_encoder
from nemo_like.training.run_data import RunData, load_training

ANSWER_REWARD = "nemo_like.environments.math.answer_reward"
_NUM_SAMPLED = 1024
"""Examples whose tokens are counted."""
_ENCODING_KEYS = ("data.", "policy.tokenizer_name", "policy.chat_template", "seed")
"""Beginnings of the keys that the tokens of a row depend on."""
_DRAFT = {
    "policy.max_total_sequence_length": 1 << 20,
    "policy.oversize_rows": "truncate",
    "policy.train_global_batch_size": 1,
    "cluster.backend": "local",
}
"""Settings with which each example is a step, and no row is too long."""
_GRPO_DRAFT = {
    "grpo.num_prompts_per_step": 1,
    "grpo.num_generations_per_prompt": 1,
    "grpo.advantage.baseline": "none",
    "grpo.advantage.normalize": "none",
    "policy.generation.max_new_tokens": 1,
}


def open_config(
    arguments: argparse.Namespace, kind: str | None = None, *, prints: bool = True
) -> RunConfig:
    """Return the config of `--config`, or the one chosen for `--model` and `--data`.

    The job is `kind`, or `--kind`, or detected from the keys or from the rows. With `prints` the
    choices are printed. Raises ConfigError.
    """
    kind = kind or arguments.kind
    if arguments.model is None and arguments.data is None:
        if arguments.config is None:
            raise ConfigError("give --config FILE, or --model DIR and --data FILE")
        for option, (_, key) in OPTIONS_OF_JOBS.items():
            if getattr(arguments, option) is not None:
                raise ConfigError(
                    f"--{option} belongs to --model and --data; with --config set {key}"
                )
        if (arguments.config / "config.yaml").is_file():
            # The directory of a run.
            arguments.config /= "config.yaml"
        kind = kind or _detected_kind(arguments)
        return load_config(kind, arguments.config, arguments.overrides)
    if arguments.config is not None:
        raise ConfigError(
            "--config has the model and the data; set policy.model_name=DIR and"
            " data.train_path=FILE to change them, and leave out --model and --data"
        )
    chosen = choose_config(arguments, kind)
    if prints:
        say("\n".join(chosen.lines()))
        say("KEY=VALUE sets another value; nemo-like init with the same arguments writes a file")
    return chosen.config


def choose_config(arguments: argparse.Namespace, kind: str | None) -> Chosen:
    """Return the config for `--model` and `--data`. Raises ConfigError."""
    if arguments.model is None or arguments.data is None:
        raise ConfigError("--model DIR and --data FILE belong together; give both")
    overrides = list(arguments.overrides)
    given = with_overrides(Composition(job_schema(kind or "sft")), overrides).tree
    if kind is None:
        by_option = ("distill" if arguments.teacher else "") or ("grpo" if arguments.reward else "")
        kind = by_option or _kind_of_file(arguments.data, given)
        say(f"job: {kind}, by {arguments.data}; --kind selects another")
    for option, (owner, _) in OPTIONS_OF_JOBS.items():
        if getattr(arguments, option) is not None and kind != owner:
            raise ConfigError(
                f"--{option} is an option of {owner}, and the job is {kind}; leave it out, or use"
                f" {owner}"
            )
    job = job_schema(kind)
    raise_problems(list(with_overrides(Composition(job), overrides).problems()))
    if given.get("resume") and "run_name" not in given:
        raise ConfigError(
            "resume=true continues a run, but --model and --data start a new one; give"
            " --config runs/NAME/config.yaml resume=true"
        )
    named = _named_values(arguments, job, given)
    has_own_functions = bool(arguments.reward) or not {"reward", "environment"}.isdisjoint(given)
    if arguments.owns_process and arguments.command not in ALGORITHMS and not has_own_functions:
        import_transformers_without_torch()
    values = {key: value for key, (value, _) in named.items()}
    spec = _spec("policy.model_name", values["policy.model_name"])
    draft, data = _draft_data(job, values, overrides)
    if kind == "grpo" and not has_own_functions:
        if question(data.train[0]).answer is None:
            guesses = column_guesses(data.train[0], [("answer",)])
            named_column = f", or set data.columns={shown_columns(guesses[0])}" if guesses else ""
            raise ConfigError(
                f"{arguments.data} has no answers to compare completions with; give --reward"
                " package.function, which scores a completion, or add a column answer"
                f"{named_column}; SFT needs a turn of the assistant, or a column completion"
            )
        named["reward.functions.answer.path"] = (ANSWER_REWARD, "the rows have answers")
    progress = Progress(sys.stderr)
    num_sampled = min(_NUM_SAMPLED, len(data.train))
    rows = ALGORITHMS[kind].import_checks().first_lengths(draft, data, num_sampled, progress)
    teacher = values.get("distill.teacher")
    task = Task(
        job=job,
        named=named,
        spec=spec,
        teachers=() if teacher is None else (_spec("distill.teacher", teacher),),
        counts=rows.counts,
        num_examples=len(data.train),
        machine=this_machine(),
        has_vllm=importlib.util.find_spec("vllm") is not None,
        overrides=overrides,
    )
    return choose(task)


def _detected_kind(arguments: argparse.Namespace) -> str:
    """Return the job of a file by its keys, or by its rows. Raises ConfigError."""
    try:
        return detect_kind(arguments.config, arguments.overrides)
    except UnknownJobError:
        tree = compose_files(job_schema("sft"), arguments.config, arguments.overrides).tree
        path = tree.get("data", {}).get("train_path", "")
        kind = _kind_of_file(path, tree)
        say(
            f"{shown_path(arguments.config)} has no section of a job: read as a config of {kind},"
            " by its rows; --kind selects another"
        )
        return kind


def _kind_of_file(path: str, tree: dict[str, Any]) -> str:
    """Return the job that the first row of a file is for.

    It is `sft` for a row that no job can use, whose error then names what is wrong.
    """
    columns = tree.get("data", {}).get("columns", {})
    with suppress(ConfigError):
        return job_of_row(first_row(path), columns)
    return "sft"


def _named_values(
    arguments: argparse.Namespace, job: JobSchema, given: dict[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Return the keys that the options set, each with its value and the option."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(arguments.data).name.partition(".")[0])
    output_dir = Path(given.get("output_dir", "runs"))
    name = f"{job.kind}_{stem.strip('_-') or 'data'}"
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    free = next(each for each in names if is_unused(output_dir / each))
    named = {
        "run_name": (free, f"directory {output_dir / free}"),
        "policy.model_name": (model_of(arguments.model), "--model"),
        "data.train_path": (arguments.data, "--data"),
    }
    if arguments.teacher is not None:
        named["distill.teacher"] = (model_of(arguments.teacher), "--teacher")
    if arguments.reward is not None:
        function = re.split(r"[.:]", arguments.reward)[-1]
        named[f"reward.functions.{function}.path"] = (arguments.reward, "--reward")
    return named


def model_of(name: str) -> str:
    """Return the model that a run exported if `name` is the directory of a run, else `name`.

    Raises ConfigError for a run without an exported model.
    """
    path = Path(name).expanduser()
    if not (path / "config.yaml").is_file() or (path / "config.json").is_file():
        return name
    if not (path / "hf" / "config.json").is_file():
        raise ConfigError(
            f"{shown_path(path)} has no exported model in hf/; write one with `nemo-like export"
            f" {shown_path(path)} --out DIR`, and give that directory"
        )
    return str(path / "hf")


def _spec(key: str, name: str) -> ModelSpec:
    return ModelSpec.from_config(load_checked_config(name, key), name)


def _draft_data(
    job: JobSchema, named: dict[str, Any], overrides: list[str]
) -> tuple[RunConfig, RunData]:
    """Return a config whose steps have one example each, and the rows of the training file."""
    values = named | _DRAFT
    if job.kind == "grpo":
        # Required, and not used.
        values = {"reward.functions.answer.path": ANSWER_REWARD} | values | _GRPO_DRAFT
    kept = [each for each in overrides if each.lstrip("+~").startswith(_ENCODING_KEYS)]
    draft = load_values(job, nested(values), kept)
    schema, _ = ALGORITHMS[job.kind].import_data().row_schemas(draft)
    train = load_training(draft.data, schema, Progress(sys.stderr))
    return draft, RunData(open_encoder(draft.policy, draft.data, None), train)


def this_machine() -> Machine:
    """Return the GPUs that a run may use, or the free memory and the cores of the CPU.

    Reads what the driver and the kernel report; torch is not imported.
    """
    sizes = _gpu_memory_gib()
    if sizes:
        return Machine(memory_gib=min(sizes), num_gpus=len(sizes))
    numbers = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(numbers[0]) * 1024
    with suppress(OSError, ValueError):
        # The limit of a container.
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Pages of files are released when memory is needed.
        cached = re.findall(
            r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
        )
        available = min(available, limit - used + int(cached[0] if cached else 0))
    return Machine(memory_gib=available / 2**30, num_cores=len(os.sched_getaffinity(0)))


def lacks_gpu() -> bool:
    """Return True if torch is built for CPUs, or this machine has no visible GPU."""
    if shutil.which("nvidia-smi"):
        return not _visible_gpus()
    # A container may have GPUs and no tools.
    return _is_built_for_cpus() or not list(Path("/dev").glob("nvidia[0-9]*"))


def _is_built_for_cpus() -> bool:
    return importlib.metadata.version("torch").endswith("+cpu")


def _gpu_memory_gib() -> list[float]:
    """Return the free memory of each visible GPU that has memory of its own."""
    return [float(free) / 1024 for free in _visible_gpus() if free.isdecimal()]


def _visible_gpus() -> list[str]:
    """Return the free MiB of each visible GPU, as text; none for a build of torch for CPUs."""
    if _is_built_for_cpus() or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if visible is None else set(visible.split(","))
    return [free for *names, free in rows if chosen is None or chosen & set(names)]


def commented_yaml(chosen: Chosen) -> str:
    """Return the choices as YAML, with the reason of each as a comment."""
    reasons = {each.key: each.reason for each in chosen.choices}
    values = nested({each.key: each.value for each in chosen.choices})
    kind = chosen.config.kind
    header = (
        f"# A config of `nemo-like {kind}`. `nemo-like config {kind}` prints every key; a key that"
        " is not here has its default.\n"
    )
    return header + "\n".join(_yaml_lines(values, "", reasons)) + "\n"


def _yaml_lines(section: dict[str, Any], prefix: str, reasons: dict[str, str]) -> list[str]:
    lines = []
    for name, value in section.items():
        indent = "  " * prefix.count(".")
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_yaml_lines(value, f"{prefix}{name}.", reasons)]
            continue
        text = yaml.dump(value, Dumper=YamlDumper, width=10_000, default_flow_style=True)
        # A scalar alone is followed by the end of the document.
        text = text.removesuffix("...\n").strip()
        lines.append(f"{indent}{name}: {text}  # {reasons[prefix + name]}")
    return lines
