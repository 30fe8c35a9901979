"""Limits on chat and prompt templates: content, rendering time and memory."""

from __future__ import annotations

import json
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import shown_value

CPU_LIMIT_S = 2
"""CPU time to render one conversation."""
MEMORY_LIMIT_BYTES = 1 << 30
MAX_TEMPLATE_CHARACTERS = 256 * 1024
_WALL_LIMIT_S = 60
_MAX_RENDERED_CHARACTERS = 1 << 20

# Runs in the child process: the environment in which transformers renders chat templates, without
# its dependencies.
_RENDER = f"""
import json, resource, sys
import jinja2, jinja2.ext, jinja2.sandbox

class Generation(jinja2.ext.Extension):
    tags = {{"generation"}}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def refuse(message):
    raise jinja2.TemplateError(message)

template, probes = json.load(sys.stdin)
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
environment.filters["tojson"] = lambda value, **options: json.dumps(value)
environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)

def lower(kind, limit):
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(kind, (limit, limit))

used = resource.getrusage(resource.RUSAGE_SELF)
lower(resource.RLIMIT_AS, {MEMORY_LIMIT_BYTES})
lower(resource.RLIMIT_CORE, 0)
lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + {CPU_LIMIT_S})
for variables in probes:
    size = 0
    try:
        for part in environment.from_string(template).generate(**variables):
            size += len(part)
            if size > {_MAX_RENDERED_CHARACTERS}:
                print("size")
                sys.exit()
    except (MemoryError, RecursionError, OverflowError):
        print("memory")
    except Exception:
        # Reported where the template is used, with the messages that it refuses.
        pass
print("done")
"""

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}},
            "required": ["a"],
        },
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2=?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3=?"},
]
_TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2=?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"},
    {"role": "assistant", "content": "4"},
]
_VARIABLES: dict[str, Any] = {
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
_PROBES = [
    {**_VARIABLES, "messages": _TURNS},
    {**_VARIABLES, "messages": _TOOL_TURNS[:2], "tools": [_TOOL]},
    {**_VARIABLES, "messages": _TOOL_TURNS, "tools": [_TOOL], "add_generation_prompt": False},
]


def check_prompt_template(template: str | None) -> None:
    """Raise ConfigError unless `template` is None or a format string with only `{prompt}` fields.

    Format specifications and conversions are refused: `{prompt:>9999999999}` would fill the memory.
    """
    if template is None:
        return
    name = f"data.prompt_template {shown_value(template)}"
    try:
        fields = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ConfigError(
            f"{name} is not a format string: {error}; braces that are not {{prompt}} are written"
            f" twice: {{{{ and }}}}"
        ) from error
    for field, specification, conversion in fields:
        if field != "prompt" or specification or conversion:
            written = shown_value(
                (field or "")
                + (f"!{conversion}" if conversion else "")
                + (f":{specification}" if specification else "")
            )
            raise ConfigError(
                f"{name} has the field {written}; the only field is {{prompt}},"
                " braces that are not {prompt} are written twice: {{ and }}"
            )
    if not fields:
        raise ConfigError(f"{name} has no {{prompt}}, so the question would be lost")


@lru_cache(maxsize=64)
def check_chat_template(template: str, source: str) -> None:
    """Raise ConfigError if rendering three short conversations exceeds the limits.

    The conversations are one without tools, one with a tool, and one with a tool call. The template
    runs in a child process with resource limits, so that neither nested loops nor `'x' * 10**10`
    harm this one. Templates that refuse a conversation pass. `source` names the tokenizer in the
    message.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(
            f"the chat template of {source} has {len(template):,} characters; at most"
            f" {MAX_TEMPLATE_CHARACTERS:,} are read"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RENDER],
            input=json.dumps([template, _PROBES]),
            capture_output=True,
            text=True,
            timeout=_WALL_LIMIT_S,
            check=False,
        )
        outcome = done.stdout
        if not outcome and done.returncode > 0:
            raise RuntimeError(
                f"the process that checks chat templates failed: {done.stderr.strip()[-500:]}"
            )
    except subprocess.TimeoutExpired:
        outcome = ""
    if outcome.strip() != "done":
        raise ConfigError(
            f"the chat template of {source} does not render short conversations within"
            f" {CPU_LIMIT_S} s of CPU time,"
            f" {MEMORY_LIMIT_BYTES >> 20} MiB and {_MAX_RENDERED_CHARACTERS:,} characters; set"
            f" policy.chat_template"
        )


class RenderingLimitError(RuntimeError):
    """Rendering one conversation took longer than `CPU_LIMIT_S`.

    It is not a ConfigError because callers try other renderings after a ConfigError, each up to the
    limit.
    """


@contextmanager
def rendering_limit(source: str) -> Iterator[None]:
    """Raise RenderingLimitError once the block has used `CPU_LIMIT_S` of this thread's CPU time.

    The probes of `check_chat_template` do not cover a template that is slow only for particular
    contents. The bound uses a signal, so it applies to the main thread of a process and not to
    other threads. `source` names the tokenizer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def check(number: int, frame: FrameType | None) -> None:
        # The timer counts the user time of all threads; the limit is that of this thread.
        if time.thread_time() - started >= CPU_LIMIT_S:
            raise RenderingLimitError(
                f"the chat template of {source} does not render this conversation within"
                f" {CPU_LIMIT_S} s of CPU time;"
                " correct the row, or set policy.chat_template"
            )

    previous = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S, CPU_LIMIT_S / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
