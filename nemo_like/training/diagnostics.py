"""What `validate` finds: its report, the preview of the plan, and the checks of rows.

Not every row is encoded, so that the checks take seconds; see `row_sample`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nemo_like.config.check import batching_section, padding_multiples
from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import row_error_text
from nemo_like.data.formats import question
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import Message
from nemo_like.data.row_files import Row
from nemo_like.data.rows import BadRows, Rows
from nemo_like.data.token_counts import TokenCounts, plan_counts
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec, shared_prefix_mode
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.reporting import step_warnings
from nemo_like.training.row_sample import NUM_SAMPLES, length_lines, sampled_rows
from nemo_like.training.run_data import ExampleSource, RunData, describe_run, encode_sft_row

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Value = TypeVar("Value")


@dataclass(frozen=True)
class Report:
    """The result of `validate`. A run fails with each of `problems`; `warnings` do not stop it."""

    sections: Mapping[str, tuple[str, ...]]
    """Title -> lines."""
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def show(self, progress: Progress) -> None:
        """Print the report; tokens with loss are colored on a terminal, else enclosed in ⟦ ⟧."""
        progress.print_line("\n".join(self._lines()))
        progress.show_samples(self.samples, "sample")
        # The verdict comes last, where it is visible after a long report.
        progress.print_line("\n".join(self._verdict()))

    def _lines(self) -> Iterator[str]:
        for title, lines in self.sections.items():
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)

    def _verdict(self) -> Iterator[str]:
        yield from (f"warning: {warning}" for warning in self.warnings)
        yield from (f"problem: {problem}" for problem in self.problems)
        num_problems = len(self.problems)
        if num_problems == 0:
            yield "ok: no problem found"
        else:
            noun = "problem" if num_problems == 1 else "problems"
            yield f"{num_problems} {noun} to solve"


@dataclass
class Diagnostics:
    """Lines, samples, warnings and problems in the order in which the checks add them."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    """Title -> lines; sections are shown in the order in which they are first named."""
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_lines(self, title: str, *lines: str) -> None:
        """Append lines to a section, which is created if necessary."""
        self.sections.setdefault(title, []).extend(lines)

    def check(self, function: Callable[[], Value]) -> Value | None:
        """Return the result of `function`; add a problem and return None if it raises ConfigError.

        Any other exception is a bug and passes unchanged.
        """
        try:
            return function()
        except ConfigError as error:
            # The remaining checks still run: a user wants to see all problems at once.
            self.problems += error.problems or [str(error)]
            return None

    def report(self) -> Report:
        """Return the report, without empty sections."""
        sections = {title: tuple(lines) for title, lines in self.sections.items() if lines}
        return Report(sections, tuple(self.samples), tuple(self.problems), tuple(self.warnings))


def describe_plan(
    config: RunConfig,
    title: str,
    counts: TokenCounts,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Add one line about the plan of a step with these rows.

    The rows of an example are consecutive; `model` gives the work of a row. With packing or dynamic
    batching the line also has the padding without them.
    """
    lengths = counts.lengths
    if len(lengths) == 0:
        return
    policy = config.policy_in_rows
    spec = None if model is None else ModelSpec.from_config(model)
    plain = replace(
        policy,
        sequence_packing=replace(policy.sequence_packing, enabled=False),
        dynamic_batching=replace(policy.dynamic_batching, enabled=False),
    )
    try:
        metrics = _plan_metrics(config, policy, counts, spec)
        plain_metrics = _plan_metrics(config, plain, counts, spec)
    except ValueError as error:
        diagnostics.problems.append(f"{title} cannot be planned: {error}")
        return
    padding = f"{metrics['packing/padding_share']:.1%} padding"
    if batching_section(config) is not None:
        padding_share = plain_metrics["packing/padding_share"]
        num_rows = policy.train_micro_batch_size
        padding += f" ({padding_share:.1%} if padded {counted(num_rows, 'row')} at a time)"
    if "packing/shared_token_share" in metrics:
        padding += f", {metrics['packing/shared_token_share']:.1%} of the tokens shared"
    diagnostics.add_lines(
        "plan",
        f"{title}: {counted(len(lengths), 'row')}, {int(lengths.sum()):,} tokens, {padding};"
        f" microbatches per worker and optimizer step: {metrics['packing/num_microbatches']:g}",
    )


