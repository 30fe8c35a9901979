"""`nemo-like validate`: what a run would stumble over, found in seconds, before any worker starts.

`load_config` has already checked the keys; here their values meet the machine: the model's files,
the data's rows, the tokenizer, the reward functions, the token budget against the longest rows, and
the plan of the first step. No weights are loaded and no Ray is started.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from nemo_like.commands.chat_diagnostics import check_prompts_agree, check_texts
from nemo_like.commands.diagnostics import Findings, Report
from nemo_like.config.check import batching_section, derivation
from nemo_like.config.schema import GrpoRunConfig, RunConfig, SftRunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import Row, Rows, conversation, question
from nemo_like.data.encoded_rows import ROW_ERRORS, row_error_text
from nemo_like.data.planning.balance import few_plans
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import plan_batch
from nemo_like.data.tools import row_tools
from nemo_like.environments.calling import BadReward, score_samples
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.rewards import load_reward_functions
from nemo_like.models.pretrained import import_transformers_without_torch
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec, policy_topology
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

NUM_SAMPLES = 3
_NUM_LONGEST = 512
_NUM_RANDOM = 256
"""Rows whose tokens are counted: those with the most text, where the longest row is, and some of
the others.
"""

Value = TypeVar("Value")


def validate(config: RunConfig, *, without_torch: bool = False) -> Report:
    """Check everything that `config` names. What is wrong is in the report; nothing is raised for
    it.

    `without_torch` keeps transformers from importing torch; see
    `import_transformers_without_torch`.
    """
    findings = Findings()
    findings.say("batches", *derivation(config).splitlines())
    findings.say("model")  # sections are shown in the order in which they are first named
    findings.warnings += config_warnings(config)
    purpose: Literal["sft", "rl"] = "rl" if isinstance(config, GrpoRunConfig) else "sft"
    train = findings.attempt(lambda: load_training(config, purpose, Progress(sys.stderr)))
    validation = findings.attempt(lambda: load_validation(config, purpose))
    for path, rows in ((config.data.train_path, train), (config.data.validation_path, validation)):
        if rows is not None:
            findings.say("data", f"{path}: {len(rows):,} rows of {' + '.join(rows.format)}")
            findings.warnings += rows_warnings(config, rows) if rows is train else ()
    findings.attempt(lambda: check_logger(config.logger))
    _try_rewards(config, train if purpose == "rl" else validation, findings)
    if without_torch:
        import_transformers_without_torch()  # after the reward functions, which may need models of transformers
    model = findings.attempt(lambda: open_model_config(config, local_files_only=True))
    if model is not None:
        _describe_model(config, model, findings)
    encoder = None
    if model is not None or config.policy.tokenizer_name is not None:
        encoder = findings.attempt(lambda: open_encoder(config, local_files_only=True))
    if encoder is not None and train is not None:
        _look_at_rows(config, encoder, train, validation, model, findings)
    return findings.report()


def _describe_model(config: RunConfig, model: PretrainedConfig, findings: Findings) -> None:
    text = model.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    sizes = f"vocabulary of {text.vocab_size:,}" + (
        f", positions up to {positions:,}" if positions else ""
    )
    findings.say("model", f"{config.policy.model_name}: {model.model_type}, {sizes}")
    limit = config.policy.max_total_sequence_length
    if positions and limit > positions:
        findings.warnings.append(
            f"policy.max_total_sequence_length {limit} is above the {positions} positions of the"
            f" model"
        )


def _try_rewards(config: RunConfig, rows: Rows | None, findings: Findings) -> None:
    """Import the reward functions and let each judge the first row's own answer, as a run would
    judge a completion.
    """
    functions = findings.attempt(lambda: load_reward_functions(config.reward.functions))
    if not functions or rows is None:
        return
    asked, last = question(rows[0]), conversation(rows[0])[-1]
    completion = last.get("content") or "" if last["role"] == "assistant" else ""
    sample = RewardSample(
        prompt=asked.text, completion=completion, answer=asked.answer, row=asked.row
    )
    for name, function in functions.items():
        path = config.reward.functions[name].path
        try:
            (value,) = score_samples(function, [sample], name)
        except BadReward as error:  # a run would fail with it
            findings.problems.append(
                f"reward.functions.{name}.path {path} {error} on this sample:\n{sample}"
            )
        else:
            findings.say(
                "rewards",
                f"{name} ({path}): {value:g} for the answer of {rows.locations[0]} itself",
            )


def _look_at_rows(
    config: RunConfig,
    encoder: ChatEncoder,
    train: Rows,
    validation: Rows | None,
    model: PretrainedConfig | None,
    findings: Findings,
) -> None:
    """Lengths, budgets, samples and, if the rows are fine, the first step's plan."""
    cost = CostModel() if model is None else CostModel.from_spec(ModelSpec.from_config(model))
    num_problems = len(findings.problems)
    is_sft = isinstance(config, SftRunConfig)
    check_texts(encoder, train, findings, trains_answers=is_sft)
    check_prompts_agree(encoder, train if is_sft else None, findings)
    if isinstance(config, SftRunConfig):
        source = SftSource(config, encoder, train, validation)
        num_steps = findings.attempt(lambda: source.num_steps)
        if num_steps is not None:
            epoch = describe_epoch(
                config, len(train), config.policy.train_global_batch_size, "rows"
            )
            findings.say("data", f"{num_steps:,} {'step' if num_steps == 1 else 'steps'}; {epoch}")
            findings.warnings += step_warnings(config, num_steps)
        _look_at_conversations(config, encoder, train, model, findings)
        if validation is not None:
            held_out = _encode_some(
                validation,
                lambda row: encoder.encode_sft(conversation(row), row_tools(row)),
                findings,
            )
            lengths_of = {index: len(row.input_ids) for index, row in held_out.items()}
            _check_lengths(config, validation, lengths_of, findings)
        if len(findings.problems) == num_problems:
            batch = findings.attempt(lambda: next(source.loader()))
            lengths = np.array([len(row.input_ids) for row in batch or ()], dtype=np.int64)
            _preview(config, "the first step", lengths, cost, findings)
    elif isinstance(config, GrpoRunConfig):
        epoch = findings.attempt(
            lambda: describe_epoch(config, len(train), config.grpo.num_prompts_per_step, "prompts")
        )
        if epoch is not None:
            findings.say("data", epoch)
        prompts = _encode_some(train, lambda row: _encode_question(encoder, row), findings)
        _check_prompts(config, train, {index: len(ids) for index, ids in prompts.items()}, findings)
        _check_vocabulary(model, prompts.values(), findings)
        if validation is not None:
            held_out = _encode_some(
                validation, lambda row: _encode_question(encoder, row), findings
            )
            _check_prompts(
                config, validation, {index: len(ids) for index, ids in held_out.items()}, findings
            )
        if len(findings.problems) == num_problems:
            asked = (
                findings.attempt(
                    lambda: next(PromptSource(config, encoder, train, validation).loader())
                )
                or []
            )
            findings.samples += [
                _prompt_sample(config, encoder, prompt) for prompt in asked[:NUM_SAMPLES]
            ]
            for name, lengths in _rollout_lengths(config, asked):
                _preview(config, f"a step with {name}", lengths, cost, findings)


