"""Tool calls and reasoning in sampled turns, with the parsers of vLLM; no engine is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def turn_parser(
    tokenizer: PreTrainedTokenizerBase,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Callable[[list[int], Sequence[Mapping[str, Any]] | None], dict[str, Any]]:
    """Return a parser for `nemo_like.agents.codec.ChatCodec`.

    The names are values of vLLM's options `--tool-call-parser` and `--reasoning-parser`.
    """
    # Its import takes 25 seconds.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    # vLLM's protocol of a tokenizer has names that the declared type lacks.
    any_tokenizer: Any = tokenizer
    parser_type: Any = ParserManager.get_parser(
        tool_parser_name=tool_parser,
        reasoning_parser_name=reasoning_parser,
        enable_auto_tools=tool_parser is not None,
        tokenizer=any_tokenizer,
    )

    def parse(token_ids: list[int], tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        message = {"role": "user", "content": ""}
        request = ChatCompletionRequest(messages=[message], tools=tools)  # type: ignore[arg-type]
        reasoning, content, calls = parser_type(any_tokenizer, request.tools).parse(
            str(tokenizer.decode(token_ids)),
            request,
            enable_auto_tools=True,
            model_output_token_ids=token_ids,
        )
        parsed: dict[str, Any] = {"content": content or "", "reasoning_content": reasoning}
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls or ()]
        if functions:
            parsed["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return parsed

    return parse
