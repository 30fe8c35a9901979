"""Conversations to token ids, and which of them carry loss. The words come from the tokenizer's
chat template.

Loss is on what the model itself would write: an assistant turn's text or tool calls and the token
that ends the turn. Which part of the rendered text that is, is found for any template: `{%
generation %}` blocks say it where there are some; otherwise it lies between the template's
generation prompt and its end of a turn. These are looked up in the text of one rendering where they
are unmistakable, else by comparing several (`chat_spans`).

A tokenizer without a chat template gets the plain rule: each turn's text, then a line break after
turns of others and the end-of-sequence token after the assistant's; the beginning-of-sequence token
first if the tokenizer puts one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_check import check_rendered
from nemo_like.data.chat_spans import Span, common_prefix, exact_spans
from nemo_like.data.chat_structure import Frame, Structures
from nemo_like.data.chat_template import PROBE, ChatTemplate
from nemo_like.data.collate import EncodedRow
from nemo_like.data.template_limits import check_chat_template, check_prompt_template
from nemo_like.data.tools import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Encodes conversations (`encode_sft`) and what comes before an answer (`encode_prompt`).

    Example with ChatML: user "2+2=?", assistant "4" is
    `<|im_start|>user\\n2+2=?<|im_end|>\\n<|im_start|>assistant\\n`, which is the prompt, and
    `4<|im_end|>`, which carries the loss.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        train_on: Literal["assistant", "all"] = "assistant",
    ) -> None:
        """`system_prompt` opens conversations that have no system turn; `prompt_template` goes
        around every user turn.

        Raises ConfigError for a tokenizer without an end-of-sequence token and for a template that
        is not a format string with `{prompt}`.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path!r} has no eos token, so no row could end; "
                "set eos_token in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._system_prompt = system_prompt
        self._prompt_template = prompt_template
        self.template = ChatTemplate(tokenizer)
        self._structures = Structures(self.template)
        self._marks_generation = bool(
            tokenizer.chat_template and _GENERATION_BLOCK.search(str(tokenizer.chat_template))
        )
        self._bos_text = _bos_text(tokenizer)
        check_prompt_template(prompt_template)
        if isinstance(tokenizer.chat_template, str):
            check_chat_template(tokenizer.chat_template, repr(tokenizer.name_or_path))

    @property
    def eos_token_id(self) -> int:
        return _token_id(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's; where it has none the eos token, as padding is never attended to nor
        trained.
        """
        return (
            self.eos_token_id
            if self.tokenizer.pad_token_id is None
            else _token_id(self.tokenizer.pad_token_id)
        )

    def encode_sft(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> EncodedRow:
        """Token ids up to the end of the last assistant turn (`train_on="all"`: of the
        conversation), and their mask.

        Raises ConfigError if there is no assistant turn to be found, or the template refuses or
        drops messages or tools.
        """
        messages = self._prepare(messages)
        if self._marks_generation and self.train_on == "assistant":
            return self._encode_marked(messages, tools)
        if not any(message["role"] == "assistant" for message in messages):
            raise ConfigError("there is no assistant turn to learn from")
        text, spans = (
            self._render_with_spans(messages, tools)
            if self.template.exists
            else self._plain(messages, tools)
        )
        if self.train_on == "all":
            ids = self._token_ids(text)
            return EncodedRow(ids, np.ones(len(ids), dtype=np.uint8))
        return self._encode_spans(text, spans)

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> np.ndarray:
        """int32 [L]: the conversation and the opening of the assistant's turn.

        Raises ConfigError if the template refuses or drops messages or tools.
        """
        messages = self._prepare(messages)
        if not self.template.exists:
            return self._token_ids(self._plain(messages, tools)[0])
        text = self.template.render(messages, tools, opening=True)
        self._check(messages, tools, text, trains=False)
        return self._token_ids(text)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every token that ends what the model writes: the tokenizer's eos token and the template's
        end of a turn.
        """
        return tuple(sorted({self.eos_token_id, *self.template.end_token_ids}))

    def prompt_difference(
        self, messages: Sequence[Message] = PROBE, tools: Sequence[Tool] | None = None
    ) -> str | None:
        """How the prompt of a rollout differs from what stands before the last assistant turn in
        SFT, None if it does not.

        Such a difference is the chat template's: DeepSeek-R1 opens a thought that a finished turn
        does not show. A model fine-tuned on these rows then never saw the prompts that it is asked
        to continue.
        """
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            row = self.encode_sft(messages, tools)
        except ConfigError:
            return None  # what is wrong with the messages is reported where they are encoded
        starts = np.flatnonzero(np.diff(row.token_mask, prepend=0) == 1)
        if not turns or turns[-1] == 0 or len(starts) != len(turns):
            return None
        ids = (self.encode_prompt(messages[: turns[-1]], tools), row.input_ids[: starts[-1]])
        prompt, before = (str(self.tokenizer.decode(each.tolist())) for each in ids)
        if prompt == before:
            return None
        same = max(common_prefix(prompt, before) - 30, 0)
        shown = [repr(text[same:][-80:]) for text in (prompt, before)]
        return f"the prompt of a rollout ends with {shown[0]}, but in SFT rows the trained text follows {shown[1]}"

    def segments(self, row: EncodedRow) -> tuple[tuple[str, bool], ...]:
        """The row decoded, cut where the mask changes: (text, whether it is trained)."""
        edges = np.flatnonzero(np.diff(row.token_mask)) + 1
        parts = zip(np.split(row.input_ids, edges), np.split(row.token_mask, edges), strict=True)
        return tuple(
            (str(self.tokenizer.decode(ids.tolist())), bool(mask.any())) for ids, mask in parts
        )

    def marked_text(self, row: EncodedRow) -> str:
        """The row decoded, with the trained parts between ⟦ and ⟧."""
        return "".join(
            f"⟦{text}⟧" if is_trained else text for text, is_trained in self.segments(row)
        )

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        prepared = list(messages)
        if self._system_prompt is not None and not any(
            message["role"] == "system" for message in messages
        ):
            prepared.insert(0, {"role": "system", "content": self._system_prompt})
        template = self._prompt_template
        if template is None:
            return prepared
        return [
            {**message, "content": template.format(prompt=message["content"])}
            if message["role"] == "user"
            else message
            for message in prepared
        ]

    def _encode_spans(self, text: str, spans: list[Span]) -> EncodedRow:
        """Tokens of `text` up to the last span's end, cut where each span begins.

        The cut makes what stands before an answer the very tokens that `encode_prompt` gives for
        it, also where the tokenizer would merge the prompt's last characters with the answer's
        first.
        """
        pieces: list[tuple[str, bool]] = [(text[: spans[0][0]], False)]
        for (start, end), following in zip(
            spans, [*(start for start, _ in spans[1:]), spans[-1][1]], strict=True
        ):
            pieces += [(text[start:end], start > 0), (text[end:following], True)]
        ids = self._tokenize(pieces)
        for index in range(1, len(pieces), 2):
            (turn, follows), (following, _) = pieces[index], pieces[index + 1]
            if following and not turn.endswith(self._separators):
                # The tokenizer may merge characters across the end of the turn, and does so in what
                # it samples from.
                both = self._token_ids(turn + following, follows=follows)
                if np.array_equal(both[: len(ids[index])], ids[index]):
                    ids[index + 1] = both[len(ids[index]) :]
        trained = np.arange(len(ids)) % 2
        return EncodedRow(
            np.concatenate(ids), np.repeat(trained.astype(np.uint8), [len(part) for part in ids])
        )

    @cached_property
    def _separators(self) -> tuple[str, ...]:
        """Texts of tokens behind which the tokenizer starts anew, whatever follows."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        texts = [str(token) for token in tokens if not token.rstrip and not token.single_word]
        # What another token contains may be the beginning of that one.
        return tuple(
            text
            for text in texts
            if text and sum(text in other for other in self.template.special_texts) == 1
        )

    def _tokenize(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """`_token_ids` of each (text, whether it follows other text), in one call of the
        tokenizer.
        """
        texts = [self._behind_eos(text) if follows else text for text, follows in pieces]
        encoded: Any = self._call_tokenizer(texts)["input_ids"]
        return [
            np.array(ids[1:] if follows else ids, dtype=np.int32)
            for ids, (_, follows) in zip(encoded, pieces, strict=True)
        ]

    def _call_tokenizer(self, text: str | list[str]) -> Any:
        """Return the encoding without special tokens. Raises ConfigError if the tokenizer fails on
        the text.
        """
        try:
            return self.tokenizer(text, add_special_tokens=False)
        except Exception as error:
            if type(error) is not Exception:  # only the Rust tokenizers raise the base class itself
                raise
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} cannot encode this row: {error}"
            ) from error

    def _behind_eos(self, text: str) -> str:
        return str(self.tokenizer.eos_token) + text

    def _token_ids(self, text: str, *, follows: bool = False) -> np.ndarray:
        """int32 [L]. `follows`: the text stands behind other text, so no tokenizer may put a space
        or a token in front.
        """
        return self._tokenize([(text, follows)])[0]

    def _encode_marked(self, messages: list[Message], tools: Sequence[Tool] | None) -> EncodedRow:
        text, spans = self.template.render_marked(messages, tools)
        self._check(messages, tools, text, trains=True)
        encoding = self._call_tokenizer(text)
        ids = np.array(encoding["input_ids"], dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in spans:
            first = next(
                (
                    token
                    for at in range(start, end)
                    if (token := encoding.char_to_token(0, at)) is not None
                ),
                0,
            )
            last = (
                token
                for at in range(end - 1, start - 1, -1)
                if (token := encoding.char_to_token(0, at)) is not None
            )
            mask[first : next(last, first - 1) + 1] = 1
        trained = np.flatnonzero(mask)
        if len(trained) == 0:
            raise ConfigError(
                "the chat template's {% generation %} blocks mark no token of this conversation"
            )
        end = trained[-1] + 1
        return EncodedRow(ids[:end], mask[:end])

    def _render_with_spans(
        self, messages: list[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, list[Span]]:
        """The text, and the assistant's parts of it; it ends where the last of them does unless all
        is trained.
        """
        full = self.template.render(messages, tools)
        frame = self._check(messages, tools, full, trains=True)
        spans = None if frame is None else frame.spans(messages, tools, full)
        if spans is None:
            spans = exact_spans(self.template, messages, tools, full)
        if self.train_on == "all" and messages[-1]["role"] != "assistant":
            return full, spans
        start, end = spans[-1]
        text = full[:end]
        if not text.endswith(self.template.special_texts):
            text += str(self.tokenizer.eos_token)
        return text, [*spans[:-1], (start, len(text))]

    def _check(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, text: str, *, trains: bool
    ) -> Frame | None:
        """The frame of conversations such as this. Raises ConfigError if `text` lacks something of
        it.
        """
        check_rendered(messages, tools, text, trains=trains)
        facts = self._structures.facts(messages, tools)
        if facts.dropped is not None:
            roles = [message["role"] for message in messages]
            raise ConfigError(
                f"the chat template drops {facts.dropped} in a conversation of {roles}; give a"
                f" policy.chat_template that"
                " renders it, or remove it from the row"
            )
        return facts.frame

    def _plain(
        self, messages: list[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, list[Span]]:
        if tools or any(message.get("tool_calls") for message in messages):
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template, so tools and"
                f" tool calls cannot be"
                " rendered; give one as policy.chat_template"
            )
        text, spans = self._bos_text, []
        for message in messages:
            if message["role"] == "assistant":
                start = len(text)
                text += (message.get("content") or "") + str(self.tokenizer.eos_token)
                spans.append((start, len(text)))
            else:
                text += (message.get("content") or "") + "\n"
        check_rendered(messages, tools, text, trains=True)
        return text, spans


def _token_id(value: object) -> int:
    assert isinstance(value, int), f"a token id is an int, not {value!r}"
    return value


def _bos_text(tokenizer: PreTrainedTokenizerBase) -> str:
    begins = tokenizer("")["input_ids"]
    return (
        str(tokenizer.bos_token)
        if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in begins
        else ""
    )  # type: ignore[operator]