def _look_at_conversations(
    config: RunConfig,
    encoder: ChatEncoder,
    train: Rows,
    model: PretrainedConfig | None,
    findings: Findings,
) -> None:
    rows = _encode_some(
        train, lambda row: encoder.encode_sft(conversation(row), row_tools(row)), findings
    )
    _check_lengths(
        config, train, {index: len(row.input_ids) for index, row in rows.items()}, findings
    )
    _check_vocabulary(model, [row.input_ids for row in rows.values()], findings)
    untrained = [train.locations[index] for index, row in rows.items() if not row.token_mask.any()]
    if untrained:
        findings.warnings.append(
            f"{len(untrained)} of the rows looked at train no token, e.g. {untrained[0]}"
        )
    first = [rows[index] for index in sorted(rows)[:NUM_SAMPLES]]
    findings.samples += [Sample(encoder.segments(row)) for row in first]


def _encode_some(
    rows: Rows, encode: Callable[[Row], Value], findings: Findings
) -> dict[int, Value]:
    """The longest rows by their text, the first ones and a random few, encoded, by index; one
    problem for what fails.
    """
    sizes = [len(str(row)) for row in rows]
    longest = sorted(range(len(rows)), key=lambda index: -sizes[index])[:_NUM_LONGEST]
    others = random.Random(0).sample(range(len(rows)), min(len(rows), _NUM_RANDOM))
    encoded: dict[int, Value] = {}
    failures: list[str] = []
    chosen = sorted({*longest, *others, *range(min(NUM_SAMPLES, len(rows)))})
    with Progress(sys.stderr).phase("encoding rows", len(chosen)) as phase:
        for index in chosen:
            try:
                encoded[index] = encode(rows[index])
            except ROW_ERRORS as error:
                failures.append(f"{rows.locations[index]}: {row_error_text(error)}")
            phase.advance()
    if failures:
        more = (
            f" (and {len(failures) - 1} more of the {len(encoded) + len(failures)} rows looked at)"
            if failures[1:]
            else ""
        )
        findings.problems.append(failures[0] + more)
    return encoded