def _plan_metrics(
    config: RunConfig, policy: PolicyConfig, counts: TokenCounts, model: ModelSpec | None
) -> dict[str, float]:
    """Return the metrics `packing/*` of a training step; ValueError if it cannot be planned."""
    spec = plan_spec(
        policy,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model,
        seed=config.seed,
    )
    groups = None
    # The rows of a preference pair must share a microbatch.
    if config.rows_per_example > 1:
        groups = np.arange(len(counts.lengths)) // config.rows_per_example
    return plan_counts(counts, spec, shared_prefix_mode(policy, model), groups).metrics()


def check_num_steps(source: ExampleSource[Any], diagnostics: Diagnostics) -> None:
    """Describe the length of a run over epochs, and check that it has a step."""
    config = source.config
    num_steps = diagnostics.check(source.num_steps)
    if num_steps is not None:
        num_rows = len(source.data.train)
        diagnostics.add_lines("data", describe_run(config, num_steps, num_rows))
        diagnostics.warnings += step_warnings(config, num_steps)


def encode_sample(
    rows: Rows, encode: Callable[[Row], Value], diagnostics: Diagnostics
) -> dict[int, Value]:
    """Encode a sample of the rows; return index -> result.

    All rows that cannot be encoded become one problem, which lists the first.
    """
    chosen = sampled_rows(rows)
    encoded: dict[int, Value] = {}
    bad = BadRows()
    with Progress(sys.stderr).phase("encoding rows", len(chosen)) as phase:
        for index in chosen:
            try:
                encoded[index] = encode(rows[index])
            # A tokenizer may raise any exception, also the base class.
            except Exception as error:  # noqa: BLE001
                bad.add(rows.location(index), row_error_text(error))
            phase.advance()
    if bad.num_rows:
        scope = f" of the {len(chosen)} rows sampled"
        if rows.skips_bad and encoded:
            title = f"data.on_bad_row=skip leaves out {bad.num_rows:,}{scope}:"
            diagnostics.warnings.append("\n".join([title, *bad.lines()]))
        else:
            diagnostics.problems.append(bad.text(scope, are_all=not encoded))
    return encoded


def encode_prompt_of(encoder: ChatEncoder, row: Row) -> np.ndarray:
    """Return the token ids of a row's prompt, int [L]."""
    prompt = question(row)
    return encoder.encode_prompt(prompt.messages, prompt.tools)


def check_lengths(
    config: RunConfig, rows: Rows, lengths: Mapping[int, int], diagnostics: Diagnostics
) -> None:
    """Check rows against `max_total_sequence_length` and the token budgets.

    `lengths` is row index -> tokens of the sampled rows.
    """
    if not lengths:
        return
    longest = _add_longest(rows, lengths, "rows", diagnostics)
    limit = config.policy.max_total_sequence_length
    num_above = sum(length > limit for length in lengths.values())
    if num_above:
        text = (
            f"{num_above} of the {len(lengths):,} rows sampled are above"
            f" policy.max_total_sequence_length {limit}, the longest with"
            f" {lengths[longest]} tokens ({rows.location(longest)})"
        )
        outcomes = {
            "truncate": "their ends are removed",
            "drop": "they are left out",
            "singleton": "they are kept in full",
        }
        _add_oversize(config, text, outcomes, lengths[longest], diagnostics)
    is_limited = config.policy.oversize_rows in ("truncate", "drop")
    max_length = lengths[longest]
    _check_budget(config, min(max_length, limit) if is_limited else max_length, diagnostics)


