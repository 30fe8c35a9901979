"""`nemo-like validate`: find the errors of a run in seconds, before any worker starts.

`load_config` has checked the keys. This module checks their values on this machine: the model's
files, the rows of data, the tokenizer, the reward functions, the token budgets against the longest
rows, and the plan of the first step. No weights are loaded and Ray is not started.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isnan
from typing import TYPE_CHECKING

from nemo_like.agents.environment_worker import EnvironmentWorker
from nemo_like.agents.vllm_parser import turn_parser
from nemo_like.algorithms.registry import ALGORITHMS
from nemo_like.commands.start import lacks_gpu, open_config
from nemo_like.commands.train import WRONG_INPUT
from nemo_like.config.check import derivation
from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import ClusterConfig, DataConfig, PolicyConfig, RunConfig
from nemo_like.console import say
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.formats import RowSchema, conversation, question
from nemo_like.data.image_encoding import ImageEncoder
from nemo_like.data.observations import ObservationEncoder
from nemo_like.data.rows import Rows
from nemo_like.environments.environment import Conversation, EnvironmentFailure, StepOutcome
from nemo_like.environments.reward import RewardError, RewardSample
from nemo_like.environments.reward_calls import load_reward_functions
from nemo_like.environments.reward_worker import RewardWorker
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.memory import GIB
from nemo_like.run.progress import Progress
from nemo_like.run.store import open_store
from nemo_like.run.tracking import check_logger
from nemo_like.training.diagnostics import Diagnostics, Report
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.images import open_images
from nemo_like.training.model_files import (
    RewardModelFiles,
    adapter_line,
    open_encoder,
    open_model_config,
    open_reward_model,
    policy_memory,
)
from nemo_like.training.model_warnings import (
    check_new_tokens,
    encoder_warnings,
    history_warnings,
    model_warnings,
)
from nemo_like.training.reporting import config_warnings, device_line, no_gpu_text, rows_warnings
from nemo_like.training.row_checks import RowChecks
from nemo_like.training.run_data import (
    RunData,
    check_all_columns,
    describe_mixture,
    load_set,
    load_validation,
    mixed_rows,
    training_files,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NO_GPU_HERE = (
    "cluster.gpus_per_node is above 0, and this machine has no GPU: the run needs a Ray cluster"
    " with GPUs"
)
MAX_CALL_S = 60.0
"""Time limit of a call of a user's code for which the config sets none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the report of a config; return the exit code. Raises ConfigError for a wrong config."""
    config = open_config(arguments)
    # The parsers of vLLM need torch.
    without_torch = arguments.owns_process and not config.environment.has_parser
    report = validate(config, without_torch=without_torch)
    report.show(Progress())
    if report.problems:
        return WRONG_INPUT
    say(f"next: nemo-like {config.kind} with the same arguments")
    return 0