def _encode_question(encoder: ChatEncoder, row: Row) -> np.ndarray:
    asked = question(row)
    return encoder.encode_prompt(asked.messages, asked.tools)


def _describe_lengths(rows: Rows, lengths: Mapping[int, int], noun: str) -> str:
    longest = max(lengths, key=lambda index: lengths[index])
    which = (
        f"all {len(rows):,}"
        if len(lengths) == len(rows)
        else f"the {len(lengths):,} looked at of {len(rows):,}"
    )
    return (
        f"{noun} ({which}): the longest has {lengths[longest]:,} tokens ({rows.locations[longest]})"
    )


def _check_lengths(
    config: RunConfig, rows: Rows, lengths: Mapping[int, int], findings: Findings
) -> None:
    """SFT rows against `max_total_sequence_length` and the token budget."""
    if not lengths:
        return
    findings.say("lengths", _describe_lengths(rows, lengths, "rows"))
    limit, policy = config.policy.max_total_sequence_length, config.policy.oversize_rows
    longest = max(lengths.values())
    above = [index for index in lengths if lengths[index] > limit]
    if above:
        place = rows.locations[max(above, key=lambda index: lengths[index])]
        text = (
            f"{len(above)} of the {len(lengths):,} rows looked at are above"
            f" policy.max_total_sequence_length {limit}, the"
            f" longest with {longest} tokens ({place})"
        )
        outcomes = {
            "truncate": "their ends are cut off",
            "drop": "they are left out",
            "singleton": "they stay whole",
        }
        if policy == "error":
            way_out = f"raise it to {longest}, or set policy.oversize_rows to truncate (cut the end), drop or singleton"
            findings.problems.append(f"{text}; {way_out}")
        else:
            findings.warnings.append(
                f"{text}; policy.oversize_rows is {policy}, so {outcomes[policy]}"
            )
    _check_budget(
        config, min(longest, limit) if policy in ("truncate", "drop") else longest, findings
    )


def _check_prompts(
    config: GrpoRunConfig, rows: Rows, lengths: Mapping[int, int], findings: Findings
) -> None:
    """Prompts against the room a completion needs."""
    if not lengths:
        return
    findings.say("lengths", _describe_lengths(rows, lengths, "prompts"))
    limit, wanted = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    longest = max(lengths.values())
    above = [index for index in lengths if lengths[index] >= limit]
    if above:
        text = (
            f"{len(above)} of the {len(lengths):,} prompts looked at leave no room for a completion"
            f" under"
            f" policy.max_total_sequence_length {limit}, the longest with {longest} tokens"
            f" ({rows.locations[max(above, key=lambda index: lengths[index])]})"
        )
        outcome = {"truncate": "their beginnings are cut off", "drop": "they are left out"}.get(
            config.policy.oversize_rows
        )
        if outcome is None:
            way_out = "or set policy.oversize_rows to truncate (cut the beginning) or drop (leave the rows out)"
            findings.problems.append(f"{text}; raise it above {longest}, {way_out}")
        else:
            findings.warnings.append(
                f"{text}; policy.oversize_rows is {config.policy.oversize_rows}, so {outcome}"
            )
        return
    if longest + wanted > limit:
        short = sum(length + wanted > limit for length in lengths.values())
        findings.warnings.append(
            f"{short} of the {len(lengths):,} prompts looked at leave less than"
            f" policy.generation.max_new_tokens {wanted} for the"
            f" completion; policy.max_total_sequence_length {longest + wanted} would hold them all"
        )
    _check_budget(config, min(longest + wanted, limit), findings)