def check_conversations(
    config: RunConfig, data: RunData, rows: Rows, diagnostics: Diagnostics
) -> dict[int, EncodedRow]:
    """Encode a sample of rows of conversations and check the lengths; show the first of training.

    Returns row index -> encoded row.
    """
    train_on = config.data.train_on
    encoded = encode_sample(
        rows, lambda row: encode_sft_row(data.encoder, train_on, row), diagnostics
    )
    lengths = {index: len(row.input_ids) for index, row in encoded.items()}
    check_lengths(config, rows, lengths, diagnostics)
    if rows is data.train:
        diagnostics.warnings += data.encoder.sft_warnings()
        trained = {index: row.num_trained for index, row in encoded.items()}
        diagnostics.add_lines("lengths", *length_lines(rows, lengths, config.policy, trained))
        for index in sorted(encoded)[:NUM_SAMPLES]:
            diagnostics.samples.append(Sample(data.encoder.segments(encoded[index])))
    return encoded


def check_prompts(
    config: RunConfig, rows: Rows, lengths: Mapping[int, int], diagnostics: Diagnostics
) -> None:
    """Check that prompts leave tokens for a completion or a turn, and the token budgets.

    `lengths` is row index -> tokens of the sampled prompts.
    """
    if not lengths:
        return
    longest = _add_longest(rows, lengths, "prompts", diagnostics)
    max_length = lengths[longest]
    limit = config.policy.max_total_sequence_length
    num_above = sum(length >= limit for length in lengths.values())
    if num_above:
        text = (
            f"{num_above} of the {len(lengths):,} prompts sampled leave no tokens for a completion"
            f" within policy.max_total_sequence_length {limit}, the longest with {max_length}"
            f" tokens ({rows.location(longest)})"
        )
        outcomes = {"truncate": "their beginnings are removed", "drop": "they are left out"}
        _add_oversize(config, text, outcomes, max_length + 1, diagnostics)
        return
    max_new_tokens = config.policy.generation.max_new_tokens
    needed = max_length + max_new_tokens
    if needed > limit:
        num_short = sum(length + max_new_tokens > limit for length in lengths.values())
        diagnostics.warnings.append(
            f"{num_short} of the {len(lengths):,} prompts sampled leave less than"
            f" policy.generation.max_new_tokens {max_new_tokens} for the completion;"
            f" policy.max_total_sequence_length {needed} would fit them all"
        )
    _check_budget(config, min(needed, limit), diagnostics)


def _add_longest(
    rows: Rows, lengths: Mapping[int, int], noun: str, diagnostics: Diagnostics
) -> int:
    """Describe the longest of the sampled rows; return its index."""
    longest = max(lengths, key=lambda index: lengths[index])
    which = f"{len(lengths):,} sampled of {len(rows):,}"
    if len(lengths) == len(rows):
        which = f"all {len(rows):,}"
    diagnostics.add_lines(
        "lengths",
        f"{noun} ({which}): the longest has {lengths[longest]:,} tokens ({rows.location(longest)})",
    )
    return longest


def _add_oversize(
    config: RunConfig, text: str, outcomes: Mapping[str, str], needed: int, diagnostics: Diagnostics
) -> None:
    """Add the warning or problem about rows that are too long.

    `text` describes them, `outcomes` has what a value of `policy.oversize_rows` does with them, and
    `needed` is the sequence length that fits them.
    """
    policy = config.policy.oversize_rows
    if policy in outcomes:
        diagnostics.warnings.append(
            f"{text}; policy.oversize_rows is {policy}, so {outcomes[policy]}"
        )
    else:
        diagnostics.problems.append(
            f"{text}; raise it to {needed}, or set policy.oversize_rows to {' or '.join(outcomes)}"
        )