def validate(config: RunConfig, *, without_torch: bool = False) -> Report:
    """Check everything that `config` names. Problems are in the report; none is raised.

    `without_torch` keeps transformers from importing torch; see
    `import_transformers_without_torch`.
    """
    diagnostics = Diagnostics()
    policy, needs = config.policy, config.needs
    layout = policy_layout(config.parallel, config.cluster)
    diagnostics.add_lines(
        "batches", *derivation(policy, config.cluster, needs, layout).splitlines()
    )
    # Named here for its position: the report shows the model before the data.
    diagnostics.add_lines("model")
    diagnostics.warnings += config_warnings(policy, needs, layout)
    if config.cluster.gpus_per_node and lacks_gpu():
        is_local = config.cluster.backend == "local"
        found = diagnostics.problems if is_local else diagnostics.warnings
        found.append(no_gpu_text(config.cluster) if is_local else _NO_GPU_HERE)
    _describe_generator(policy, config.cluster, needs, diagnostics)
    algorithm = ALGORITHMS[config.kind]
    train_schema, validation_schema = algorithm.import_data().row_schemas(config)
    images = diagnostics.check(
        lambda: open_images(policy, config.data, without_torch=without_torch)
    )
    train = _load_training(config.data, train_schema, images, diagnostics)
    load = partial(load_validation, config.data, validation_schema, images)
    validation = diagnostics.check(load) or {}
    if train is not None:
        diagnostics.warnings += rows_warnings(config.data, needs, train)
    for name, rows in validation.items():
        _describe_rows(config.data.validation_files[name], rows, diagnostics)
    diagnostics.check(lambda: check_logger(config.logger))
    diagnostics.check(lambda: open_store(config.checkpointing.upload_to, config.run_name))
    rewarded = None
    if needs.scored_rows == "train":
        rewarded = train
    elif needs.scored_rows == "validation":
        rewarded = next(iter(validation.values()), None)
    scoring = _ScoringChecks(config, rewarded, diagnostics)
    scoring.check_functions()
    if without_torch:
        # After the reward functions, which may need models of transformers.
        import_transformers_without_torch()
    model = diagnostics.check(
        lambda: open_model_config(policy, config.parallel, config.cluster, needs)
    )
    if model is not None:
        _describe_model(config, model, diagnostics)
        diagnostics.warnings += model_warnings(policy, needs_reference=needs.reference)
    encoder = None
    # Without a model the tokenizer's name is only known if the config sets it.
    if model is not None or config.policy.tokenizer_name is not None:
        vocab_size = None if model is None else model.get_text_config().vocab_size
        encoder = diagnostics.check(lambda: open_encoder(policy, config.data, vocab_size, images))
        if encoder is not None:
            diagnostics.check(partial(check_new_tokens, config.policy, encoder))
            diagnostics.warnings += encoder_warnings(policy, encoder)
            if needs.rollouts is not None:
                environment = needs.rollouts.environment
                diagnostics.warnings += history_warnings(environment, encoder)
                if environment.has_parser:
                    diagnostics.check(partial(turn_parser, encoder.tokenizer, environment))
    if encoder is not None and train is not None:
        data = RunData(encoder, train, validation)
        checks = RowChecks(
            policy=policy,
            data=config.data,
            needs=needs,
            layout=layout,
            seed=config.seed,
            model=None if model is None else ModelSpec.from_config(model),
            diagnostics=diagnostics,
        )
        checks.check_repeated(train)
        algorithm.import_checks().check_rows(config, data, checks)
    if needs.rollouts is not None:
        _check_scoring(config, scoring, encoder, diagnostics)
    return diagnostics.report()


def _check_scoring(
    config: RunConfig,
    scoring: _ScoringChecks,
    encoder: ChatEncoder | None,
    diagnostics: Diagnostics,
) -> None:
    """Call the program or environment of the rollouts, and their reward models, once."""
    if config.environment.is_program:
        diagnostics.check(scoring.check_program)
    elif config.environment.is_used:
        scoring.check_environment(encoder)
    for name in config.reward.models:
        diagnostics.check(partial(scoring.check_model, name))


def _load_training(
    data: DataConfig, schema: RowSchema, images: ImageEncoder | None, diagnostics: Diagnostics
) -> Rows | None:
    """Read and describe every training set; return their rows, None if one has a problem."""
    num_problems = len(diagnostics.problems)
    diagnostics.check(partial(check_all_columns, data))
    if len(diagnostics.problems) > num_problems:
        return None
    sets = {}
    for name, path in training_files(data).items():
        load = partial(load_set, data, schema, name, Progress(sys.stderr), images)
        rows = diagnostics.check(load)
        if rows is not None:
            sets[name] = rows
            _describe_rows(path, rows, diagnostics)
    if len(diagnostics.problems) > num_problems:
        return None
    train = mixed_rows(sets, data.train_weights)
    if train.mixture is not None:
        diagnostics.add_lines("data", describe_mixture(train.mixture))
    return train


def _describe_generator(
    policy: PolicyConfig, cluster: ClusterConfig, needs: RunNeeds, diagnostics: Diagnostics
) -> None:
    """Report whether the package of the engine is installed. It is not imported."""
    packages = generation_backend(policy).packages if needs.rollouts else ()
    if not packages:
        return
    package, *distributions = packages
    if importlib.util.find_spec(package) is None:
        extra = distributions[0 if cluster.gpus_per_node else -1]
        diagnostics.warnings.append(
            f"policy.generation.backend is {policy.generation.backend}, and {package} is not"
            f" installed in this environment: pip install 'nemo-like[{extra}]' wherever generation"
            " workers run"
        )
        return
    for distribution in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            diagnostics.add_lines("generation", f"{distribution} {version} is installed")


def _describe_rows(path: str, rows: Rows, diagnostics: Diagnostics) -> None:
    columns = " + ".join(rows.format)
    diagnostics.add_lines("data", f"{path}: {counted(len(rows), 'row')} of {columns}")
    if rows.bad.num_rows:
        skipped = f"{counted(rows.bad.num_rows, 'bad row')} left out by data.on_bad_row=skip"
        diagnostics.add_lines("data", f"{path}: {skipped}")


