"""Requests and answers in the forms of OpenAI's API, with the types of the `openai` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response, response_create_params
from pydantic import TypeAdapter, ValidationError

from nemo_like.agents.calls import Call, CallOptions, Request
from nemo_like.agents.codec import request_messages
from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.data.messages import Message, Tool, row_tools

Dialect = Literal["chat", "completions", "responses"]

_MAX_ANSWERS = 128
_PARAMETERS: dict[Dialect, Any] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
}
_APPLIED: dict[Dialect, set[str]] = {
    "chat": {"messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop"},
    "completions": {"prompt", "n", "max_tokens", "stop"},
    "responses": {"input", "instructions", "tools", "max_output_tokens"},
}
_ALWAYS_APPLIED = {"model", "stream", "stream_options", "temperature", "top_p"}
_CONTENT_FIELDS = {"input", "tools"}
"""Fields whose types are stricter than servers are; they are checked when they are converted."""
_CONSTRAINING = {"tool_choice", "response_format", "text"}
"""Constrained decoding would change the distribution that is sampled from and trained."""
_WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls",
    "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "reasoning_effort",
    "verbosity", "reasoning", "truncation",
}  # fmt: skip
_NEUTRAL: dict[str, Sequence[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
    "modalities": [["text"]],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "include": [[]],
    "background": [False],
    "tool_choice": ["auto", "none"],
    "response_format": [{"type": "text"}],
    "text": [{}, {"format": {"type": "text"}}],
}
"""Values that change nothing."""


class ApiError(Exception):
    """A request is refused; `status` and `code` are those of OpenAI's API."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error in the form of the API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """What requests may change of the sampling."""

    sampling: Literal["run", "request", "refuse"] = "run"
    """Whose `temperature` and `top_p` are applied. With `request` a call with others than those of
    the run is not trained, because its tokens are drawn from another distribution."""
    constrained: Literal["ignore", "refuse"] = "ignore"
    """Of a tool choice or a JSON schema, which are not enforced."""
    ignored_fields: frozenset[str] = frozenset()
    """Further fields that are accepted without effect; others are refused."""
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A parsed request."""

    dialect: Dialect
    request: Request
    prompt_ids: np.ndarray | None
    """int32 [L], of a prompt of token ids."""
    options: CallOptions
    num_answers: int
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    not_applied: tuple[str, ...]
    """Fields that were accepted although they would change the sampling."""


def parse_request(dialect: Dialect, body: bytes, rules: RequestRules) -> ApiRequest:
    """Parse the body of a request. Raises ApiError."""
    try:
        values = json.loads(body)
        if not isinstance(values, dict):
            raise ApiError(400, "the body is not a JSON object")
        values = {name: value for name, value in values.items() if value is not None}
        not_applied = _check_fields(dialect, values, rules)
        plain = {name: value for name, value in values.items() if name not in _CONTENT_FIELDS}
        _validator(dialect).validate_python(plain, strict=True)
        request, prompt_ids = _CONTENTS[dialect](values)
    except (ValidationError, ConfigError, RecursionError, ValueError) as error:
        raise ApiError(400, f"invalid request: {_problem(error)}") from None
    options = {name: values[name] for name in ("temperature", "top_p") if name in values}
    options = {name: value for name, value in options.items() if value != getattr(rules, name)}
    if options and rules.sampling == "refuse":
        raise ApiError(400, f"{' and '.join(options)} must be those of the run, or not given")
    if rules.sampling == "run":
        not_applied += tuple(options)
        options = {}
    stop = values.get("stop", ())
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    max_tokens = next((values[name] for name in limits if name in values), None)
    num_answers = values.get("n", 1)
    is_possible = 1 <= num_answers <= _MAX_ANSWERS
    if not is_possible or (max_tokens is not None and max_tokens < 1):
        raise ApiError(400, f"n must be 1 to {_MAX_ANSWERS}, and max_tokens at least 1")
    return ApiRequest(
        dialect=dialect,
        request=request,
        prompt_ids=prompt_ids,
        options=CallOptions(
            max_tokens=max_tokens, stop=(stop,) if isinstance(stop, str) else tuple(stop), **options
        ),
        num_answers=num_answers,
        is_streamed=bool(values.get("stream", False)),
        has_usage=bool(values.get("stream_options", {}).get("include_usage")),
        not_applied=not_applied,
    )


def _check_fields(
    dialect: Dialect, values: Mapping[str, Any], rules: RequestRules
) -> tuple[str, ...]:
    """Return the fields that are ignored although they have an effect. Raises ApiError."""
    not_applied = []
    for name, value in values.items():
        is_harmless = name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ())
        if name in _APPLIED[dialect] | _ALWAYS_APPLIED or is_harmless:
            continue
        is_ignored = name in _CONSTRAINING and rules.constrained == "ignore"
        if not is_ignored and name not in rules.ignored_fields:
            raise ApiError(
                400, f"{shown_value(name)} is not supported; remove it", "unsupported_parameter"
            )
        not_applied.append(name)
    if dialect == "responses" and values.get("stream"):
        raise ApiError(400, "stream is not supported for responses", "unsupported_parameter")
    return tuple(not_applied)


@cache
def _validator(dialect: Dialect) -> TypeAdapter[Any]:
    return TypeAdapter(_PARAMETERS[dialect])


def _problem(error: Exception) -> str:
    """Return the problem without values of the request, but those in messages of this package."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) if isinstance(error, ConfigError) else "the body is not JSON"


