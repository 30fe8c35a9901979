"""Checks of the rows of a run by `validate`: texts, lengths, budgets, and the plan of a step.

Not every row is encoded, so that the checks take seconds; see `row_sample`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from nemo_like.config.check import batching_section, padding_multiples
from nemo_like.config.errors import counted
from nemo_like.config.needs import RunNeeds
from nemo_like.config.schema import DataConfig, EpochLoopConfig, PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import row_error_text
from nemo_like.data.formats import question
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import Message
from nemo_like.data.planning.plan import plan_batch
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.data.row_files import Row
from nemo_like.data.rows import BadRows, Rows
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.batching import plan_spec, shared_prefix_mode
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.diagnostics import Diagnostics
from nemo_like.training.encoding import encode_sft_row
from nemo_like.training.reporting import step_warnings
from nemo_like.training.row_sample import NUM_SAMPLES, length_lines, sampled_rows
from nemo_like.training.run_data import ExampleSource, RunData, describe_run

Value = TypeVar("Value")

_MAX_REPEATED = 0.1
_MAX_UNKNOWN = 0.01
"""Shares of the rows and of the tokens above which `validate` warns."""


@dataclass(frozen=True, kw_only=True)
class RowChecks:
    """Checks the rows of a run, and adds what it finds to `diagnostics`."""

    policy: PolicyConfig
    data: DataConfig
    needs: RunNeeds
    layout: ParallelLayout
    seed: int
    model: ModelSpec | None
    """Gives the work of a row; None for a model that cannot be read."""
    diagnostics: Diagnostics

    def describe_plan(self, title: str, counts: TokenCounts) -> None:
        """Add one line about the plan of a step with these rows.

        The rows of an example are consecutive. With packing or dynamic
        batching the line also has the padding without them.
        """
        lengths = counts.lengths
        if len(lengths) == 0:
            return
        policy = self.policy.in_rows(self.needs.batch.rows_per_example)
        plain = replace(
            policy,
            sequence_packing=replace(policy.sequence_packing, enabled=False),
            dynamic_batching=replace(policy.dynamic_batching, enabled=False),
        )
        try:
            metrics = self._plan_metrics(policy, counts)
            plain_metrics = self._plan_metrics(plain, counts)
        except ValueError as error:
            self.diagnostics.problems.append(f"{title} cannot be planned: {error}")
            return
        padding = f"{metrics['packing/padding_share']:.1%} padding"
        if batching_section(policy) is not None:
            padding_share = plain_metrics["packing/padding_share"]
            num_rows = policy.train_micro_batch_size
            padding += f" ({padding_share:.1%} if padded {counted(num_rows, 'row')} at a time)"
        if "packing/shared_token_share" in metrics:
            padding += f", {metrics['packing/shared_token_share']:.1%} of the tokens shared"
        self.diagnostics.add_lines(
            "plan",
            f"{title}: {counted(len(lengths), 'row')}, {int(lengths.sum()):,} tokens, {padding};"
            f" microbatches per worker and optimizer step: {metrics['packing/num_microbatches']:g}",
        )

    def _plan_metrics(self, policy: PolicyConfig, counts: TokenCounts) -> dict[str, float]:
        """Return the metrics `packing/*` of a training step; ValueError if it cannot be planned."""
        spec = plan_spec(
            policy, purpose="train", parallel_layout=self.layout, model=self.model, seed=self.seed
        )
        groups = None
        # The rows of a preference pair must share a microbatch.
        if self.needs.batch.rows_per_example > 1:
            groups = np.arange(len(counts.lengths)) // self.needs.batch.rows_per_example
        if spec.layout == "padded":
            counts = replace(counts, prefixes=None)
        mode = shared_prefix_mode(policy, self.model)
        return plan_batch(counts, spec, groups, shared_prefix=mode).metrics()

    def check_num_steps(self, limits: EpochLoopConfig, source: ExampleSource[Any]) -> None:
        """Describe the length of a run over epochs, and check that it has a step."""
        num_steps = self.diagnostics.check(lambda: source.num_steps(limits))
        if num_steps is not None:
            num_rows = len(source.data.train)
            self.diagnostics.add_lines(
                "data", describe_run(self.data, self.needs.batch, num_steps, num_rows)
            )
            self.diagnostics.warnings += step_warnings(self.policy, num_steps)
            per_epoch = source.steps_per_epoch()
            num_epochs = limits.max_num_epochs
            # With one epoch, the default, the steps alone are the intended length.
            if num_epochs > 1 and num_steps < num_epochs * per_epoch:
                job = self.needs.job
                self.diagnostics.warnings.append(
                    f"{job}.max_num_steps {num_steps:,} ends the run after"
                    f" {num_steps / per_epoch:.2g} of {job}.max_num_epochs {num_epochs}, which are"
                    f" {num_epochs * per_epoch:,} steps; remove one of the keys"
                )

    def encode_sample(self, rows: Rows, encode: Callable[[Row], Value]) -> dict[int, Value]:
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
                self.diagnostics.warnings.append("\n".join([title, *bad.lines()]))
            else:
                self.diagnostics.problems.append(bad.text(scope, are_all=not encoded))
        return encoded

    def check_repeated(self, rows: Rows) -> None:
        """Warn about rows with the same content as an earlier one; all rows are read."""
        first: dict[str, int] = {}
        repeated = []
        for index in range(len(rows)):
            earlier = first.setdefault(rows.digest(index), index)
            if earlier != index:
                repeated.append((index, earlier))
        if len(repeated) > _MAX_REPEATED * len(rows):
            index, earlier = repeated[0]
            self.diagnostics.warnings.append(
                f"{_count(repeated, rows)} are equal to an earlier row, e.g. {rows.location(index)}"
                f" to {rows.location(earlier)}; remove them, or they count several times"
            )

    def check_unknown(
        self, encoder: ChatEncoder, rows: Rows, encoded: Mapping[int, np.ndarray]
    ) -> None:
        """Warn if many tokens of the sampled rows, index -> int [L], are the unknown token."""
        tokenizer = encoder.tokenizer
        unknown = tokenizer.unk_token_id
        # Some tokenizers name a token of another purpose.
        known = (*encoder.end_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id)
        if unknown is None or unknown in known or not encoded:
            return
        counts = {index: int((token_ids == unknown).sum()) for index, token_ids in encoded.items()}
        share = sum(counts.values()) / max(sum(map(len, encoded.values())), 1)
        if share > _MAX_UNKNOWN:
            worst = max(counts, key=lambda index: counts[index])
            self.diagnostics.warnings.append(
                f"{share:.1%} of the tokens of the rows sampled are {tokenizer.unk_token}, most in"
                f" {rows.location(worst)}: the tokenizer does not know these texts; choose a model"
                " for them, or correct policy.tokenizer_name"
            )

    def check_lengths(self, rows: Rows, lengths: Mapping[int, int]) -> None:
        """Check rows against `max_total_sequence_length` and the token budgets.

        `lengths` is row index -> tokens of the sampled rows.
        """
        if not lengths:
            return
        longest = self._add_longest(rows, lengths, "rows")
        limit = self.policy.max_total_sequence_length
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
            self._add_oversize(text, outcomes, lengths[longest])
        is_limited = self.policy.oversize_rows in ("truncate", "drop")
        max_length = lengths[longest]
        self._check_budget(min(max_length, limit) if is_limited else max_length)

    def check_conversations(self, data: RunData, rows: Rows) -> dict[int, EncodedRow]:
        """Encode a sample of conversations and check their lengths; show the first of training.

        Returns row index -> encoded row.
        """
        train_on = self.data.train_on
        encoded = self.encode_sample(rows, lambda row: encode_sft_row(data.encoder, train_on, row))
        lengths = {index: len(row.input_ids) for index, row in encoded.items()}
        self.check_lengths(rows, lengths)
        token_ids = {index: row.input_ids for index, row in encoded.items()}
        self.check_unknown(data.encoder, rows, token_ids)
        if rows is data.train:
            self.diagnostics.warnings += data.encoder.sft_warnings()
            trained = {index: row.num_trained for index, row in encoded.items()}
            self.diagnostics.add_lines(
                "lengths", *length_lines(rows, lengths, self.policy, trained)
            )
            for index in sorted(encoded)[:NUM_SAMPLES]:
                self.diagnostics.samples.append(Sample(data.encoder.segments(encoded[index])))
        return encoded

    def check_prompts(self, rows: Rows, lengths: Mapping[int, int]) -> None:
        """Check that prompts leave tokens for a completion or a turn, and the token budgets.

        `lengths` is row index -> tokens of the sampled prompts.
        """
        if not lengths:
            return
        longest = self._add_longest(rows, lengths, "prompts")
        max_length = lengths[longest]
        limit = self.policy.max_total_sequence_length
        num_above = sum(length >= limit for length in lengths.values())
        if num_above:
            text = (
                f"{num_above} of the {len(lengths):,} prompts sampled leave no tokens for a"
                f" completion within policy.max_total_sequence_length {limit}, the longest with"
                f" {max_length} tokens ({rows.location(longest)})"
            )
            outcomes = {"truncate": "their beginnings are removed", "drop": "they are left out"}
            self._add_oversize(text, outcomes, max_length + 1)
            return
        max_new_tokens = self.policy.generation.max_new_tokens
        needed = max_length + max_new_tokens
        if needed > limit:
            num_short = sum(length + max_new_tokens > limit for length in lengths.values())
            self.diagnostics.warnings.append(
                f"{num_short} of the {len(lengths):,} prompts sampled leave less than"
                f" policy.generation.max_new_tokens {max_new_tokens} for the completion;"
                f" policy.max_total_sequence_length {needed} would fit them all"
            )
        self._check_budget(min(needed, limit))

    def _add_longest(self, rows: Rows, lengths: Mapping[int, int], noun: str) -> int:
        """Describe the longest of the sampled rows; return its index."""
        longest = max(lengths, key=lambda index: lengths[index])
        which = f"{len(lengths):,} sampled of {len(rows):,}"
        if len(lengths) == len(rows):
            which = f"all {len(rows):,}"
        self.diagnostics.add_lines(
            "lengths",
            f"{noun} ({which}): the longest has {lengths[longest]:,} tokens"
            f" ({rows.location(longest)})",
        )
        return longest

    def _add_oversize(self, text: str, outcomes: Mapping[str, str], needed: int) -> None:
        """Add the warning or problem about rows that are too long.

        `text` describes them, `outcomes` has what a value of `policy.oversize_rows` does with them,
        and `needed` is the sequence length that fits them.
        """
        policy = self.policy.oversize_rows
        if policy in outcomes:
            self.diagnostics.warnings.append(
                f"{text}; policy.oversize_rows is {policy}, so {outcomes[policy]}"
            )
        else:
            self.diagnostics.problems.append(
                f"{text}; raise it to {needed}, or set policy.oversize_rows to"
                f" {' or '.join(outcomes)}"
            )

    def _check_budget(self, max_length: int) -> None:
        """Check the longest row against the token budgets of the batching mode that is enabled."""
        mode = batching_section(self.policy)
        if mode is None:
            return
        name, section = mode
        batch = self.needs.batch
        multiples = padding_multiples(self.layout, section)
        for key, budget in (
            ("train_mb_tokens", section.train_mb_tokens),
            ("logprob_mb_tokens", section.logprob_mb_tokens),
        ):
            needed = batch.rows_per_example * multiples.tokens_of_row(max_length)
            if needed <= budget:
                self.diagnostics.add_lines(
                    "lengths",
                    f"{name}.{key} {budget:,} fits {budget // needed} of the longest"
                    f" {batch.example} ({needed:,} tokens)",
                )
            elif self.policy.oversize_rows != "error":
                # With `error` the rows are a problem of `check_lengths` or `config.check` already.
                self.diagnostics.warnings.append(
                    f"the longest {batch.example} takes {needed} tokens, more than {name}.{key}"
                    f" {budget};"
                    f" policy.oversize_rows is {self.policy.oversize_rows}"
                )

    def check_texts(
        self, encoder: ChatEncoder, rows: Rows, messages_of: Callable[[Row], Sequence[Message]]
    ) -> None:
        """Warn about control tokens in the texts of `rows`; all rows are read.

        The tokenizer converts such a text into the control token itself: in a user's text it ends
        the turn or begins another, and an answer that already contains the end token is rendered
        with two. `messages_of` returns the messages of a row that the model sees.
        """
        template = encoder.template
        ends = list(dict.fromkeys((*template.end_texts, str(encoder.tokenizer.eos_token))))
        # One pattern for all control texts, because every row is searched.
        control = re.compile("|".join(re.escape(text) for text in template.control_texts if text))
        ended: list[int] = []
        forged: list[tuple[int, str]] = []
        for index, row in enumerate(rows):
            messages = messages_of(row)
            if encoder.images is not None:
                messages = [encoder.images.without_images(each) for each in messages]
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
            self.diagnostics.warnings.append(
                f"{_count(ended, rows)} contain the end token ({' or '.join(ends)}) in an"
                f" assistant's text already, e.g. {rows.location(ended[0])}; the rendered turn"
                " contains it twice, so remove it from the text"
            )
        if forged:
            index, token = forged[0]
            self.diagnostics.warnings.append(
                f"{_count(forged, rows)} contain special tokens in a text that is not the"
                f" assistant's, e.g. {token!r} in {rows.location(index)}; the tokenizer makes"
                " control tokens of them, so remove or rewrite them"
            )

    def check_prompts_agree(self, encoder: ChatEncoder) -> None:
        """Warn if rollouts and SFT rows have different tokens before an answer."""
        difference = encoder.prompt_difference()
        if difference is not None:
            self.diagnostics.warnings.append(
                f"the chat template makes rollouts and SFT rows differ: {difference}; a template"
                " given as policy.chat_template that renders both alike avoids it"
            )


def encode_prompt_of(encoder: ChatEncoder, row: Row) -> np.ndarray:
    """Return the token ids of a row's prompt, int [L]."""
    prompt = question(row)
    return encoder.encode_prompt(prompt.messages, prompt.tools)


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
