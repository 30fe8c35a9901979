"""Requests and answers in the forms of OpenAI's API, with the types of the `openai` package."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import TypeAdapter, ValidationError

from nemo_like.agents import responses
from nemo_like.agents.calls import Call, CallOptions, Request
from nemo_like.agents.codec import request_messages, with_text_arguments
from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.data.messages import row_tools

Dialect = Literal["chat", "completions", "responses"]

_MAX_ANSWERS = 128
_PARAMETERS: dict[Dialect, Any] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
}
_APPLIED = {
    "model", "stream", "stream_options", "temperature", "top_p", "messages", "tools", "n", "stop",
    "max_tokens", "max_completion_tokens", "max_output_tokens", "prompt", "input", "instructions",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "reasoning_effort",
    "verbosity", "reasoning", "truncation",
}  # fmt: skip
_CONSTRAINING = frozenset({"tool_choice", "response_format", "text"})
"""Constrained decoding would change the distribution that is sampled from and trained."""
_NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": [0], "presence_penalty": [0], "logit_bias": [{}],
    "logprobs": [False], "top_logprobs": [0], "best_of": [1], "echo": [False], "suffix": [""],
    "modalities": [["text"]], "include": [[]], "background": [False],
    "tool_choice": ["auto", "none"], "response_format": [{"type": "text"}],
    "text": [{}, {"format": {"type": "text"}}],
}  # fmt: skip
"""Values that change nothing."""


class ApiError(Exception):
    """A request is refused; `status` and `code` are as in OpenAI's API."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error in the form of the API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """What requests may change of the sampling."""

    sampling: Literal["run", "request", "refuse"] = "run"
    """Whose `temperature` and `top_p` are applied. With `request` a call with others than those of
    the run is not trained, because its tokens are drawn from another distribution."""
    constrained: Literal["ignore", "refuse"] = "ignore"
    """What happens to a tool choice or a JSON schema, which are not enforced."""
    ignored_fields: frozenset[str] = frozenset()
    """Further fields that are accepted without effect; others are refused."""
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A parsed request."""

    dialect: Dialect
    content: Request | np.ndarray
    """Messages and tools, a text, or token ids int32 [L]."""
    options: CallOptions
    num_answers: int
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    not_applied: Sequence[str]
    """Fields that were accepted although they would change the sampling."""


def parse_request(dialect: Dialect, body: bytes, rules: RequestRules) -> ApiRequest:
    """Parse the body of a request. Raises ApiError."""
    try:
        values = json.loads(body)
        if not isinstance(values, dict):
            raise ConfigError("the body is not a JSON object")
        values = {name: value for name, value in values.items() if value is not None}
        not_applied = _check_fields(values, rules)
        # The types of messages and tools are stricter than servers are.
        plain = {name: value for name, value in values.items() if name not in ("input", "tools")}
        _validator(dialect).validate_python(plain, strict=True)
        content = _content(dialect, values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ApiError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    given = {name: values[name] for name in ("temperature", "top_p") if name in values}
    given = {name: value for name, value in given.items() if value != getattr(rules, name)}
    if given and rules.sampling == "refuse":
        raise ApiError(400, f"{' and '.join(given)} must be those of the run, or not given")
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    max_tokens = next((values[name] for name in limits if name in values), None)
    num_answers = values.get("n", 1)
    if not 1 <= num_answers <= _MAX_ANSWERS or (max_tokens is not None and max_tokens < 1):
        raise ApiError(400, f"n must be 1 to {_MAX_ANSWERS}, and max_tokens at least 1")
    temperature, top_p = given.get("temperature", 0), given.get("top_p", 1)
    if not (0 <= temperature < math.inf and 0 < top_p <= 1):
        raise ApiError(400, "temperature must be at least 0, and top_p above 0 and at most 1")
    stop = values.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ApiError(400, "stop must be texts that are not empty")
    is_run = rules.sampling == "run"
    return ApiRequest(
        dialect=dialect,
        content=content,
        options=CallOptions(max_tokens=max_tokens, stop=stop, **({} if is_run else given)),
        num_answers=num_answers,
        is_streamed=bool(values.get("stream", False)),
        has_usage=bool(values.get("stream_options", {}).get("include_usage")),
        not_applied=[*not_applied, *(given if is_run else ())],
    )


def _check_fields(values: Mapping[str, Any], rules: RequestRules) -> list[str]:
    """Return the fields that are ignored although they have an effect. Raises ConfigError."""
    ignored = rules.ignored_fields | (_CONSTRAINING if rules.constrained == "ignore" else set())
    not_applied = []
    for name, value in values.items():
        if name in _APPLIED | _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        if name not in ignored:
            raise ConfigError(f"{shown_value(name)} is not supported here; remove it")
        not_applied.append(name)
    return not_applied


@cache
def _validator(dialect: Dialect) -> TypeAdapter[Any]:
    return TypeAdapter(_PARAMETERS[dialect])


def _content(dialect: Dialect, values: Mapping[str, Any]) -> Request | np.ndarray:
    """Return messages and tools, or the prompt. Raises ConfigError."""
    if dialect == "chat":
        return request_messages(list(values["messages"])), row_tools(values)
    if dialect == "responses":
        return responses.messages_and_tools(values)
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    ids = prompt if isinstance(prompt, list) else []
    if ids and all(isinstance(each, int) and 0 <= each < 2**31 for each in ids):
        return np.array(ids, dtype=np.int32)
    raise ConfigError("prompt is not one text or one list of token ids")


def answer_body(
    request: ApiRequest, calls: Sequence[Call], answer_id: str, model: str, created: int
) -> dict[str, Any]:
    """Return the body that answers a request with the replies of its calls."""
    num_prompt = len(calls[0].prompt_ids)
    num_sampled = sum(len(call.sampled.token_ids) for call in calls if call.sampled is not None)
    body: dict[str, Any] = {"id": answer_id, "created": created, "model": model, "choices": []}
    if request.dialect == "responses":
        return responses.answer_body(calls[0], body, num_prompt, num_sampled)
    for index, call in enumerate(calls):
        assert call.sampled is not None
        choice = {"index": index, "finish_reason": call.sampled.finish_reason, "logprobs": None}
        message = with_text_arguments(call.reply)
        if request.dialect == "completions":
            choice["text"] = message["content"]
        else:
            choice["message"] = message
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
            message["content"] = message["content"] or None
        body["choices"].append(choice)
    body["usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    is_chat = request.dialect == "chat"
    body["object"] = "chat.completion" if is_chat else "text_completion"
    checked = (ChatCompletion if is_chat else Completion).model_validate(body)
    return checked.model_dump(mode="json", exclude_unset=True)


def stream_chunks(request: ApiRequest, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which together are the answer `body`."""
    if request.dialect == "responses":
        return responses.stream_events(body)
    head = {name: body[name] for name in ("id", "created", "model", "object")}
    chunks = []
    if request.dialect == "chat":
        head["object"] = "chat.completion.chunk"
    for choice in body["choices"]:
        part = dict(choice)
        if request.dialect == "chat":
            part["delta"] = delta = dict(part.pop("message"))
            calls = enumerate(delta.pop("tool_calls", ()))
            if indexed := [{"index": index, **call} for index, call in calls]:
                delta["tool_calls"] = indexed
        chunks.append({**head, "choices": [part]})
    if request.has_usage:
        chunks.append({**head, "choices": [], "usage": body["usage"]})
    return chunks