def _chat_contents(values: Mapping[str, Any]) -> tuple[Request, None]:
    return (request_messages(list(values["messages"])), row_tools(values)), None


def _prompt_contents(values: Mapping[str, Any]) -> tuple[str | None, np.ndarray | None]:
    prompt = values.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
        return None, np.array(prompt, dtype=np.int32)
    raise ConfigError("prompt is not one text or one list of token ids")


def _response_contents(values: Mapping[str, Any]) -> tuple[Request, None]:
    """Convert the items of the Responses API to messages."""
    items = values.get("input", [])
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[Message] = []
    if "instructions" in values:
        messages.append({"role": "system", "content": values["instructions"]})
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else item
        follows_turn = bool(messages) and messages[-1]["role"] == "assistant"
        if kind == "function_call":
            if not follows_turn:
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**result, "content": _texts(item.get("output"))})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _texts(item.get("content"))})
        elif kind != "reasoning":
            raise ConfigError(f"input has an item of type {shown_value(kind)}")
    tools: list[Tool] = []
    for tool in values.get("tools", ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ConfigError(f"tools has {shown_value(tool)}, which is not a function")
        kept = ("name", "description", "parameters")
        function = {name: tool[name] for name in kept if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return (request_messages(messages), row_tools({"tools": tools})), None


def _texts(content: Any) -> Any:
    """Give the text parts of the Responses API the type that they have in the chat API."""
    if not isinstance(content, list):
        return content
    kinds = ("input_text", "output_text")
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in kinds
        else part
        for part in content
    ]


_CONTENTS: dict[Dialect, Callable[[Mapping[str, Any]], tuple[Request, np.ndarray | None]]] = {
    "chat": _chat_contents,
    "completions": _prompt_contents,
    "responses": _response_contents,
}


def answer_body(
    request: ApiRequest, calls: Sequence[Call], answer_id: str, model: str, created: int
) -> dict[str, Any]:
    """Return the body that answers a request with the replies of its calls."""
    num_prompt = len(calls[0].prompt_ids)
    num_sampled = sum(len(call.sampled.token_ids) for call in calls if call.sampled is not None)
    head = {"id": answer_id, "created": created, "model": model}
    if request.dialect == "responses":
        return _response_body(calls[0], head, num_prompt, num_sampled)
    choices = []
    for index, call in enumerate(calls):
        assert call.sampled is not None
        choice: dict[str, Any] = {"index": index, "finish_reason": call.sampled.finish_reason}
        if request.dialect == "completions":
            choices.append({**choice, "text": call.reply["content"], "logprobs": None})
            continue
        message = {**call.reply, "tool_calls": _text_calls(call.reply)}
        if message["tool_calls"]:
            choice["finish_reason"] = "tool_calls"
            message["content"] = message["content"] or None
        else:
            del message["tool_calls"]
        choices.append({**choice, "message": message, "logprobs": None})
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    kind, name = (ChatCompletion, "chat.completion")
    if request.dialect == "completions":
        kind, name = (Completion, "text_completion")
    body = {**head, "object": name, "choices": choices, "usage": usage}
    return kind.model_validate(body).model_dump(mode="json", exclude_unset=True)


def stream_chunks(request: ApiRequest, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which together are the answer `body`."""
    head = {name: body[name] for name in ("id", "created", "model")}
    usage = {**head, "object": body["object"], "choices": [], "usage": body["usage"]}
    last = [usage] if request.has_usage else []
    if request.dialect == "completions":
        return [{**head, "object": body["object"], "choices": body["choices"]}, *last]
    head["object"] = "chat.completion.chunk"
    last = [{**each, "object": head["object"]} for each in last]
    chunks = []
    for choice in body["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
            ]
        ends: tuple[tuple[dict[str, Any], str | None], ...]
        ends = ((delta, None), ({}, choice["finish_reason"]))
        for part, reason in ends:
            each = {"index": choice["index"], "delta": part, "finish_reason": reason}
            chunks.append({**head, "choices": [each]})
    return [*chunks, *last]


def _text_calls(reply: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a reply with the arguments as JSON text."""
    calls = []
    for call in reply.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _response_body(
    call: Call, head: Mapping[str, Any], num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    """Return the answer in the form of the Responses API."""
    answer_id = head["id"]
    output: list[dict[str, Any]] = []
    if call.reply["content"] or "tool_calls" not in call.reply:
        part = {"type": "output_text", "text": call.reply["content"], "annotations": []}
        message = {"type": "message", "id": f"msg_{answer_id}", "role": "assistant"}
        output.append({**message, "status": "completed", "content": [part]})
    for each in _text_calls(call.reply):
        item = {"type": "function_call", "id": f"fc_{each['id']}", "call_id": each["id"]}
        output.append({**item, **each["function"], "status": "completed"})
    is_cut = call.sampled is not None and call.sampled.finish_reason == "length"
    body = {
        "id": answer_id,
        "created_at": head["created"],
        "model": head["model"],
        "object": "response",
        "output": output,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_prompt,
            "output_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
    return Response.model_validate(body).model_dump(mode="json", exclude_unset=True)
