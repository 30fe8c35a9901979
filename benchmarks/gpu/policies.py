"""Policies of one worker in this process: opened for a set of options, shared between cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from benchmarks.gpu.cells import SkipCell, free_memory
from nemo_like.config.parallel import build_layout
from nemo_like.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.models.spec import ModelSpec, load_spec
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import policy_placement

Options = Mapping[str, Any]
"""Keys such as `policy.logprob_chunk_size` or `parallel.sequence` -> value."""

_SECTIONS = {"policy": PolicyConfig, "parallel": ParallelConfig}


def policy_config(
    folder: Path,
    *,
    budget: int,
    num_rows: int,
    longest: int,
    options: Options,
    precision: Literal["float32", "bfloat16"] = "bfloat16",
) -> PolicyConfig:
    """Return the configuration of a packed policy with `budget` tokens per microbatch.

    Raises SkipCell for options that this version does not have.
    """
    check_options(options)
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=budget, logprob_mb_tokens=budget)
    config = PolicyConfig(
        model_name=str(folder),
        precision=precision,
        train_global_batch_size=num_rows,
        max_total_sequence_length=longest,
        optimizer=OptimizerConfig(lr=1e-6),
        sequence_packing=packing,
    )
    return dataclasses.replace(config, **_section(options, "policy"))


def parallel_config(options: Options) -> ParallelConfig:
    """Return the section `parallel` of `options`."""
    return ParallelConfig(**_section(options, "parallel"))


def check_options(options: Options) -> None:
    """Raise SkipCell unless this version of the package has all keys and values of `options`."""
    for key, value in options.items():
        section, _, name = key.partition(".")
        hints = get_type_hints(_SECTIONS[section])
        if name not in hints:
            raise SkipCell(f"this version has no key {key}")
        choices = literal_values(hints[name])
        if choices and value not in choices:
            raise SkipCell(f"{key} is one of {', '.join(map(str, choices))}, not {value}")


def literal_values(hint: Any) -> tuple[Any, ...]:
    """Return the values of a type hint that allows only a few; empty for any other hint."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (False, True) if hint is bool else ()


def option_defaults() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the default and all values of each key that has only a few values."""
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for section, schema in _SECTIONS.items():
        hints = get_type_hints(schema)
        for field in dataclasses.fields(schema):
            values = literal_values(hints[field.name])
            if values and field.default is not dataclasses.MISSING:
                found[f"{section}.{field.name}"] = (field.default, values)
    return found


class PolicyHolder:
    """At most one open policy; opening another one closes it first."""

    def __init__(self, device: str, worker: str = "dtensor") -> None:
        self._device = device
        self._worker = worker
        self._key: Any = None
        self._policy: Policy | None = None

    def get(
        self,
        config: PolicyConfig,
        *,
        options: Options | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Policy:
        """Return a policy with `config`; the worker is kept if only batch sizes differ.

        `arguments` are further ones of `PolicyStart`.
        Raises SkipCell for options that this version does not have.
        """
        options = options or {}
        check_options(options)
        arguments = arguments or {}
        key = (
            config.model_name,
            config.precision,
            sorted(options.items()),
            sorted(arguments.items()),
        )
        if self._policy is None or self._key != key:
            self.close()
            group = LocalGroup(
                worker_class(self._worker),
                {
                    "config": config,
                    "start": PolicyStart(parallel=parallel_config(options), **arguments),
                },
                # On a CPU the sizes are tiny, and threads would only wait for each other.
                local_context(
                    device=self._device, num_threads=1 if self._device == "cpu" else None
                ),
                name="policy",
            )
            self._policy = Policy(group, config, load_spec(config.model_name))
            self._key = key
        # The worker reads the budget from the plan and not from its configuration.
        return Policy(self._policy.group, config, self._policy.model)

    def close(self) -> None:
        """Close the open policy, if any."""
        policy = self._policy
        self._policy = None
        self._key = None
        if policy is not None:
            policy.shutdown()
            del policy
            # The next policy needs the memory.
            free_memory()


def worker_class(engine: str) -> Any:
    """Return the worker class of an engine. Raises SkipCell if Megatron-Core is missing."""
    if engine == "dtensor":
        from nemo_like.policy.dtensor.worker import DTensorPolicyWorker

        return DTensorPolicyWorker
    try:
        from nemo_like.policy.megatron.worker import MegatronPolicyWorker
    except ImportError as error:
        raise SkipCell(f"Megatron-Core cannot be imported: {error}") from error
    return MegatronPolicyWorker


def predicted_peak_gb(
    config: PolicyConfig,
    engine: Literal["dtensor", "megatron"],
    device: str,
    options: Options,
    max_tokens: int,
    spec: ModelSpec | None = None,
) -> float:
    """Return the peak that `nemo-like plan` predicts for one GPU, in GB.

    `max_tokens` is the size of the largest microbatch. `spec` replaces the model of `config`.
    """
    placement = policy_placement(
        dataclasses.replace(config, engine=engine),
        build_layout(parallel_config(options), 1),
        needs_reference=False,
        device_type=device.partition(":")[0],
    )
    return MemoryModel(spec or load_spec(config.model_name), placement).peak(max_tokens) / 1e9


def _section(options: Options, section: str) -> dict[str, Any]:
    values = {}
    for key, value in options.items():
        prefix, _, name = key.partition(".")
        if prefix == section:
            values[name] = value
    return values