def _check_budget(config: RunConfig, max_length: int, diagnostics: Diagnostics) -> None:
    """Check the longest row against the token budgets of the batching mode that is enabled."""
    mode = batching_section(config)
    if mode is None:
        return
    name, section = mode
    multiples = padding_multiples(config, section)
    for key, budget in (
        ("train_mb_tokens", section.train_mb_tokens),
        ("logprob_mb_tokens", section.logprob_mb_tokens),
    ):
        needed = config.rows_per_example * multiples.tokens_of_row(max_length)
        if needed <= budget:
            diagnostics.add_lines(
                "lengths",
                f"{name}.{key} {budget:,} fits {budget // needed} of the longest {config.example}"
                f" ({needed:,} tokens)",
            )
        elif config.policy.oversize_rows != "error":
            # With `error` the rows are a problem of `check_lengths` or `config.check` already.
            diagnostics.warnings.append(
                f"the longest {config.example} takes {needed} tokens, more than {name}.{key}"
                f" {budget};"
                f" policy.oversize_rows is {config.policy.oversize_rows}"
            )


def check_texts(
    encoder: ChatEncoder,
    rows: Rows,
    messages_of: Callable[[Row], Sequence[Message]],
    diagnostics: Diagnostics,
) -> None:
    """Warn about control tokens in the texts of `rows`; all rows are read.

    The tokenizer converts such a text into the control token itself: in a user's text it ends the
    turn or begins another, and an answer that already contains the end token is rendered with two.
    `messages_of` returns the messages of a row that the model sees.
    """
    template = encoder.template
    ends = list(dict.fromkeys((*template.end_texts, str(encoder.tokenizer.eos_token))))
    # One pattern for all control texts, because every row is searched.
    control = re.compile("|".join(re.escape(text) for text in template.control_texts if text))
    ended: list[int] = []
    forged: list[tuple[int, str]] = []
    for index, row in enumerate(rows):
        messages = messages_of(row)
        # Joined by a character of no control text, so that none is found across messages.
        answers = "\0".join(_texts(messages, assistant=True))
        if any(end in answers for end in ends):
            ended.append(index)
        for text in _texts(messages, assistant=False):
            found = control.search(text)
            if found is not None:
                # One text is enough: rows are counted, not texts.
                forged.append((index, found.group()))
                break
    if ended:
        diagnostics.warnings.append(
            f"{_count(ended, rows)} contain the end token ({' or '.join(ends)}) in an assistant's"
            f" text already, e.g. {rows.location(ended[0])}; the rendered turn contains it twice,"
            " so remove it from the text"
        )
    if forged:
        index, token = forged[0]
        diagnostics.warnings.append(
            f"{_count(forged, rows)} contain special tokens in a text that is not the assistant's,"
            f" e.g. {token!r} in {rows.location(index)}; the tokenizer makes control tokens of"
            " them, so remove or rewrite them"
        )


def check_prompts_agree(encoder: ChatEncoder, diagnostics: Diagnostics) -> None:
    """Warn if rollouts and SFT rows have different tokens before an answer."""
    difference = encoder.prompt_difference()
    if difference is not None:
        diagnostics.warnings.append(
            f"the chat template makes rollouts and SFT rows differ: {difference}; a template given"
            " as policy.chat_template that renders both alike avoids it"
        )


def prompt_messages(row: Row) -> Sequence[Message]:
    """Return the messages of a row that a rollout begins with."""
    return question(row).messages


def _texts(messages: Sequence[Message], *, assistant: bool) -> Iterator[str]:
    """Yield the texts of the assistant's messages, or of all others."""
    for message in messages:
        is_assistant = message["role"] == "assistant"
        # A message that only calls tools has no text.
        content = message.get("content")
        if is_assistant == assistant and isinstance(content, str):
            yield content


def _count(found: Sequence[object], rows: Rows) -> str:
    return f"{len(found):,} of the {len(rows):,} rows"
