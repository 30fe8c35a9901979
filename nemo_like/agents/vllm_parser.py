"""Tool calls and reasoning in sampled turns, with the parsers of vLLM; no engine is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import EnvironmentConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def turn_parser(
    tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig
) -> Callable[[list[int], Sequence[Mapping[str, Any]] | None], dict[str, Any]]:
    """Return a parser for `nemo_like.agents.codec.ChatCodec`.

    Raises ConfigError if vLLM is not installed, or has no such parser for the tokenizer.
    """
    parser_type = _parser_type(tokenizer, config)
    # Its import takes 25 seconds.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    def parse(token_ids: list[int], tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        message = {"role": "user", "content": ""}
        request = ChatCompletionRequest(messages=[message], tools=tools)  # type: ignore[arg-type]
        text = str(tokenizer.decode(token_ids))
        reasoning, content, calls = parser_type(tokenizer, request.tools).parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        if not calls and not reasoning:
            # Some parsers remove a call that they cannot parse.
            return {"content": text}
        parsed: dict[str, Any] = {"content": content or "", "reasoning_content": reasoning}
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls or ()]
        if functions:
            parsed["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return parsed

    return parse


def _parser_type(tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig) -> Any:
    tool_parser, reasoning_parser = config.tool_parser, config.reasoning_parser
    names = (
        f"environment.tool_parser={tool_parser}, environment.reasoning_parser={reasoning_parser}"
    )
    try:
        from vllm.parser import ParserManager
    except ImportError as error:
        raise ConfigError(
            f"{names} needs vLLM, which cannot be imported ({error}): install the extra `vllm`, or"
            " set both to null"
        ) from error
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    managers = {"tool_parser": ToolParserManager, "reasoning_parser": ReasoningParserManager}
    for key, manager in managers.items():
        name, known = getattr(config, key), manager.list_registered()
        if name is not None and name not in known:
            raise ConfigError(f"environment.{key} is {name!r}, not one of {', '.join(known)}")
    # vLLM's protocol of a tokenizer has names that the declared type lacks.
    any_tokenizer: Any = tokenizer
    try:
        parser_type: Any = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=tool_parser is not None,
            tokenizer=any_tokenizer,
        )
        parser_type(any_tokenizer, None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{names} cannot be used with this tokenizer: {error}") from error
    return parser_type
