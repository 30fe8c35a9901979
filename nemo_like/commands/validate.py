"""`nemo-like validate`: find the errors of a run in seconds, before any worker starts.

`load_config` has checked the keys. This module checks their values on this machine: the model's
files, the rows of data, the tokenizer, the reward functions, the token budgets against the longest
rows, and the plan of the first step. No weights are loaded and Ray is not started.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from functools import partial
from typing import TYPE_CHECKING

from nemo_like.algorithms.registry import ALGORITHMS, load_any_config
from nemo_like.commands.failures import WRONG_INPUT
from nemo_like.commands.validate_rewards import (
    check_environment,
    check_reward_functions,
    check_reward_models,
)
from nemo_like.config.check import derivation
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import counted
from nemo_like.data.datasets import RowSchema
from nemo_like.data.row_columns import check_columns
from nemo_like.data.rows import Rows
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.models.spec import ModelSpec
from nemo_like.run.progress import Progress
from nemo_like.run.tracking import check_logger
from nemo_like.training.diagnostics import Diagnostics, Report
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.model_files import lora_line, open_encoder, open_model_config
from nemo_like.training.run_data import (
    RunData,
    check_sources,
    describe_mixture,
    load_set,
    load_validation,
    mixed_rows,
    training_files,
)
from nemo_like.training.run_warnings import config_warnings, rows_warnings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def run(arguments: argparse.Namespace) -> int:
    """Print the report of a config; return the exit code. Raises ConfigError for a wrong config."""
    config = load_any_config(arguments.config, arguments.overrides, arguments.kind)
    report = validate(config, without_torch=arguments.owns_process)
    report.show(Progress())
    return WRONG_INPUT if report.problems else 0


def validate(config: RunConfig, *, without_torch: bool = False) -> Report:
    """Check everything that `config` names. Problems are in the report; none is raised.

    `without_torch` keeps transformers from importing torch; see
    `import_transformers_without_torch`.
    """
    diagnostics = Diagnostics()
    diagnostics.add_lines("batches", *derivation(config).splitlines())
    # Named here for its position: the report shows the model before the data.
    diagnostics.add_lines("model")
    diagnostics.warnings += config_warnings(config)
    _describe_generator(config, diagnostics)
    algorithm = ALGORITHMS[config.kind].import_data()
    schema = algorithm.ROW_SCHEMA
    train = _load_training(config, schema, diagnostics)
    validation = diagnostics.check(lambda: load_validation(config, schema)) or {}
    if train is not None:
        diagnostics.warnings += rows_warnings(config, train)
    for name, rows in validation.items():
        _describe_rows(config.data.validation_files[name], rows, diagnostics)
    diagnostics.check(lambda: check_sources(config, validation))
    diagnostics.check(lambda: check_logger(config.logger))
    rewarded = algorithm.rewarded_rows(train, next(iter(validation.values()), None))
    check_reward_functions(config, rewarded, diagnostics)
    if without_torch:
        # After the reward functions, which may need models of transformers.
        import_transformers_without_torch()
    model = diagnostics.check(lambda: open_model_config(config))
    if model is not None:
        _describe_model(config, model, diagnostics)
    encoder = None
    # Without a model the tokenizer's name is only known if the config sets it.
    if model is not None or config.policy.tokenizer_name is not None:
        vocab_size = None if model is None else model.get_text_config().vocab_size
        encoder = diagnostics.check(lambda: open_encoder(config, vocab_size))
    if encoder is not None and train is not None:
        data = RunData(encoder, train, validation)
        algorithm.check_rows(config, data, model, diagnostics)
    check_environment(config, rewarded, encoder, diagnostics)
    check_reward_models(config, rewarded, diagnostics)
    return diagnostics.report()


def _load_training(config: RunConfig, schema: RowSchema, diagnostics: Diagnostics) -> Rows | None:
    """Read and describe every training set; return their rows, None if one has a problem."""
    num_problems = len(diagnostics.problems)
    diagnostics.check(partial(check_columns, config.data.columns))
    if len(diagnostics.problems) > num_problems:
        return None
    sets = {}
    for name, path in training_files(config).items():
        load = partial(load_set, config, schema, name, Progress(sys.stderr))
        rows = diagnostics.check(load)
        if rows is not None:
            sets[name] = rows
            _describe_rows(path, rows, diagnostics)
    if len(diagnostics.problems) > num_problems:
        return None
    train = mixed_rows(sets, config.data.train_weights)
    if train.mixture is not None:
        diagnostics.add_lines("data", describe_mixture(train.mixture))
    return train


def _describe_generator(config: RunConfig, diagnostics: Diagnostics) -> None:
    """Report whether the package of the engine is installed. It is not imported."""
    packages = generation_backend(config).packages if config.generates else ()
    if not packages:
        return
    package, *distributions = packages
    if importlib.util.find_spec(package) is None:
        extra = distributions[0 if config.cluster.gpus_per_node else -1]
        diagnostics.warnings.append(
            f"policy.generation.backend is {config.policy.generation.backend}, and {package} is not"
            f" installed in this environment: pip install 'nemo-like[{extra}]' wherever generation"
            " workers run"
        )
        return
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        diagnostics.add_lines("generation", f"{distribution} {version} is installed")
        return
    diagnostics.add_lines("generation", f"{package} is installed, of an unknown version")


def _describe_rows(path: str, rows: Rows, diagnostics: Diagnostics) -> None:
    columns = " + ".join(rows.format)
    diagnostics.add_lines("data", f"{path}: {counted(len(rows), 'row')} of {columns}")


def _describe_model(config: RunConfig, model: PretrainedConfig, diagnostics: Diagnostics) -> None:
    text = model.get_text_config()
    max_positions = getattr(text, "max_position_embeddings", None)
    sizes = f"vocabulary of {text.vocab_size:,}"
    if max_positions:
        sizes += f", positions up to {max_positions:,}"
    diagnostics.add_lines("model", f"{config.policy.model_name}: {model.model_type}, {sizes}")
    if config.policy.lora.enabled:
        spec = ModelSpec.from_config(model, config.policy.model_name)
        diagnostics.add_lines("model", lora_line(config.policy.lora, spec))
    limit = config.policy.max_total_sequence_length
    if max_positions and limit > max_positions:
        diagnostics.warnings.append(
            f"policy.max_total_sequence_length {limit} is above the {max_positions} positions of"
            " the model"
        )
