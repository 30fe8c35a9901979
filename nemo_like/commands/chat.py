"""`nemo-like chat`: a conversation in the terminal, or one reply per line of a pipe."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from nemo_like.commands.answers import AnswerSettings, answer_config
from nemo_like.config.errors import ConfigError, printable
from nemo_like.console import say, say_error
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.formats import is_unicode
from nemo_like.data.jagged import Jagged
from nemo_like.data.messages import Message
from nemo_like.distributed.local_group import local_context
from nemo_like.generation.requests import (
    GenerationRequests,
    GenerationWorkerProtocol,
    SamplingParams,
)
from nemo_like.rollout.rows import row_seeds
from nemo_like.training.rollout_workers import GeneratorStart

_INCOMPLETE = "\ufffd"
"""The tokenizer decodes the first bytes of a character as this."""


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends or /exit. Raises ConfigError, also without a chat template."""
    if sys.stdin is None:
        raise ConfigError("the standard input is closed; use a terminal, or a pipe with messages")
    config = answer_config(arguments)
    encoder = config.open_encoder()
    if not encoder.template.exists:
        raise ConfigError(
            f"the tokenizer of {config.policy.model_name} has no chat template, so turns of a"
            " conversation cannot be told apart; set policy.chat_template=FILE, or use nemo-like"
            " generate"
        )
    worker_class, kwargs = GeneratorStart(
        policy=config.policy, seed=config.seed, end_token_ids=encoder.end_token_ids
    ).worker()
    device = "cuda:0" if config.cluster.gpus_per_node else "cpu"
    worker = worker_class(local_context(device=device), **kwargs)
    if sys.stdin.isatty():
        sampling = config.policy.generation
        values = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"
        say(f"{config.policy.model_name}: {values}; /reset, /exit; Ctrl-C stops a reply")
    messages: list[Message] = []
    is_complete = True
    try:
        for number, line in enumerate(map(str.strip, iter(_read_line, ""))):
            if line == "/exit":
                break
            if line in ("", "/reset"):
                messages = [] if line else messages
                continue
            turns = [*messages, {"role": "user", "content": line}]
            is_cut = False
            try:
                worker.submit(_request(encoder, config, turns, number))
                reply, is_cut = _print_reply(worker, encoder)
                messages = [*turns, {"role": "assistant", "content": reply}]
            except ConfigError as error:
                # On stderr: a pipe has the replies only, and an empty line for this one.
                is_complete = False
                say_error(f"[{error}]")
            print(flush=True)
            if is_cut:
                policy = config.policy
                say_error(
                    "[the reply was cut; policy.generation.max_new_tokens is"
                    f" {policy.generation.max_new_tokens:,}, policy.max_total_sequence_length"
                    f" {policy.max_total_sequence_length:,}]"
                )
    finally:
        if hasattr(worker, "close"):
            worker.close()
    # Whoever reads a pipe must notice that a reply is missing.
    return 0 if is_complete else 1


def _read_line() -> str:
    """Return the next line of the standard input; "" at its end."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def _request(
    encoder: ChatEncoder, config: AnswerSettings, messages: list[Message], number: int
) -> GenerationRequests:
    """Return the request for a reply. Raises ConfigError if there is no room for one.

    Likewise for a text that is not UTF-8, of which Python keeps the bytes as surrogates.
    """
    if not is_unicode(messages[-1]["content"]):
        raise ConfigError("the message is not UTF-8 text")
    token_ids = encoder.encode_prompt(messages)
    limit = config.policy.max_total_sequence_length
    if len(token_ids) >= limit:
        raise ConfigError(
            f"the conversation has {len(token_ids):,} tokens with this message, and"
            f" policy.max_total_sequence_length is {limit:,}; /reset starts a new one"
        )
    prompts = Jagged.from_rows([token_ids], np.int32)
    seeds = row_seeds(config.seed, number, 1)
    sampling = SamplingParams.from_config(config.policy.generation)
    return GenerationRequests(np.zeros(1, np.int64), prompts, seeds, sampling, limit)


def _print_reply(worker: GenerationWorkerProtocol, encoder: ChatEncoder) -> tuple[str, bool]:
    """Print the reply while it is sampled; return it, and whether a limit of tokens ended it.

    Ctrl-C ends it as well.
    """
    shown = ""
    is_done = is_cut = False
    try:
        while not is_done:
            progress = worker.poll(0.0)
            is_done = progress.num_unfinished == 0
            is_cut = progress.completions.finish_reasons == ["length"]
            tokens = progress.completions.token_ids if is_done else worker.partial_tokens().values()
            token_ids = list(next(iter(tokens), []))
            text = str(encoder.tokenizer.decode(token_ids, skip_special_tokens=True))
            if is_done or (text.startswith(shown) and not text.endswith(_INCOMPLETE)):
                # Escaped: a model must not control the terminal.
                piece = printable(text[len(shown) :], sys.stdout.encoding or "utf-8")
                print(piece, end="", flush=True)
                shown = text
    except KeyboardInterrupt:
        worker.abort()
    return shown, is_cut
