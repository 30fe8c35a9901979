"""`nemo-like export` writes a checkpoint of any engine and layout as a Hugging Face model;
`nemo-like convert` makes one of a GGUF file. Neither a GPU nor Ray is used.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from nemo_like.algorithms.registry import load_any_config
from nemo_like.config.errors import ConfigError, shown_path, similar_path_text
from nemo_like.config.paths import resolve_policy
from nemo_like.config.schema import PolicyConfig
from nemo_like.console import say
from nemo_like.policy.checkpoint.hf_export import write_hf
from nemo_like.policy.checkpoint.hf_reader import convert_gguf
from nemo_like.policy.checkpoint.sharded_reader import (
    CheckpointReader,
    checkpoint_problem,
    open_checkpoint,
)
from nemo_like.policy.lora import ADAPTER_DIRECTORY, open_merged, write_adapter
from nemo_like.policy.optim import NonFiniteError
from nemo_like.run.checkpoint import Checkpointer, CheckpointError, TrainingState
from nemo_like.run.files import WriteError, remove_link, system_error_number
from nemo_like.training.model_files import check_frozen_models, frozen_models, open_model_config

_CONFIG = "config.yaml"


def run(arguments: argparse.Namespace) -> int:
    """Export a checkpoint and return the exit code. Raises ConfigError."""
    step_folder = export_checkpoint(
        arguments.source,
        arguments.out,
        arguments.overrides,
        arguments.step,
        ema=arguments.ema,
        adapter_only=arguments.adapter,
    )
    say(f"wrote {arguments.out} from {step_folder}")
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Convert a GGUF file and return the exit code. Raises ConfigError."""
    say(f"wrote {convert_gguf(arguments.source, arguments.out)}")
    return 0


def export_checkpoint(
    source: Path,
    target: Path,
    overrides: Sequence[str] = (),
    step: str | None = None,
    *,
    ema: bool = False,
    adapter_only: bool = False,
) -> Path:
    """Write the model of `source` to the new directory `target`; return the step folder.

    `source` is a run directory (its latest checkpoint is exported, or the one of `step`: a number
    or `best`) or a step folder. With `ema` the weights are their averages. `overrides` change keys
    of the run's config, e.g. `policy.model_name` if the model has moved. With `adapter_only` only
    the adapter is written.

    Raises ConfigError if `source` is neither, for an incomplete checkpoint, for a `target` that
    exists or cannot be written, for weights that are not finite, and for `adapter_only` without an
    adapter.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another --out or remove it first")
    is_step = (source / "policy").is_dir()
    # <run>/checkpoints/step_<N>; resolved, because the step folder may be given as `.`.
    run = source.resolve().parent.parent if is_step else source
    if not (run / _CONFIG).is_file():
        raise ConfigError(_no_run_text(source))
    if is_step and step is not None:
        raise ConfigError(f"--step {step}: {shown_path(source)} is a step folder already")
    config = load_any_config(run / _CONFIG, overrides)
    step_folder = source if is_step else _find_step(Checkpointer(run, config.checkpointing), step)
    # The adapter that training started with is not read again, and may be gone.
    lora = replace(config.policy.lora, adapter_path=None)
    config = replace(config, policy=replace(config.policy, lora=lora))
    if adapter_only and not lora.enabled:
        raise ConfigError(
            f"--adapter: {shown_path(source)} was trained without LoRA (policy.lora.enabled is"
            " false), so it has no adapter; leave --adapter out"
        )
    model_config = None
    # An adapter is written without its model, which may be on another machine.
    if not adapter_only:
        config = replace(config, policy=resolve_policy(config.policy, weights=lora.enabled))
        model_config = open_model_config(
            config.policy, config.parallel, config.cluster, config.needs
        )
    if lora.enabled and not adapter_only:
        # The adapters must have been trained on the weights that the config names.
        current = frozen_models(config.policy, config.needs, policy_only=True)
        check_frozen_models(
            _saved_models(step_folder), current, config.policy, config.needs, step_folder
        )
    try:
        with open_checkpoint(step_folder / "policy") as reader:
            if ema:
                reader.use_ema()
            # Written under another name and renamed, so that `target` is never incomplete.
            unfinished = target.with_name(target.name + ".tmp")
            remove_link(unfinished)
            with torch.no_grad():
                if model_config is None:
                    _write_adapter(reader, config.policy, unfinished)
                else:
                    _write(reader, model_config, config.policy, unfinished)
        unfinished.rename(target)
    except NonFiniteError as error:
        # Repeating the export would fail in the same way, so its files have no use.
        shutil.rmtree(target.with_name(target.name + ".tmp"), ignore_errors=True)
        raise ConfigError(
            f"{shown_path(step_folder)}: {error}; export an earlier checkpoint"
        ) from error
    except (ValueError, CheckpointError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    except (OSError, WriteError) as error:
        number = system_error_number(error)
        cause = str(error) if number is None else os.strerror(number)
        raise ConfigError(f"--out {target} cannot be written: {cause}") from error
    return step_folder


def _no_run_text(source: Path) -> str:
    """Return the message about a `source` that is neither a run nor a step folder of one."""
    wanted = f"a run directory (with a {_CONFIG}) or a step folder (<run>/checkpoints/step_<N>)"
    if not source.exists():
        similar = similar_path_text(source.absolute())
        return f"{shown_path(source)} does not exist{similar}; give {wanted}"
    runs = [shown_path(config.parent) for config in sorted(source.glob(f"*/{_CONFIG}"))]
    inside = f", such as {', '.join(runs[:5])}" if runs else ""
    return (
        f"{shown_path(source)} is neither a run directory nor a step folder; give {wanted}{inside}"
    )


def _saved_models(step_folder: Path) -> Mapping[str, str]:
    """Return the identities of the frozen models of a checkpoint. Raises ConfigError."""
    try:
        return TrainingState.load(step_folder).model
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _write(
    reader: CheckpointReader, model_config: PretrainedConfig, policy: PolicyConfig, directory: Path
) -> None:
    """Write the model of an open checkpoint; of one with adapters merged, and the adapters."""
    if policy.adapter is None:
        write_hf(reader, model_config, policy, directory)
        return
    with open_merged(policy, model_config, reader) as merged:
        write_hf(merged, model_config, policy, directory)
    _write_adapter(reader, policy, directory / ADAPTER_DIRECTORY)


def _write_adapter(reader: CheckpointReader, policy: PolicyConfig, directory: Path) -> None:
    """Write the adapters of an open checkpoint in the format of PEFT."""
    write_adapter(directory, dict(reader.full_weights(reader.shapes)), policy)


def _find_step(checkpointer: Checkpointer, step: str | None) -> Path:
    """Return the folder of `step`, or of the latest complete checkpoint. Raises ConfigError."""
    try:
        if step is not None:
            return checkpointer.find(step)
        latest = checkpointer.find_latest(lambda folder: checkpoint_problem(folder / "policy"))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if latest is None:
        raise ConfigError(
            f"{shown_path(checkpointer.path)} has no complete checkpoint to export; give a run that"
            " has saved one"
        )
    return latest.path
