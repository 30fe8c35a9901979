"""`nemo-like validate`: find the errors of a run in seconds, before any worker starts.

`load_config` has checked the keys. This module checks their values on this machine: the model's
files, the rows of data, the tokenizer, the reward functions, the token budgets against the longest
rows, and the plan of the first step. No weights are loaded and Ray is not started.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from nemo_like.commands.chat_diagnostics import check_prompts_agree, check_texts
from nemo_like.commands.diagnostics import Diagnostics, Report
from nemo_like.commands.first_step import rollout_lengths
from nemo_like.commands.row_diagnostics import (
    NUM_SAMPLES,
    check_lengths,
    check_prompts,
    check_vocabulary,
    encode_question,
    encode_sample,
)
from nemo_like.config.check import batching_section, derivation
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import GrpoRunConfig, PolicyConfig, RunConfig, SftRunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import Rows, conversation, question
from nemo_like.data.planning.balance import few_plans
from nemo_like.data.planning.plan import plan_batch
from nemo_like.data.tools import row_tools
from nemo_like.environments.calling import BadReward, score_samples
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.rewards import load_reward_functions
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec
from nemo_like.progress import Progress, Sample
from nemo_like.rollout.prompt import Prompt
from nemo_like.tracking import check_logger
from nemo_like.training.dataset import (
    PromptSource,
    SftSource,
    describe_epoch,
    load_training,
    load_validation,
)
from nemo_like.training.model_files import open_encoder, open_model_config
from nemo_like.training.run_warnings import config_warnings, rows_warnings, step_warnings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
    purpose: Literal["sft", "rl"] = "rl" if isinstance(config, GrpoRunConfig) else "sft"
    train = diagnostics.check(lambda: load_training(config, purpose, Progress(sys.stderr)))
    validation = diagnostics.check(lambda: load_validation(config, purpose))
    if train is not None:
        _describe_rows(config.data.train_path, train, diagnostics)
        diagnostics.warnings += rows_warnings(config, train)
    if validation is not None:
        _describe_rows(config.data.validation_path, validation, diagnostics)
    diagnostics.check(lambda: check_logger(config.logger))
    _check_rewards(config, train if purpose == "rl" else validation, diagnostics)
    if without_torch:
        # After the reward functions, which may need models of transformers.
        import_transformers_without_torch()
    model = diagnostics.check(lambda: open_model_config(config, local_files_only=True))
    if model is not None:
        _describe_model(config, model, diagnostics)
    encoder = None
    # Without a model the tokenizer's name is only known if the config sets it.
    if model is not None or config.policy.tokenizer_name is not None:
        encoder = diagnostics.check(lambda: open_encoder(config, local_files_only=True))
    if encoder is not None and train is not None:
        if isinstance(config, SftRunConfig):
            _check_sft_rows(config, encoder, train, validation, model, diagnostics)
        elif isinstance(config, GrpoRunConfig):
            _check_grpo_rows(config, encoder, train, validation, model, diagnostics)
    return diagnostics.report()


def _describe_rows(path: str | None, rows: Rows, diagnostics: Diagnostics) -> None:
    columns = " + ".join(rows.format)
    diagnostics.add_lines("data", f"{path}: {len(rows):,} rows of {columns}")


def _describe_model(config: RunConfig, model: PretrainedConfig, diagnostics: Diagnostics) -> None:
    text = model.get_text_config()
    max_positions = getattr(text, "max_position_embeddings", None)
    sizes = f"vocabulary of {text.vocab_size:,}"
    if max_positions:
        sizes += f", positions up to {max_positions:,}"
    diagnostics.add_lines("model", f"{config.policy.model_name}: {model.model_type}, {sizes}")
    limit = config.policy.max_total_sequence_length
    if max_positions and limit > max_positions:
        diagnostics.warnings.append(
            f"policy.max_total_sequence_length {limit} is above the {max_positions} positions of"
            " the model"
        )


def _check_rewards(config: RunConfig, rows: Rows | None, diagnostics: Diagnostics) -> None:
    """Import the reward functions and score the first row's own answer with each of them.

    The functions are called as in a run, so a function that raises is a problem here as well.
    """
    functions = diagnostics.check(lambda: load_reward_functions(config.reward.functions))
    if not functions or rows is None:
        return
    asked = question(rows[0])
    last_message = conversation(rows[0])[-1]
    completion = ""
    if last_message["role"] == "assistant":
        completion = last_message.get("content") or ""
    sample = RewardSample(
        prompt=asked.text, completion=completion, answer=asked.answer, row=asked.row
    )
    for name, function in functions.items():
        path = config.reward.functions[name].path
        try:
            (value,) = score_samples(function, [sample], name)
        except BadReward as error:
            diagnostics.problems.append(
                f"reward.functions.{name}.path {path} {error} on this sample:\n{sample}"
            )
        else:
            diagnostics.add_lines(
                "rewards",
                f"{name} ({path}): {value:g} for the answer of {rows.locations[0]} itself",
            )


def _check_sft_rows(
    config: SftRunConfig,
    encoder: ChatEncoder,
    train: Rows,
    validation: Rows | None,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check texts, lengths, budgets and loss masks; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    check_texts(encoder, train, diagnostics, trains_answers=True)
    check_prompts_agree(encoder, train, diagnostics)
    source = SftSource(config, encoder, train, validation)
    num_steps = diagnostics.check(lambda: source.num_steps)
    if num_steps is not None:
        batch_size = config.policy.train_global_batch_size
        epoch = describe_epoch(config, len(train), batch_size, "rows")
        steps = "step" if num_steps == 1 else "steps"
        diagnostics.add_lines("data", f"{num_steps:,} {steps}; {epoch}")
        diagnostics.warnings += step_warnings(config, num_steps)
    for rows in (train, validation):
        if rows is None:
            continue
        encoded = encode_sample(
            rows, lambda row: encoder.encode_sft(conversation(row), row_tools(row)), diagnostics
        )
        lengths = {index: len(row.input_ids) for index, row in encoded.items()}
        check_lengths(config, rows, lengths, diagnostics)
        if rows is train:
            check_vocabulary(model, [row.input_ids for row in encoded.values()], diagnostics)
            untrained = [index for index, row in encoded.items() if not row.token_mask.any()]
            if untrained:
                diagnostics.warnings.append(
                    f"{len(untrained)} of the rows sampled have no token with loss, e.g."
                    f" {train.locations[untrained[0]]}"
                )
            for index in sorted(encoded)[:NUM_SAMPLES]:
                diagnostics.samples.append(Sample(encoder.segments(encoded[index])))
    if len(diagnostics.problems) == num_problems_before:
        batch = diagnostics.check(lambda: next(source.loader()))
        first_lengths = np.array([len(row.input_ids) for row in batch or ()], dtype=np.int64)
        _describe_plan(config, "the first step", first_lengths, _spec(model), diagnostics)


def _check_grpo_rows(
    config: GrpoRunConfig,
    encoder: ChatEncoder,
    train: Rows,
    validation: Rows | None,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check texts, prompt lengths and budgets; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    check_texts(encoder, train, diagnostics, trains_answers=False)
    check_prompts_agree(encoder, None, diagnostics)
    num_prompts = config.grpo.num_prompts_per_step
    epoch = diagnostics.check(lambda: describe_epoch(config, len(train), num_prompts, "prompts"))
    if epoch is not None:
        diagnostics.add_lines("data", epoch)
    for rows in (train, validation):
        if rows is None:
            continue
        encoded = encode_sample(rows, lambda row: encode_question(encoder, row), diagnostics)
        lengths = {index: len(token_ids) for index, token_ids in encoded.items()}
        check_prompts(config, rows, lengths, diagnostics)
        if rows is train:
            check_vocabulary(model, encoded.values(), diagnostics)
    if len(diagnostics.problems) > num_problems_before:
        return
    source = PromptSource(config, encoder, train, validation)
    prompts = diagnostics.check(lambda: next(source.loader())) or []
    for prompt in prompts[:NUM_SAMPLES]:
        diagnostics.samples.append(_prompt_sample(config, encoder, prompt))
    prompt_lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
    uniform, longest = rollout_lengths(config, prompt_lengths)
    spec = _spec(model)
    uniform_title = "a step with completions of uniformly random length"
    _describe_plan(config, uniform_title, uniform, spec, diagnostics)
    longest_title = "a step with completions of the max length"
    _describe_plan(config, longest_title, longest, spec, diagnostics)


def _spec(model: PretrainedConfig | None) -> ModelSpec | None:
    return None if model is None else ModelSpec.from_config(model)


def _describe_plan(
    config: RunConfig,
    title: str,
    lengths: np.ndarray,
    model: ModelSpec | None,
    diagnostics: Diagnostics,
) -> None:
    """Add one line about the plan of a step with rows of `lengths`, int64 [B].

    With packing or dynamic batching it also gives the padding without them.
    """
    if len(lengths) == 0:
        return
    policy = config.policy
    plain = replace(
        policy,
        sequence_packing=replace(policy.sequence_packing, enabled=False),
        dynamic_batching=replace(policy.dynamic_batching, enabled=False),
    )
    try:
        with few_plans():
            metrics = _plan_metrics(config, policy, lengths, model)
            plain_metrics = _plan_metrics(config, plain, lengths, model)
    except ValueError as error:
        diagnostics.problems.append(f"{title} cannot be planned: {error}")
        return
    padding = f"{metrics['packing/padding_share']:.1%} padding"
    if batching_section(config) is not None:
        padding_share = plain_metrics["packing/padding_share"]
        num_rows = policy.train_micro_batch_size
        padding += f" ({padding_share:.1%} if {num_rows} rows at a time were padded)"
    diagnostics.add_lines(
        "plan",
        f"{title}: {len(lengths):,} rows, {int(lengths.sum()):,} tokens, {padding}; microbatches"
        f" per worker and optimizer step: {metrics['packing/num_microbatches']:g}",
    )


def _plan_metrics(
    config: RunConfig, policy: PolicyConfig, lengths: np.ndarray, model: ModelSpec | None
) -> dict[str, float]:
    """Return the metrics `packing/*` of a training step; ValueError if it cannot be planned."""
    spec = plan_spec(
        policy,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model,
        seed=config.seed,
    )
    return plan_batch(lengths, spec).metrics()


def _prompt_sample(config: GrpoRunConfig, encoder: ChatEncoder, prompt: Prompt) -> Sample:
    text = str(encoder.tokenizer.decode(prompt.token_ids.tolist()))
    completion = f"up to {config.policy.generation.max_new_tokens} sampled tokens"
    return Sample(((text, False), (completion, True)), notes={"answer": str(prompt.answer)})
