"""`nemo-like chat`: a conversation in the terminal, or one reply per line of a pipe."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from nemo_like.commands.answer_config import AnswerRunConfig, answer_config
from nemo_like.config.errors import ConfigError
from nemo_like.config.text import printable
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import surrogate_problem
from nemo_like.data.jagged import Jagged
from nemo_like.data.messages import Message
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.requests import (
    GenerationRequests,
    GenerationWorkerProtocol,
    SamplingParams,
)
from nemo_like.rollout.rows import row_seeds
from nemo_like.run.files import AppendedFile
from nemo_like.training.model_files import open_encoder, open_model_spec
from nemo_like.training.rollout_workers import generation_worker

_HELP = "/reset, /system TEXT, /save FILE, /exit; Ctrl-C stops a reply"
_MAX_LENGTH = 16_384
"""Max tokens of a conversation unless `--max-length` is given; vLLM reserves memory for it."""
_INCOMPLETE = "\ufffd"
"""The tokenizer decodes the first bytes of a character as this."""


class Conversation:
    """The messages of one conversation with a generation worker, and the sampling of replies."""

    def __init__(
        self, worker: GenerationWorkerProtocol, encoder: ChatEncoder, config: AnswerRunConfig
    ) -> None:
        self._worker = worker
        self._encoder = encoder
        self._config = config
        self._num_replies = 0
        self.messages: list[Message] = []
        self.system_prompt = config.data.system_prompt

    def reset(self) -> None:
        """Forget all messages."""
        self.messages = []

    def reply(
        self, text: str, show: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> str | None:
        """Add a user message and sample the reply; `show` gets its text piece by piece.

        Returns a remark on the end of the reply, if it was stopped or cut. Raises ConfigError if
        the conversation leaves no room for a reply; the message is not added then.
        Likewise for a text that is not UTF-8, of which Python keeps the bytes as surrogates.
        """
        if surrogate_problem(text, "message") is not None:
            raise ConfigError("the message is not UTF-8 text")
        messages = [*self.messages, {"role": "user", "content": text}]
        token_ids = self._encode(messages)
        limit = self._config.policy.max_total_sequence_length
        if len(token_ids) >= limit:
            raise ConfigError(
                f"the conversation has {len(token_ids):,} tokens with this message, and the context"
                f" of the model is {limit:,}; /reset starts a new one"
            )
        sampling = SamplingParams.from_config(self._config.policy.generation)
        requests = GenerationRequests(
            np.array([self._num_replies], dtype=np.int64),
            Jagged.from_rows([token_ids], np.int32),
            row_seeds(self._config.seed, self._num_replies, 1),
            sampling,
            limit,
        )
        self._num_replies += 1
        self._worker.submit(requests)
        sampled, remark = self._decode(requests, show, is_stopped)
        self.messages = [*messages, {"role": "assistant", "content": sampled}]
        return remark

    def save(self, path: Path) -> None:
        """Append the conversation as a row of `messages`. Raises WriteError."""
        messages = list(self.messages)
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        file = AppendedFile(path)
        try:
            file.append_json({"messages": messages})
        finally:
            file.close()

    def _encode(self, messages: list[Message]) -> np.ndarray:
        """Return the prompt of the next reply, int32 [L]."""
        if self.system_prompt is not None:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self._encoder.encode_prompt(messages)

    def _decode(
        self,
        requests: GenerationRequests,
        show: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> tuple[str, str | None]:
        """Decode the reply; return its text and a remark on its end."""
        shown = ""
        while True:
            progress = self._worker.poll(0.0)
            if progress.num_unfinished == 0:
                token_ids = progress.completions.token_ids[0].tolist()
                text = self._text(token_ids)
                show(text[len(shown) :])
                return text, self._remark(requests, progress.completions.finish_reasons[0])
            for token_ids in self._worker.partial_tokens().values():
                text = self._text(token_ids)
                if not text.endswith(_INCOMPLETE) and text.startswith(shown):
                    show(text[len(shown) :])
                    shown = text
            if is_stopped():
                self._worker.abort()
                return shown, "stopped"

    def _remark(self, requests: GenerationRequests, finish_reason: str) -> str | None:
        """Return why a reply was cut; None if it was not."""
        if finish_reason == "stop":
            return None
        if requests.max_new_tokens()[0] < requests.sampling.max_new_tokens:
            return (
                f"the context of {requests.max_total_length:,} tokens is full; /reset starts a new"
                " conversation"
            )
        return f"cut at --max-new-tokens {requests.sampling.max_new_tokens}"

    def _text(self, token_ids: list[int]) -> str:
        return str(self._encoder.tokenizer.decode(token_ids, skip_special_tokens=True))


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends or /exit. Raises ConfigError, also without a chat template."""
    if sys.stdin is None:
        raise ConfigError("the standard input is closed; use a terminal, or a pipe with messages")
    config = answer_config(arguments, files={})
    if arguments.max_length is None and config.policy.max_total_sequence_length > _MAX_LENGTH:
        arguments.max_length = _MAX_LENGTH
        config = answer_config(arguments, files={})
    encoder = open_encoder(config, open_model_spec(config).vocab_size)
    if not encoder.template.exists:
        raise ConfigError(
            f"the tokenizer of {config.policy.model_name} has no chat template, so turns of a"
            " conversation cannot be told apart; give one with --chat-template FILE, or use"
            " nemo-like generate"
        )
    worker = _worker(config, encoder)
    conversation = Conversation(worker, encoder, config)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        print(printable(f"{config.policy.model_name}: {_HELP}"))
    is_complete = True
    try:
        for line in _lines(is_interactive=is_interactive):
            if not line.strip():
                continue
            if not line.startswith("/"):
                is_complete &= _answer(line, conversation)
            elif line.strip() == "/exit":
                break
            elif not _obey(line, conversation):
                is_complete = False
                if not is_interactive:
                    # As for a refused message: the pipe has one line for each.
                    print(flush=True)
    finally:
        if hasattr(worker, "close"):
            worker.close()
    # Whoever reads a pipe must notice that a reply is missing.
    return 0 if is_interactive or is_complete else 1


