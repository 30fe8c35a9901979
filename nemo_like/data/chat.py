"""Encoding of conversations to token ids and loss mask with the tokenizer's chat template.

Loss is on what the model generates: the text or tool calls of an assistant turn and the token that
ends the turn. The spans of these parts are found for any template: from its `{% generation %}`
blocks if it has them, otherwise between the generation prompt and the end of the turn. Both are
found in the text of one rendering if unambiguous, else by comparing several (`chat_structure`).

Without a chat template each turn's text is followed by a line break, or by the end-of-sequence
token after an assistant turn; the beginning-of-sequence token comes first if the tokenizer adds it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_structure import REASONING_KEYS, Frame, Span, Structures, exact_spans
from nemo_like.data.chat_template import PROBE, ChatTemplate, common_prefix
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import Message, Tool, check_roles, template_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_like.data.image_encoding import ImageEncoder
    from nemo_like.models.vision import VisionSpec

_CLOSED_THOUGHT = re.compile(r"\s*(</\w+>|\[/\w+\])\s*")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    r"""Encoder of conversations (`encode_sft`) and of prompts before an answer (`encode_prompt`).

    Example with ChatML: user "2+2=?", assistant "4" is
    `<|im_start|>user\n2+2=?<|im_end|>\n<|im_start|>assistant\n`, which is the prompt, and
    `4<|im_end|>`, which carries the loss.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        train_on: Literal["assistant", "all"] = "assistant",
        vocab_size: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Initialize with the prompts of the configuration.

        `system_prompt` is the first turn of conversations without a system turn; `prompt_template`
        is a format string applied to every user turn. `vocab_size` is the number of token
        ids of the model; None accepts all. `chat_template_kwargs` are further variables of the chat
        template, e.g. `{"enable_thinking": False}`.

        Raises ConfigError for a tokenizer without an end-of-sequence token, and for variables that
        the chat template does not use.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path!r} has no eos token, so no row could end; "
                "set eos_token in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.vocab_size = vocab_size
        self.images: ImageEncoder | None = None
        """Of a model that is trained with images."""
        self._system_prompt = system_prompt
        self._prompt_template = prompt_template
        self.template = ChatTemplate(tokenizer, chat_template_kwargs)
        self._structures = Structures(self.template)
        self._marked = {
            has_tools: bool(
                _GENERATION_BLOCK.search(self.template.source([] if has_tools else None))
            )
            for has_tools in (False, True)
        }
        """Whether the template of rows with tools has `{% generation %}` blocks."""
        self._bos_text = _bos_text(tokenizer)
        self._roles = template_roles(tokenizer.chat_template)

    @property
    def vision(self) -> VisionSpec | None:
        """The vision tower of a model that is trained with images."""
        return None if self.images is None else self.images.spec

    def without_prompts(self) -> ChatEncoder:
        """Return an encoder for complete messages, to which no prompt is added."""
        encoder = copy.copy(self)
        encoder._system_prompt = encoder._prompt_template = None
        return encoder

    def checked_ids(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return token ids as int32 [L]. Raises ConfigError for one that the model does not have.

        In the model it would be an IndexError, or a device assertion that ends the process.
        """
        ids = np.array(token_ids, dtype=np.int32)
        if self.vocab_size is not None and len(ids) and ids.max() >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer makes token {ids.max()}"
                f" ({self.tokenizer.convert_ids_to_tokens(int(ids.max()))!r}), but the model's"
                f" vocabulary ends at {self.vocab_size - 1}; tokenizer and model do not belong"
                " together (tokenizer_name, model_name), or the tokenizer has new tokens: then"
                " enlarge the model with resize_token_embeddings of transformers, and train all"
                " weights"
            )
        return ids

    @property
    def eos_token_id(self) -> int:
        """Id of the end-of-sequence token."""
        return _token_id(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token, by default eos: padding is not attended to or trained."""
        if self.tokenizer.pad_token_id is None:
            return self.eos_token_id
        return _token_id(self.tokenizer.pad_token_id)

    def encode_sft(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> EncodedRow:
        """Encode up to the end of the last assistant turn (`train_on="all"`: of the conversation).

        Raises ConfigError if there is no assistant turn, or the template does not know a role, or
        refuses or drops messages or tools.
        """
        messages = self._prepare(messages)
        if self._marked[tools is not None] and self.train_on == "assistant":
            return self._encode_marked(messages, tools)
        if not any(message["role"] == "assistant" for message in messages):
            raise ConfigError("there is no assistant turn to learn from")
        if self.template.exists:
            text, spans = self._render_with_spans(messages, tools)
        else:
            text, spans = self._plain(messages, tools)
        # Spans do not matter if everything is trained.
        if self.train_on == "all":
            ids = self._token_ids(text)
            return EncodedRow(ids, np.ones(len(ids), dtype=np.uint8))
        return self._encode_spans(text, spans)

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> np.ndarray:
        """Encode the conversation and the generation prompt, int32 [L].

        Raises ConfigError if the template refuses or drops messages or tools.
        """
        return self._encode_messages(messages, tools, opening=True)

    def encode_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> np.ndarray:
        """Encode all that the template writes for a conversation, in one piece, int32 [L].

        Raises ConfigError if the template refuses or drops messages or tools.
        """
        return self._encode_messages(messages, tools, opening=False)

    def _encode_messages(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, opening: bool
    ) -> np.ndarray:
        messages = self._prepare(messages)
        if not self.template.exists:
            return self._token_ids(self._plain(messages, tools)[0])
        text = self.template.render(messages, tools, opening=opening)
        self._check(messages, tools, trains=False)
        return self._token_ids(text)

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render the messages, without the configured prompts, and the generation prompt.

        Raises ConfigError if the template does not know a role or refuses the messages.
        """
        check_roles(messages, self._roles)
        if not self.template.exists:
            return self._plain(list(messages), None)[0]
        return self.template.render(messages, opening=True)

    def encode_continuation(self, text: str) -> np.ndarray:
        """Tokenize a text that follows other tokens of its row, int32 [L]."""
        return self._token_ids(text, follows=True)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a generation: eos and the template's end-of-turn tokens."""
        return tuple(sorted({self.eos_token_id, *self.template.end_token_ids}))

    def prompt_difference(
        self, messages: Sequence[Message] = PROBE, tools: Sequence[Tool] | None = None
    ) -> str | None:
        """Describe how a rollout's prompt differs from the text before the last turn in SFT.

        Returns None if they are equal. The chat template causes a difference: the generation prompt
        of DeepSeek-R1 ends with `<think>`, which a finished turn does not have. A model trained on
        such rows never sees the prompts of a rollout.
        """
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            row = self.encode_sft(messages, tools)
        except ConfigError:
            # Problems of the messages are reported where they are encoded.
            return None
        starts = np.flatnonzero(np.diff(row.token_mask, prepend=0) == 1)
        if not turns or turns[-1] == 0 or len(starts) != len(turns):
            return None
        ids = (self.encode_prompt(messages[: turns[-1]], tools), row.input_ids[: starts[-1]])
        prompt, before = (str(self.tokenizer.decode(each.tolist())) for each in ids)
        if prompt == before:
            return None
        # Show some context before the first difference.
        same = max(common_prefix(prompt, before) - 30, 0)
        shown = [repr(text[same:][-80:]) for text in (prompt, before)]
        return (
            f"the prompt of a rollout ends with {shown[0]}, but in SFT rows the trained text"
            f" follows {shown[1]}"
        )

    def sft_warnings(self) -> Iterator[str]:
        """Yield how SFT rows of the chat template differ from what a model generates with it."""
        try:
            row = self.encode_sft((*PROBE, *PROBE))
        except ConfigError:
            return
        parts = [text for text, is_trained in self.segments(row) if is_trained]
        if len(parts) == 2 and not parts[0].endswith(self.template.special_texts):
            yield (
                "the chat template ends only the last answer of a conversation with a token, so the"
                " end of earlier answers is not trained; mark the answers and their ends in a"
                " policy.chat_template with {% generation %}, or give one that ends every answer"
            )
        closed = _CLOSED_THOUGHT.match(parts[-1]) if parts else None
        if closed is not None:
            yield (
                f"the generation prompt opens a thought, and answers without reasoning are trained"
                f" to close it at once ({closed.group()!r}); for rows without reasoning set"
                " data.chat_template_kwargs={enable_thinking: false}, if the template has it"
            )

    def segments(self, row: EncodedRow) -> tuple[tuple[str, bool], ...]:
        """Decode the row in segments of equal mask: (text, is trained).

        The tokens of an image are shown as `[image 640x480 = 391 tokens]`.
        """
        edges = np.flatnonzero(np.diff(row.token_mask)) + 1
        shown = {image.start: image for image in row.images}
        if shown:
            edges = np.union1d(edges, [at for each in row.images for at in (each.start, each.end)])
        bounds = [0, *edges.tolist(), len(row.input_ids)]
        segments = []
        for start, stop in pairwise(bounds):
            text = str(self.tokenizer.decode(row.input_ids[start:stop].tolist()))
            if start in shown and self.images is not None:
                text = self.images.shown(shown[start])
            segments.append((text, bool(row.token_mask[start:stop].any())))
        return tuple(segments)

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Add the system prompt and apply the prompt template. Raises ConfigError for a role that
        the chat template does not know.
        """
        check_roles(messages, self._roles)
        return prepare_messages(
            messages, system_prompt=self._system_prompt, prompt_template=self._prompt_template
        )

    def _encode_spans(self, text: str, spans: list[Span]) -> EncodedRow:
        """Encode `text` up to the end of the last span, tokenized separately at the start of spans.

        The tokens before an answer are therefore exactly the tokens of `encode_prompt`, even if the
        tokenizer would merge the last characters of the prompt with the first of the answer.
        """
        first_start, _ = spans[0]
        _, last_end = spans[-1]
        # (text, whether it follows other text); the text between two spans belongs to neither.
        pieces: list[tuple[str, bool]] = [(text[:first_start], False)]
        next_starts = [*(start for start, _ in spans[1:]), last_end]
        for (start, end), next_start in zip(spans, next_starts, strict=True):
            pieces.append((text[start:end], start > 0))
            pieces.append((text[end:next_start], True))
        ids = self._tokenize(pieces)
        for index in range(1, len(pieces), 2):
            (turn, follows), (following, _) = pieces[index], pieces[index + 1]
            if following and not turn.endswith(self._separators):
                # The tokenizer may merge characters across the end of the turn, and does so in what
                # it samples from.
                both = self._token_ids(turn + following, follows=follows)
                if np.array_equal(both[: len(ids[index])], ids[index]):
                    ids[index + 1] = both[len(ids[index]) :]
        # Pieces alternate: not trained, trained, not trained, ...
        is_trained = (np.arange(len(ids)) % 2).astype(np.uint8)
        mask = np.repeat(is_trained, [len(part) for part in ids])
        return EncodedRow(np.concatenate(ids), mask)

    @cached_property
    def _separators(self) -> tuple[str, ...]:
        """Texts of added tokens after which the tokenizer starts anew, whatever follows."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        texts = [str(token) for token in tokens if not token.rstrip and not token.single_word]
        # A text that is part of another added token may be the beginning of that token.
        separators = []
        for text in texts:
            num_containing = sum(text in other for other in self.template.special_texts)
            if text and num_containing == 1:
                separators.append(text)
        return tuple(separators)

    def _tokenize(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Tokenize pieces (text, follows other text) in one call; see `_token_ids`.

        Returns int32 [L] per piece.
        """
        # The eos token in front becomes one token, which is removed again.
        eos = str(self.tokenizer.eos_token)
        texts = [eos + text if follows else text for text, follows in pieces]
        encoded: Any = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        tokenized = []
        for ids, (_, follows) in zip(encoded, pieces, strict=True):
            tokenized.append(self.checked_ids(ids[1:] if follows else ids))
        return tokenized

    def _token_ids(self, text: str, *, follows: bool = False) -> np.ndarray:
        """Tokenize a text, int32 [L].

        With `follows` the text comes after other text, so the tokenizer must not put a space or a
        token in front.
        """
        return self._tokenize([(text, follows)])[0]

    def _encode_marked(self, messages: list[Message], tools: Sequence[Tool] | None) -> EncodedRow:
        """Encode with the spans of the template's `{% generation %}` blocks."""
        text, spans = self.template.render_marked(messages, tools)
        self._check(messages, tools, trains=True)
        text, spans = self._with_ends(text, spans)
        encoding: Any = self.tokenizer(text, add_special_tokens=False)
        ids = self.checked_ids(encoding["input_ids"])
        mask = np.zeros(len(ids), dtype=np.uint8)
        for start, end in spans:
            first = _first_token(encoding, range(start, end))
            last = _first_token(encoding, range(end - 1, start - 1, -1))
            if first is not None and last is not None:
                mask[first : last + 1] = 1
        trained = np.flatnonzero(mask)
        if len(trained) == 0:
            raise ConfigError(
                "the chat template's {% generation %} blocks mark no token of this conversation"
            )
        end = trained[-1] + 1
        return EncodedRow(ids[:end], mask[:end])

    def _with_ends(self, text: str, spans: list[Span]) -> tuple[str, list[Span]]:
        """Extend marked spans by the end of the turn where it directly follows the block.

        A model does not learn to stop from answers without it. Without any end after the last
        answer it is the eos token, as in `_render_with_spans`.
        """
        ended = []
        for start, end in spans:
            behind = text[end:].lstrip()
            found = [each for each in self.template.ends if behind.startswith(each)]
            is_open = start < end and not text[start:end].endswith(self.template.ends)
            outer_end = len(text) - len(behind) + len(max(found, key=len, default=""))
            ended.append((start, outer_end if found and is_open else end))
        if ended and ended[-1][0] < ended[-1][1]:
            start, end = ended[-1]
            is_open = not text[start:end].endswith(self.template.special_texts)
            if is_open and not text[end:].strip():
                text = text[:end] + str(self.tokenizer.eos_token)
                ended[-1] = (start, len(text))
        return text, ended

    def _render_with_spans(
        self, messages: list[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, list[Span]]:
        """Render the conversation: (text, spans of the assistant turns).

        The text ends with the last span, unless everything is trained.
        """
        full = self.template.render(messages, tools)
        frame = self._check(messages, tools, trains=True)
        spans = None if frame is None else frame.spans(messages, tools, full)
        if spans is None:
            try:
                spans = exact_spans(self.template, messages, tools, full)
            except ConfigError:
                if self.train_on != "all":
                    raise
                spans = []
        if self.train_on == "all" and (not spans or messages[-1]["role"] != "assistant"):
            return full, spans
        start, end = spans[-1]
        text = full[:end]
        # A template that does not end turns with a token would not teach the model to stop.
        if not text.endswith(self.template.special_texts):
            text += str(self.tokenizer.eos_token)
        return text, [*spans[:-1], (start, len(text))]

    def _check(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, trains: bool
    ) -> Frame | None:
        """Return the frame of the structure. Raises ConfigError if the template drops a part."""
        facts = self._structures.facts(messages, tools)
        roles = [message["role"] for message in messages]
        dropped = facts.dropped or (facts.dropped_reasoning if trains else None)
        if dropped is not None:
            raise ConfigError(
                f"the chat template drops {dropped} in a conversation of {roles}; give a"
                " policy.chat_template that renders it, or remove it from the row"
            )
        is_marked = self._marked[tools is not None]
        needs_spans = trains and self.train_on == "assistant" and not is_marked
        if needs_spans and facts.misplaced is not None:
            raise ConfigError(
                f"the chat template writes {facts.misplaced} into another turn in a conversation of"
                f" {roles}, so the assistant's turns cannot be told apart; mark them in the"
                " template with {% generation %}, or set data.train_on=all"
            )
        return facts.frame

    def _plain(
        self, messages: list[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, list[Span]]:
        """Render without a chat template: (text, spans of the assistant turns)."""
        unrendered = ""
        if any(message.get(key) for message in messages for key in REASONING_KEYS):
            unrendered = " and ".join(REASONING_KEYS)
        if tools or any(message.get("tool_calls") for message in messages):
            unrendered = "tools and tool calls"
        if unrendered:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template, so"
                f" {unrendered} cannot be rendered; give one as policy.chat_template"
            )
        text = self._bos_text
        spans = []
        for message in messages:
            start = len(text)
            text += message.get("content") or ""
            if message["role"] == "assistant":
                text += str(self.tokenizer.eos_token)
                spans.append((start, len(text)))
            else:
                text += "\n"
        return text, spans


def prepare_messages(
    messages: Sequence[Message], *, system_prompt: str | None, prompt_template: str | None
) -> list[Message]:
    """Add the system prompt to messages without one; apply the template to every user turn."""
    prepared = list(messages)
    # A system prompt of the row takes precedence.
    has_own = any(message["role"] == "system" for message in messages)
    if system_prompt is not None and not has_own:
        prepared.insert(0, {"role": "system", "content": system_prompt})
    if prompt_template is None:
        return prepared
    for index, message in enumerate(prepared):
        if message["role"] == "user":
            content = prompt_template.format(prompt=message["content"])
            # A copy: the message belongs to the row.
            prepared[index] = {**message, "content": content}
    return prepared


def _first_token(encoding: Any, positions: range) -> int | None:
    """Return the token of the first character that has one, or None."""
    for position in positions:
        token = encoding.char_to_token(0, position)
        if token is not None:
            return token
    return None


def _token_id(value: object) -> int:
    """Return a token id after a check of its type, which the tokenizer's annotations leave open."""
    assert isinstance(value, int), f"a token id is an int, not {value!r}"
    return value


def _bos_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the bos token if the tokenizer adds it to an empty text, else an empty text."""
    added_ids: Any = tokenizer("")["input_ids"]
    if tokenizer.bos_token_id is None or tokenizer.bos_token_id not in added_ids:
        return ""
    return str(tokenizer.bos_token)