def _describe_model(config: RunConfig, model: PretrainedConfig, diagnostics: Diagnostics) -> None:
    text = model.get_text_config()
    max_positions = getattr(text, "max_position_embeddings", None)
    spec = ModelSpec.from_config(model, config.policy.model_name)
    sizes = f"{spec.num_params:,} parameters, vocabulary of {text.vocab_size:,}"
    if max_positions:
        sizes += f", positions up to {max_positions:,}"
    diagnostics.add_lines("model", f"{config.policy.model_name}: {model.model_type}, {sizes}")
    line = adapter_line(config.policy, config.needs, spec)
    if line is not None:
        diagnostics.add_lines("model", line)
    diagnostics.add_lines("model", device_line(config.cluster, config.policy.precision))
    # Files of teachers are checked elsewhere.
    with suppress(ConfigError, OSError, ValueError):
        max_tokens, memory = policy_memory(
            config.policy,
            policy_layout(config.parallel, config.cluster),
            config.needs,
            spec.with_output_head(config.needs.head),
            "cuda" if config.cluster.gpus_per_node else "cpu",
        )
        parts = memory.parts(max_tokens)
        shown = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
        diagnostics.add_lines(
            "model",
            f"memory of a policy worker: a peak of {sum(parts.values()) / GIB:.2f} GiB is predicted"
            f" with {max_tokens:,} tokens per microbatch ({shown})",
        )
    limit = config.policy.max_total_sequence_length
    if max_positions and limit > max_positions:
        diagnostics.warnings.append(
            f"policy.max_total_sequence_length {limit} is above the {max_positions} positions of"
            " the model"
        )


