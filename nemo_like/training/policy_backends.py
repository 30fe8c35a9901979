"""The engines of `policy.engine`: worker, model checks and recorded experts of each.

Worker classes are imported on demand: megatron-core is an optional dependency, and `validate` does
not load torch.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ParallelConfig, PolicyConfig, Switch
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.param_map import ModelSharding

if TYPE_CHECKING:
    from nemo_like.policy.engine_worker import EngineWorker


class PolicyBackend(ABC):
    """What a run needs to know of an engine beside `training_engines.TrainingEngine`."""

    @abstractmethod
    def worker(self) -> type[EngineWorker]:
        """Return the worker class."""
        ...

    @abstractmethod
    def check_model(self, spec: ModelSpec, name: str) -> None:
        """Raise ConfigError for a missing package, or a model that the engine does not have."""
        ...

    @abstractmethod
    def check_frozen(
        self, frozen: Collection[str], spec: ModelSpec, name: str, parallel: ParallelConfig
    ) -> None:
        """Raise ConfigError for weights that can only be frozen together with others."""
        ...

    @abstractmethod
    def recorded_experts(self, mode: Switch, name: str) -> Switch:
        """Return `policy.router_replay` of a model with experts, `false` if it cannot be."""
        ...


class DTensorBackend(PolicyBackend):
    """FSDP2 with DTensor: models of transformers."""

    def worker(self) -> type[EngineWorker]:
        """See `PolicyBackend.worker`."""
        from nemo_like.policy.dtensor.worker import DTensorPolicyWorker

        return DTensorPolicyWorker

    def check_model(self, spec: ModelSpec, name: str) -> None:
        """Accept every model: the worker checks its modules when it builds them."""

    def check_frozen(
        self, frozen: Collection[str], spec: ModelSpec, name: str, parallel: ParallelConfig
    ) -> None:
        """Accept all weights: each is a parameter of its own."""

    def recorded_experts(self, mode: Switch, name: str) -> Switch:
        """See `PolicyBackend.recorded_experts`; only some routers of transformers can."""
        if mode != "auto":
            return mode
        from nemo_like.models.output_head import meta_model
        from nemo_like.models.routers import router_modules

        return "auto" if router_modules(meta_model(load_model_config(name))) else False


class MegatronBackend(PolicyBackend):
    """Megatron-Core: models of the families in `policy.megatron.families`."""

    def worker(self) -> type[EngineWorker]:
        """See `PolicyBackend.worker`."""
        from nemo_like.policy.megatron.worker import MegatronPolicyWorker

        return MegatronPolicyWorker

    def check_model(self, spec: ModelSpec, name: str) -> None:
        """See `PolicyBackend.check_model`."""
        if importlib.util.find_spec("megatron") is None:
            raise ConfigError(
                "policy.engine is megatron, but megatron-core is not installed: pip install"
                " 'nemo-like[megatron]'"
            )
        family_of(spec, name)

    def check_frozen(
        self, frozen: Collection[str], spec: ModelSpec, name: str, parallel: ParallelConfig
    ) -> None:
        """See `PolicyBackend.check_frozen`: some weights are parts of one parameter."""
        sharding = ModelSharding(spec, pp=parallel.pipeline, vpp=parallel.virtual_pipeline)
        family_of(spec, name).frozen_parameters(frozen, sharding, 0, {})

    def recorded_experts(self, mode: Switch, name: str) -> Switch:
        """See `PolicyBackend.recorded_experts`; every router can."""
        return mode


_BACKENDS: dict[str, PolicyBackend] = {"dtensor": DTensorBackend(), "megatron": MegatronBackend()}


def policy_backend(config: PolicyConfig) -> PolicyBackend:
    """Return the engine of `policy.engine`."""
    return _BACKENDS[config.engine]
