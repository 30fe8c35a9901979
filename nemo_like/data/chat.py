"""Conversations to token ids, and which of them carry loss. The words come from the tokenizer's chat template.

Loss is on what the model itself would write: an assistant turn's text and the token that ends the turn. Which part of
the rendered text that is, is found for any template: `{% generation %}` blocks are believed where there are some;
otherwise the conversation is rendered up to each assistant turn with the generation prompt, and there the turn begins.

A tokenizer without a chat template gets the plain rule: each turn's text, then a line break after turns of others and
the end-of-sequence token after the assistant's; the beginning-of-sequence token first if the tokenizer puts one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from jinja2 import TemplateError

from nemo_like.config.errors import ConfigError
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Message
from nemo_like.data.template_limits import check_chat_template, check_prompt_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""


class ChatEncoder:
    """Encodes conversations (`encode_sft`) and what comes before an answer (`encode_prompt`).

    Example with ChatML: user "2+2=?", assistant "4" is `<|im_start|>user\\n2+2=?<|im_end|>\\n<|im_start|>assistant\\n`,
    which is the prompt, and `4<|im_end|>`, which carries the loss.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        train_on: Literal["assistant", "all"] = "assistant",
    ) -> None:
        """`system_prompt` opens conversations that have no system turn; `prompt_template` goes around every user turn.

        Raises ConfigError for a tokenizer without an end-of-sequence token and for a template that is not a format string
        with `{prompt}`.
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
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        self._special_texts = tuple({*tokenizer.all_special_tokens, *added})
        self._marks_generation = bool(tokenizer.chat_template and _GENERATION_BLOCK.search(str(tokenizer.chat_template)))
        self._bos_text = _bos_text(tokenizer)
        check_prompt_template(prompt_template)
        if isinstance(tokenizer.chat_template, str):
            check_chat_template(tokenizer.chat_template, repr(tokenizer.name_or_path))

    @property
    def eos_token_id(self) -> int:
        return _token_id(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's; where it has none the eos token, as padding is never attended to nor trained."""
        return self.eos_token_id if self.tokenizer.pad_token_id is None else _token_id(self.tokenizer.pad_token_id)

    def encode_sft(self, messages: Sequence[Message]) -> EncodedRow:
        """Token ids up to the end of the last assistant turn (`train_on="all"`: of the conversation), and their mask.

        Raises ConfigError if there is no assistant turn to be found, or the template refuses the messages.
        """
        messages = self._prepare(messages)
        if self._marks_generation and self.train_on == "assistant":
            return self._encode_marked(messages)
        if not any(message["role"] == "assistant" for message in messages):
            raise ConfigError("there is no assistant turn to learn from")
        text, spans = self._render_with_spans(messages) if self.tokenizer.chat_template else self._plain(messages)
        if self.train_on == "all":
            ids = self._token_ids(text)
            return EncodedRow(ids, np.ones(len(ids), dtype=np.uint8))
        return self._encode_spans(text, spans)

    def encode_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [L]: the conversation and the opening of the assistant's turn."""
        messages = self._prepare(messages)
        text = self._render(messages, opening=True) if self.tokenizer.chat_template else self._plain(messages)[0]
        return self._token_ids(text)

    def segments(self, row: EncodedRow) -> tuple[tuple[str, bool], ...]:
        """The row decoded, cut where the mask changes: (text, whether it is trained)."""
        edges = np.flatnonzero(np.diff(row.token_mask)) + 1
        parts = zip(np.split(row.input_ids, edges), np.split(row.token_mask, edges), strict=True)
        return tuple((str(self.tokenizer.decode(ids.tolist())), bool(mask.any())) for ids, mask in parts)

    def marked_text(self, row: EncodedRow) -> str:
        """The row decoded, with the trained parts between ⟦ and ⟧."""
        return "".join(f"⟦{text}⟧" if is_trained else text for text, is_trained in self.segments(row))

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        prepared = list(messages)
        if self._system_prompt is not None and not any(message["role"] == "system" for message in messages):
            prepared.insert(0, {"role": "system", "content": self._system_prompt})
        template = self._prompt_template
        if template is None:
            return prepared
        return [
            {**message, "content": template.format(prompt=message["content"])} if message["role"] == "user" else message
            for message in prepared
        ]

    def _encode_spans(self, text: str, spans: list[Span]) -> EncodedRow:
        """Tokens of `text` up to the last span's end, cut where each span begins.

        The cut makes what stands before an answer the very tokens that `encode_prompt` gives for it, also where the
        tokenizer would merge the prompt's last characters with the answer's first.
        """
        ids = [self._token_ids(text[: spans[0][0]])]
        for (start, end), following in zip(spans, [*(start for start, _ in spans[1:]), spans[-1][1]], strict=True):
            ids += self._turn_ids(text[start:end], text[end:following], follows=start > 0)
        trained = np.arange(len(ids)) % 2
        return EncodedRow(np.concatenate(ids), np.repeat(trained.astype(np.uint8), [len(part) for part in ids]))

    def _turn_ids(self, turn: str, following: str, *, follows: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of an assistant turn, and of what stands between it and the next; in one where that is the same."""
        own = self._token_ids(turn, follows=follows)
        both = self._token_ids(turn + following, follows=follows) if following else own
        if np.array_equal(both[: len(own)], own):
            return own, both[len(own) :]
        return own, self._token_ids(following, follows=True)

    def _token_ids(self, text: str, *, follows: bool = False) -> np.ndarray:
        """int32 [L]. `follows`: the text stands behind other text, so no tokenizer may put a space or a token in front."""
        if not follows:
            return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        return self._token_ids(str(self.tokenizer.eos_token) + text)[1:]

    def _render(self, messages: Sequence[Message], *, opening: bool = False) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opening))
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses turns of {roles}: {error}"
            ) from error

    def _encode_marked(self, messages: list[Message]) -> EncodedRow:
        encoded = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(encoded["assistant_masks"], dtype=np.uint8)  # type: ignore[index]
        trained = np.flatnonzero(mask)
        if len(trained) == 0:
            raise ConfigError("the chat template's {% generation %} blocks mark no token of this conversation")
        end = trained[-1] + 1
        return EncodedRow(np.array(encoded["input_ids"], dtype=np.int32)[:end], mask[:end])  # type: ignore[index]

    def _render_with_spans(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """The text, and the assistant's parts of it; it ends where the last of them does unless all is trained."""
        full = self._render(messages)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._span(messages, turn, full) for turn in turns]
        if self.train_on == "all" and turns[-1] < len(messages) - 1:
            return full, spans
        start, end = spans[-1]
        text = full[:end]
        if not text.endswith(self._special_texts):
            text += str(self.tokenizer.eos_token)
        return text, [*spans[:-1], (start, len(text))]

    def _span(self, messages: list[Message], turn: int, full: str) -> Span:
        if turn:
            start = _common_prefix(self._render(messages[:turn], opening=True), full)
        else:
            start = _common_prefix(self._with_other_text(messages, turn), full)
        end = self._turn_end(messages, turn, full)
        if not start < end:
            raise ConfigError(
                f"turn {turn} of the conversation cannot be found in what the chat template renders; mark it in the "
                "template with {% generation %}, or set data.train_on=all"
            )
        # A line break behind the token that ends the turn belongs to the template, not to what the model writes.
        trimmed = full[start:end].rstrip()
        return (start, start + len(trimmed)) if trimmed.endswith(self._special_texts) else (start, end)

    def _turn_end(self, messages: list[Message], turn: int, full: str) -> int:
        up_to_turn = self._render(messages[: turn + 1])
        if full.startswith(up_to_turn):
            return len(up_to_turn)
        # Some templates write a turn otherwise once it is no longer the last (they drop its reasoning). What follows
        # the turn's text is then looked up where it is the last, and found again behind the text here.
        text_end = len(up_to_turn) - _common_suffix(self._with_other_text(messages[: turn + 1], turn), up_to_turn)
        behind = up_to_turn[text_end:]
        text_end = len(full) - _common_suffix(self._with_other_text(messages, turn), full)
        return text_end + _common_prefix(full[text_end:], behind)

    def _with_other_text(self, messages: list[Message], turn: int) -> str:
        """The conversation rendered with another text for `turn`: its first and last characters differ."""
        text = str(messages[turn].get("content", "")).strip()
        first, last = ("1" if text[at : at + 1 or None] == "0" else "0" for at in (0, -1))
        return self._render([*messages[:turn], {**messages[turn], "content": first + last}, *messages[turn + 1 :]])

    def _plain(self, messages: list[Message]) -> tuple[str, list[Span]]:
        text, spans = self._bos_text, []
        for message in messages:
            if message["role"] == "assistant":
                start = len(text)
                text += (message.get("content") or "") + str(self.tokenizer.eos_token)
                spans.append((start, len(text)))
            else:
                text += (message.get("content") or "") + "\n"
        return text, spans


def _common_prefix(left: str, right: str) -> int:
    """Number of characters in which both begin alike."""
    if right.startswith(left):
        return len(left)
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _common_suffix(left: str, right: str) -> int:
    return _common_prefix(left[::-1], right[::-1])


def _token_id(value: object) -> int:
    assert isinstance(value, int), f"a token id is an int, not {value!r}"
    return value


def _bos_text(tokenizer: PreTrainedTokenizerBase) -> str:
    begins = tokenizer("")["input_ids"]
    return str(tokenizer.bos_token) if tokenizer.bos_token_id is not None and tokenizer.bos_token_id in begins else ""  # type: ignore[operator]