@dataclass(frozen=True)
class _ScoringChecks:
    """Checks of reward functions, reward models and environment on the first row.

    The row's own answer takes the place of a completion.
    """

    config: RunConfig
    rows: Rows | None
    """The rows whose completions a run scores; None if there are none."""
    diagnostics: Diagnostics

    @cached_property
    def sample(self) -> RewardSample | None:
        """The first row with its own answer, which is empty for a row without one."""
        if self.rows is None:
            return None
        sampled = question(self.rows[0])
        last_message = conversation(self.rows[0])[-1]
        completion = ""
        if last_message["role"] == "assistant":
            completion = last_message.get("content") or ""
        return RewardSample(
            prompt=sampled.text, completion=completion, answer=sampled.answer, row=sampled.row
        )

    @cached_property
    def place(self) -> str:
        """File and line of the row."""
        return "" if self.rows is None else self.rows.location(0)

    def check_functions(self) -> None:
        """Import the reward functions and score the row with each of them.

        The functions are called as in a run, so a function that raises is a problem here as well,
        and so is one that hangs, also where a run has no limit.
        """
        reward = self.config.reward
        functions = self.diagnostics.check(lambda: load_reward_functions(reward.functions))
        if not functions or self.sample is None:
            return
        timeout_s = reward.timeout_s or MAX_CALL_S
        limit = None
        if reward.timeout_s is None:
            limit = f"the {timeout_s:g} s that `validate` waits without reward.timeout_s"
        worker = RewardWorker(
            None, functions=reward.functions, timeout_s=timeout_s, timeout_name=limit
        )
        is_scored = bool(reward.models) or self.config.environment.is_used
        for name, config in reward.functions.items():
            try:
                score = float(worker.values(name, [self.sample], [None])[0])
            except RewardError as error:
                self.diagnostics.problems.append(str(error))
                is_scored = True
            else:
                is_scored |= not isnan(score)
                shown = "does not apply to" if isnan(score) else f"{score:g} for"
                text = f"{name} ({config.path}): {shown} the answer of {self.place} itself"
                self.diagnostics.add_lines("rewards", text)
        worker.close()
        if self.sample.completion and not is_scored:
            names = ", ".join(f"reward.functions.{name}" for name in functions)
            self.diagnostics.problems.append(
                f"{names} returned None for the answer of {self.place} itself, and nothing else"
                " scores it: return a number (a function without `return` gives None)"
            )

    def check_model(self, name: str) -> None:
        """Open the files of a reward model, encode the row and describe the model.

        Raises ConfigError if its files or the row cannot be used.
        """
        model = self.config.reward.models[name]
        files = open_reward_model(name, model)
        workers = "the policy's workers"
        if model.num_workers:
            workers = counted(model.num_workers, "worker")
        text = f"{name} ({model.model_name}): {files.spec.model_type} on {workers}"
        if self.sample is not None:
            num_tokens = self._num_tokens(name, files, self.sample)
            text += f"; {num_tokens} tokens for the answer of {self.place} itself"
            limit = files.max_length
            if limit is not None and num_tokens > limit and model.oversize_rows == "error":
                self.diagnostics.warnings.append(
                    f"reward.models.{name} scores conversations of at most {limit} tokens, and that"
                    f" of {self.place} with its own answer has {num_tokens}: raise"
                    f" reward.models.{name}.max_length, or set reward.models.{name}.oversize_rows"
                    " to truncate, which removes the beginning"
                )
        self.diagnostics.add_lines("rewards", text)

    def _num_tokens(self, name: str, files: RewardModelFiles, sample: RewardSample) -> int:
        """Return the tokens of the row for a reward model. Raises ConfigError if it has none."""
        # Imported here: it imports torch, which a config without reward models does not need.
        from nemo_like.rollout.conversations import scored_conversation

        scored = scored_conversation(sample, self.config.data)
        try:
            encoded = files.encoder.encode_sft(scored.messages, scored.tools)
        except ConfigError as error:
            raise ConfigError(
                f"reward.models.{name} cannot score the answer of {self.place}: {error}"
            ) from error
        largest = int(encoded.input_ids.max())
        if largest >= files.spec.vocab_size:
            raise ConfigError(
                f"reward.models.{name}: its tokenizer gives the token id {largest} for"
                f" {self.place}, but the model has a vocabulary of {files.spec.vocab_size}; set"
                f" reward.models.{name}.tokenizer_name to the tokenizer that the model was trained"
                " with"
            )
        return len(encoded.input_ids)

    def check_program(self) -> None:
        """Import the program in its interpreter, or find its command. Raises ConfigError."""
        # Imported here: other configs do not need them, or have not installed them.
        from nemo_like.training.rollout_workers import check_environment

        section = self.config.environment
        check_environment(section)
        from nemo_like.agents.launcher import Launcher
        from nemo_like.agents.worker import program_of

        Launcher(program_of(section)).close()
        if section.command and shutil.which(section.command[0]) is None:
            raise ConfigError(
                f"environment.command: {section.command[0]!r} is not a program on PATH; correct its"
                " name, or give its path"
            )
        self.diagnostics.add_lines("environment", f"{section.name}: can be started")

    def check_environment(self, encoder: ChatEncoder | None) -> None:
        """Import the environment; reset it, step it once, and encode its observation."""
        section = self.config.environment
        section = replace(section, timeout_s=section.timeout_s or MAX_CALL_S)
        worker = self.diagnostics.check(lambda: EnvironmentWorker(None, config=section))
        if worker is None:
            return
        try:
            if encoder is not None:
                # Of the role of a text, also where the first step ends the conversation.
                message = {"role": "user", "content": ""}
                self.diagnostics.check(lambda: ObservationEncoder(encoder).check([message]))
            if self.rows is not None and self.sample is not None:
                messages = question(self.rows[0]).messages
                completion = self.sample.completion or self.sample.answer or ""
                turn = {"role": "assistant", "content": completion}
                turns = Conversation(messages=(*messages, turn), row=self.sample.row)
                outcome = worker.step(turns, section.timeout_s)
                text = self._described(outcome, encoder)
                text = f"{section.path}: {text} for the answer of {self.place} itself"
                self.diagnostics.add_lines("environment", text)
        except (EnvironmentFailure, ConfigError) as error:
            self.diagnostics.problems.append(f"{self.place}: {error}")
        finally:
            worker.close()

    def _described(self, outcome: StepOutcome, encoder: ChatEncoder | None) -> str:
        """Describe an outcome.

        Raises EnvironmentFailure for a failed step, and ConfigError if its observation cannot be
        encoded.
        """
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.is_timeout:
            section = self.config.environment
            limit = f"the {MAX_CALL_S:g} s that `validate` waits without environment.timeout_s"
            if section.timeout_s is not None:
                limit = f"environment.timeout_s {section.timeout_s:g}; raise it"
            raise ConfigError(
                f"the environment {section.path} did not answer a turn within {limit}"
            )
        text = f"reward {sum(outcome.rewards.values()):g}"
        if outcome.done:
            return f"{text}, and the end of the conversation"
        num_tokens = ""
        if encoder is not None:
            observations = ObservationEncoder(encoder)
            token_ids = observations.encode(outcome.observation, encoder.eos_token_id)
            num_tokens = f" of {len(token_ids)} tokens"
        return f"{text}, and an observation{num_tokens}"