def _worker(config: AnswerRunConfig, encoder: ChatEncoder) -> Any:
    """Return a generation worker in this process."""
    worker_class, kwargs = generation_worker(config, encoder.end_token_ids)
    device = "cuda:0" if config.cluster.gpus_per_node else "cpu"
    return worker_class(local_context(device=device), **kwargs)


def _lines(*, is_interactive: bool) -> Iterator[str]:
    """Yield the lines of the standard input."""
    if not is_interactive:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n(/exit or Ctrl-D ends; {_HELP})")


def _obey(line: str, conversation: Conversation) -> bool:
    """Run a command; return False for an unknown one."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if name == "/reset":
        conversation.reset()
    elif name == "/system" and argument:
        conversation.system_prompt = argument
        conversation.reset()
    elif name == "/save" and argument and not conversation.messages:
        _remark("there is no reply to save yet")
        return False
    elif name == "/save" and argument:
        conversation.save(Path(argument).expanduser())
        _remark(f"saved to {argument}")
    else:
        _remark(f"unknown command; the commands are {_HELP}")
        return False
    return True


def _answer(line: str, conversation: Conversation) -> bool:
    """Print the reply to a message while it is sampled; an empty line and False without one."""
    encoding = sys.stdout.encoding or "utf-8"

    def show(text: str) -> None:
        # Escaped: a model must not control the terminal.
        sys.stdout.write(printable(text, encoding))
        sys.stdout.flush()

    with _stoppable() as is_stopped:
        try:
            remark = conversation.reply(line, show, is_stopped)
        except ConfigError as error:
            print()
            _remark(str(error))
            return False
    print(flush=True)
    if remark is not None:
        _remark(remark)
    return True


def _remark(text: str) -> None:
    """Print a remark of the program on stderr, so that a pipe has replies only."""
    sys.stdout.flush()
    print(printable(f"[{text}]", sys.stderr.encoding or "utf-8"), file=sys.stderr)


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C stop the block: yields a function that tells whether it was pressed.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    presses: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)