def _check_budget(config: RunConfig, longest: int, findings: Findings) -> None:
    """The longest row against the token budgets of the batching mode that is on."""
    mode = batching_section(config)
    if mode is None:
        return
    name, section = mode
    for key, budget in (
        ("train_mb_tokens", section.train_mb_tokens),
        ("logprob_mb_tokens", section.logprob_mb_tokens),
    ):
        needed = -(-longest // section.sequence_length_round) * section.sequence_length_round
        if needed <= budget:
            findings.say(
                "lengths",
                f"{name}.{key} {budget:,} holds {budget // needed} of the longest row ({needed:,}"
                f" tokens)",
            )
        elif config.policy.oversize_rows != "error":
            findings.warnings.append(
                f"the longest row takes {needed} tokens, more than {name}.{key} {budget};"
                f" policy.oversize_rows is"
                f" {config.policy.oversize_rows}"
            )


def _check_vocabulary(
    model: PretrainedConfig | None, rows: Iterable[np.ndarray], findings: Findings
) -> None:
    """Every token must be in the model's vocabulary."""
    if model is None:
        return
    size = model.get_text_config().vocab_size
    largest = max((int(row.max()) for row in rows if len(row)), default=0)
    if largest >= size:
        findings.problems.append(
            f"the tokenizer makes token {largest}, but the model's vocabulary ends at {size - 1};"
            f" tokenizer and model do not"
            " belong together (policy.tokenizer_name, policy.model_name)"
        )


def _rollout_lengths(
    config: GrpoRunConfig, prompts: Sequence[Prompt]
) -> Iterator[tuple[str, np.ndarray]]:
    """Row lengths of one step, int64 [P x G], under two guesses about completions nobody has
    sampled yet.
    """
    limit, wanted = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    before = np.repeat(
        [len(prompt.token_ids) for prompt in prompts], config.grpo.num_generations_per_prompt
    )
    room = np.minimum(limit - before, wanted)
    yield (
        "completions of any length",
        before + np.random.default_rng(config.seed % 2**64).integers(1, room + 1),
    )
    yield "completions of the greatest length", before + room


def _preview(
    config: RunConfig, title: str, lengths: np.ndarray, cost: CostModel, findings: Findings
) -> None:
    """One line about the plan of a step, and what it would be without packing or dynamic
    batching.
    """
    if len(lengths) == 0:
        return
    policy, topology = config.policy, policy_topology(config)
    plain = replace(
        policy,
        sequence_packing=replace(policy.sequence_packing, enabled=False),
        dynamic_batching=replace(policy.dynamic_batching, enabled=False),
    )
    try:
        with few_plans():
            metrics, plain_metrics = (
                plan_batch(
                    lengths,
                    plan_spec(
                        each,
                        purpose="train",
                        topology=topology,
                        sequence_parallel=config.parallel.sequence,
                        cost=cost,
                        seed=config.seed,
                    ),
                ).metrics()
                for each in (policy, plain)
            )
    except ValueError as error:
        findings.problems.append(f"{title} cannot be planned: {error}")
        return
    padding = f"{metrics['packing/padding_share']:.1%} padding"
    if batching_section(config) is not None:
        share, rows = plain_metrics["packing/padding_share"], policy.train_micro_batch_size
        padding += f" ({share:.1%} if {rows} rows at a time were padded)"
    line = (
        f"{title}: {len(lengths):,} rows, {int(lengths.sum()):,} tokens, {padding}; microbatches"
        f" per worker and optimizer step:"
        f" {metrics['packing/num_microbatches']:g}"
    )
    findings.say("plan", line)


def _prompt_sample(config: GrpoRunConfig, encoder: ChatEncoder, prompt: Prompt) -> Sample:
    text = str(encoder.tokenizer.decode(prompt.token_ids.tolist()))
    completion = f"up to {config.policy.generation.max_new_tokens} sampled tokens"
    return Sample(((text, False), (completion, True)), notes={"answer": str(prompt.answer)})
