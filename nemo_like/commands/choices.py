"""The settings of a run without a config, each with its reason.

`choose` is a pure function of the model, the lengths of the rows, the machine and the overrides,
which have priority over every choice. `start` collects these and uses the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.check import batching_section
from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.keys import JobSchema
from nemo_like.config.load import Composition, load_values, merged, with_overrides
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.memory import GIB, MemoryModel, usable_bytes
from nemo_like.prediction.placement import policy_placement
from nemo_like.training.generation_backends import generation_backend

_MULTIPLE = 64
"""Lengths and token budgets are multiples of this."""
_UNSEEN = 1.25
"""Largest length of a row that was not sampled, over the largest of the sampled ones."""
_CPU_TOKENS = 2048
"""Token budget above which a larger microbatch is not faster on a CPU."""
_MARGIN = 3
"""Standard deviations of the tokens of a step that its token budget has above their mean."""
_NUM_VALIDATIONS = 5
_MIN_STEPS = 10
"""Steps of an epoch below which batches are made smaller."""
_MANY_STEPS = 1000
_LEARNING_RATES = {"sft": 1e-5, "distill": 1e-5, "rm": 1e-5, "grpo": 1e-6, "dpo": 5e-7}
"""Of full training of a model of some billion parameters."""
_SMALL_MODEL = 1_000_000_000
_LORA_FACTOR = 10
_ATTEMPTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"policy.activation_checkpointing": "full"},
    {"policy.activation_checkpointing": "full", "policy.lora.enabled": True},
)
_TRAIN_FLOPS = 2e10
_SAMPLING_FLOPS = 4e9
"""float32 FLOP/s of a CPU core, for the estimated duration only. It is not measured, so that equal
machines print equal estimates. Sampling reads all weights for every token."""


@dataclass(frozen=True)
class Machine:
    """What a run may use."""

    memory_gib: float
    """Free memory: of the GPU that has the least, or of the host without GPUs."""
    num_gpus: int = 0
    num_cores: int = 1
    """Cores of the CPU; not used with GPUs."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is known of a run before anything is chosen."""

    job: JobSchema
    named: Mapping[str, tuple[Any, str]]
    """Keys that the command line names by its options: the value, and the reason."""
    spec: ModelSpec
    teachers: tuple[ModelSpec, ...] = ()
    counts: TokenCounts
    """Tokens of a sample of the rows; each completion to be sampled counts as one."""
    num_examples: int
    """Examples of the training file."""
    machine: Machine
    has_vllm: bool = False
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Choice:
    """One key with its value."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Chosen:
    """The choices, and the config with the overrides."""

    choices: tuple[Choice, ...]
    config: RunConfig
    num_steps: int
    seconds: float | None
    """Estimated duration of the steps; None with GPUs."""
    num_cores: int

    def lines(self) -> Iterator[str]:
        """Yield one line per choice, and one about the length of the run."""
        shown = [(each.key, str(each.value).replace("True", "true")) for each in self.choices]
        key_width = max(len(key) for key, _ in shown)
        width = min(max(len(value) for _, value in shown), 32)
        for (key, value), choice in zip(shown, self.choices, strict=True):
            yield f"  {key:{key_width}}  {value:{width}}  {choice.reason}"
        length = counted(self.num_steps, "step")
        if self.seconds is not None:
            minutes = max(round(self.seconds / 60), 1)
            time = counted(minutes, "minute") if minutes < 120 else f"{minutes / 60:.0f} hours"
            length += f", about {time} on {counted(self.num_cores, 'CPU core')}"
        yield f"{length}; {self.config.kind}.max_num_steps=N shortens the run"
        if not self.config.data.validation_files:
            yield "validation is off without data.validation_path=FILE"


class _Choices:
    """Collects choices; keys that an override sets are not chosen."""

    def __init__(self, job: JobSchema, overrides: Sequence[str]) -> None:
        self.job = job
        self.overrides = overrides
        self.items: list[Choice] = []
        self._given = with_overrides(Composition(job), overrides)

    def given(self, key: str) -> Any:
        """Return the value that an override sets, None without one."""
        return self._section(key).get(key.rpartition(".")[2])

    def is_given(self, key: str) -> bool:
        """Return True if an override sets the key, also to null."""
        return key.rpartition(".")[2] in self._section(key)

    def _section(self, key: str) -> dict[str, Any]:
        """Return the given values of the section that the key is in."""
        inner: Any = self._given.tree
        for name in key.split(".")[:-1]:
            inner = inner.get(name) if isinstance(inner, dict) else None
        return inner if isinstance(inner, dict) else {}

    def pick(self, key: str, value: Any, reason: str) -> Any:
        """Choose the value of a key unless an override sets it; return the value that is used."""
        if self.is_given(key):
            return self.given(key)
        self.items.append(Choice(key, value, reason))
        return value

    def given_items(self) -> list[Choice]:
        """Return what the overrides set."""
        return [Choice(key, value, "as given") for key, value in _leaves(self._given.tree)]

    def config(self, **more: Any) -> RunConfig:
        """Return the config of the choices so far and of `more`. Raises ConfigError."""
        values = {each.key: each.value for each in self.items} | more
        return load_values(self.job, nested(values), self.overrides)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner: dict[str, Any] = {name: value}
        for section in reversed(sections):
            inner = {section: inner}
        tree = merged(tree, inner)
    return tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in nested sections."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def choose(task: Task) -> Chosen:
    """Choose every setting that depends on model, rows and machine.

    Raises ConfigError for an override that is wrong, and for a model that does not fit.
    """
    choices = _Choices(task.job, task.overrides)
    for key, (value, reason) in task.named.items():
        choices.pick(key, value, reason)
    _choose_devices(choices, task.machine)
    rows = _choose_batches(choices, task)
    _choose_lengths(choices, task)
    _choose_memory(choices, task)
    num_steps, seconds = _choose_steps(choices, task, rows)
    items = (*choices.items, *choices.given_items())
    return Chosen(items, choices.config(), num_steps, seconds, task.machine.num_cores)


def _choose_devices(choices: _Choices, machine: Machine) -> None:
    num = machine.num_gpus
    if num:
        found = counted(num, "GPU")
        choices.pick("cluster.backend", "ray" if num > 1 else "local", f"{found} of this machine")
        choices.pick("cluster.gpus_per_node", num, "a worker for each")
        choices.pick("policy.precision", "bfloat16", "on GPUs")
        return
    choices.pick("cluster.backend", "local", "one process; there is no GPU")
    choices.pick("policy.precision", "float32", "on a CPU")


def _choose_batches(choices: _Choices, task: Task) -> int:
    """Choose the rows of a step; return the examples of the training file that a step takes."""
    has_gpus = task.machine.num_gpus > 0
    batch_key = "policy.train_global_batch_size"
    if task.job.kind == "grpo":
        num_prompts = min(32 if has_gpus else 4, task.num_examples)
        prompts = choices.pick("grpo.num_prompts_per_step", num_prompts, "prompts of a step")
        group = choices.pick(
            "grpo.num_generations_per_prompt", 8 if has_gpus else 4, "completions of each prompt"
        )
        choices.pick(batch_key, prompts * group, "one optimizer step per rollout")
        return prompts
    batch = 32
    while batch > 8 and task.num_examples < batch * _MIN_STEPS:
        batch //= 2
    batch = round_up(batch, max(task.machine.num_gpus, 1))
    noun = f"{task.job.default_batch.example}s per step; the file has {task.num_examples:,}"
    return choices.pick(batch_key, batch, noun)


def _choose_lengths(choices: _Choices, task: Task) -> None:
    """Choose the limits of a row, and of a completion if the run samples any."""
    counts = task.counts
    assert counts.num_trained is not None
    limit = task.spec.max_positions or 1 << 20
    longest = int(counts.lengths.max())
    # Limits that are not chosen yet must not be refused.
    open_limits = {"policy.oversize_rows": "truncate", "policy.generation.max_new_tokens": 1}
    config = _draft(choices, limit, **open_limits)
    sampled = len(counts.lengths) // config.needs.batch.rows_per_example
    is_complete = sampled >= task.num_examples
    rows = f"{'all' if is_complete else 'the sampled'} {sampled:,} {config.needs.batch.example}s"
    reason = f"the longest of {rows} has {longest:,} tokens"
    if config.needs.rollouts:
        prompt = int((counts.lengths - counts.num_trained).max())
        total = choices.given("policy.max_total_sequence_length") or limit
        # A long prompt is truncated, and must not leave all others without a completion.
        room = max(total - prompt, total // 4)
        new_tokens = max(min(1024 if task.machine.num_gpus else 256, room), 1)
        new_tokens = choices.pick("policy.generation.max_new_tokens", new_tokens, "per completion")
        longest = max(prompt + new_tokens, 0 if task.job.kind == "grpo" else longest)
        reason = f"the longest prompt of {rows} has {prompt:,} tokens"
        if task.has_vllm and task.machine.num_gpus:
            choices.pick("policy.generation.backend", "vllm", "vLLM is installed")
    length = longest if is_complete else round(_UNSEEN * longest)
    length = min(round_up(length, _MULTIPLE), limit)
    if length < longest:
        reason += ", more than the positions of the model"
    length = choices.pick("policy.max_total_sequence_length", length, reason)
    if not is_complete or length < longest:
        cut = "prompts lose their beginning" if config.needs.rollouts else "rows lose their end"
        choices.pick("policy.oversize_rows", "truncate", f"longer {cut}")


def _draft(choices: _Choices, tokens: int, **more: Any) -> RunConfig:
    """Return the config with a token budget that any row fits into."""
    if choices.given("policy.dynamic_batching.enabled") is not True:
        more.setdefault("policy.sequence_packing.enabled", True)
    return choices.config(
        **{
            f"policy.{section}.{key}": 2 * max(tokens, 1 << 20)
            for section in ("sequence_packing", "dynamic_batching")
            for key in ("train_mb_tokens", "logprob_mb_tokens")
        },
        **more,
    )


def _choose_memory(
    choices: _Choices, task: Task, attempts: Sequence[Mapping[str, Any]] = _ATTEMPTS
) -> None:
    """Choose packing, the token budget, and the first of `attempts` with which the model fits."""
    more, *others = attempts
    config = _draft(choices, task.spec.max_positions or 0, **more)
    memory = _memory(config, task)
    usable = _usable_bytes(config.policy, config.needs, task)
    needed = round_up(
        config.needs.batch.rows_per_example * config.policy.max_total_sequence_length, _MULTIPLE
    )
    largest = memory.largest_budget(usable, _MULTIPLE)
    free = f"{task.machine.memory_gib:.1f} GiB of free memory"
    if largest < needed:
        if others:
            _choose_memory(choices, task, others)
            return
        raise ConfigError(
            f"{task.spec.name} does not fit: with rows of {needed:,} tokens, LoRA and activation"
            f" checkpointing it is predicted to need {memory.peak(needed) / GIB:.1f} GiB, and"
            f" {usable / GIB:.1f} of {free} can be used; set policy.max_total_sequence_length lower"
            " with policy.oversize_rows=truncate, or choose a smaller model or more GPUs"
        )
    for key, value in more.items():
        choices.pick(key, value, "the model does not fit without it")
    mode = batching_section(config.policy)
    if mode is None:
        return
    name, _ = mode
    if name == "policy.sequence_packing":
        choices.pick(f"{name}.enabled", True, "no padding between rows")
    dp = policy_layout(config.parallel, config.cluster).dp
    useful = round(_step_tokens(config, task) / dp)
    # The rows of a rank may exceed its share of a step by one.
    useful += config.policy.max_total_sequence_length if dp > 1 else 0
    cap = useful if task.machine.num_gpus else min(useful, _CPU_TOKENS)
    budget = max(min(largest, round_up(cap, _MULTIPLE)), needed)
    reason = f"tokens per microbatch, {memory.peak(budget) / GIB:.3g} of {free}"
    budget = choices.pick(f"{name}.train_mb_tokens", budget, reason)
    choices.pick(f"{name}.logprob_mb_tokens", budget, "as in training")


def _step_tokens(config: RunConfig, task: Task) -> float:
    """Return the tokens that few optimizer steps exceed: `_MARGIN` deviations above the mean.

    Examples are independent. The rows of an example are counted, or are completions of its prompt,
    whose lengths are uniformly random.
    """
    batch = config.needs.batch
    lengths, _ = _expected_lengths(config, task)
    num_rows = config.policy.in_rows(batch.rows_per_example).train_global_batch_size
    rows_per_example = batch.num_rows // batch.num_examples
    examples = lengths.reshape(-1, batch.rows_per_example).mean(axis=1) * rows_per_example
    variance = num_rows / rows_per_example * float(examples.var())
    if config.needs.rollouts:
        variance += num_rows * config.policy.generation.max_new_tokens**2 / 12
    return num_rows * float(lengths.mean()) + _MARGIN * variance**0.5


def _expected_lengths(config: RunConfig, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the tokens with loss of the sampled rows, int [N] each.

    A completion to be sampled has half of its limit.
    """
    lengths, trained = task.counts.lengths, task.counts.num_trained
    assert trained is not None
    if not config.needs.rollouts:
        return lengths, trained
    completions = np.full_like(lengths, max(config.policy.generation.max_new_tokens // 2, 1))
    return lengths - trained + completions, completions


def _usable_bytes(policy: PolicyConfig, needs: RunNeeds, task: Task) -> float:
    """Return the memory that training may use."""
    usable = usable_bytes(task.machine.memory_gib)
    if needs.rollouts and not task.machine.num_gpus:
        # On GPUs the generator moves to host memory while the policy trains.
        usable -= generation_backend(policy).peak_bytes(policy, task.spec, usable)
    return max(usable, 0.0)


def _memory(config: RunConfig, task: Task) -> MemoryModel:
    placement = policy_placement(
        config.policy,
        policy_layout(config.parallel, config.cluster),
        needs_reference=config.needs.reference,
        device_type="cuda" if task.machine.num_gpus else "cpu",
        teachers=task.teachers,
        keeps_teacher_embeddings=config.needs.keeps_teacher_embeddings,
    )
    return MemoryModel(task.spec.with_output_head(config.needs.head), placement)


def _choose_steps(choices: _Choices, task: Task, rows: int) -> tuple[int, float | None]:
    """Choose learning rate, schedule and length; return the steps and their seconds on a CPU."""
    config = choices.config()
    kind = task.job.kind
    is_small = task.spec.num_params < _SMALL_MODEL
    has_lora = config.policy.lora.enabled
    rate = _LEARNING_RATES[kind] * (2 if is_small else 1) * (_LORA_FACTOR if has_lora else 1)
    size = f"{task.spec.num_params / 1e9:.2f} billion"
    if is_small:
        size = f"{task.spec.num_params / 1e6:.3g} million"
    choices.pick(
        "policy.optimizer.lr",
        float(f"{rate:.3g}"),
        f"{'LoRA' if has_lora else 'full training'} of {size} parameters",
    )
    per_epoch = ceil_div(task.num_examples, rows)
    key = f"{kind}.max_num_steps"
    if kind == "grpo":
        num_steps = choices.pick(key, 100, f"{counted(per_epoch, 'step')} per epoch")
    else:
        epochs = 3 if kind in ("sft", "distill") and 3 * per_epoch <= _MANY_STEPS else 1
        reason = f"{counted(per_epoch, 'step')} each"
        num_steps = per_epoch * choices.pick(f"{kind}.max_num_epochs", epochs, reason)
        num_steps = min(choices.given(key) or num_steps, num_steps)
    if kind != "grpo":
        choices.pick("policy.scheduler.kind", "cosine", "decays to 0")
        choices.pick("policy.scheduler.warmup_steps", num_steps // 20, "5 % of the steps")
    if config.data.validation_files:
        period = max(num_steps // _NUM_VALIDATIONS, 1)
        choices.pick(f"{kind}.val_period", period, "steps between validations")
    seconds = None if task.machine.num_gpus else num_steps * _step_seconds(config, task)
    return num_steps, seconds


def _step_seconds(config: RunConfig, task: Task) -> float:
    """Return the estimated seconds of a step on a CPU."""
    lengths, trained = _expected_lengths(config, task)
    cost = CostModel.from_spec(task.spec)
    seconds = 0.0
    if config.needs.rollouts:
        seconds = float(cost.of(trained).mean()) / _SAMPLING_FLOPS
    passes = 3 + config.needs.logprob_pass + config.needs.reference
    flops = passes * float(cost.of(lengths, trained).mean())
    for teacher in task.teachers:
        flops += float(CostModel.from_spec(teacher).of(lengths, trained).mean())
    seconds += flops / _TRAIN_FLOPS
    return config.needs.batch.num_rows * seconds / task.machine.num_cores
