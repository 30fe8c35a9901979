"""The routers of a transformers model with experts: their choices are recorded and replayed.

transformers declares the router class of a model type. The routers read here return the logits,
the weights and the indices of the chosen experts, in any order, and choose them by `torch.topk`.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.models.spec import ModelSpec


def router_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the routers by layer; none of a dense model, or where they are not as read here."""
    spec = ModelSpec.from_config(model.config)
    if spec.moe is None:
        return []
    recorders: Any = getattr(model.base_model, "_can_record_outputs", None) or {}
    router_class = getattr(recorders.get("router_logits"), "target_class", nn.Linear)
    routers = []
    for module in model.modules():
        # Older router classes are linear layers, which choose nothing.
        if isinstance(module, router_class) and not isinstance(module, nn.Linear):
            routers.append(module)
    return routers if len(routers) == len(spec.moe.layers) else []


class RouteRecorder:
    """Records the experts that a model chooses in forward passes inside `with recorder`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` has routers as `router_modules` returns them."""
        moe = ModelSpec.from_config(model.config).moe
        assert moe is not None, "a model with routers has experts"
        self.num_experts = moe.num_experts
        self._chosen: list[Tensor] = []
        self._is_recording = False
        for router in router_modules(model):
            router.register_forward_hook(self._record)

    def __enter__(self) -> Self:
        self._chosen = []
        self._is_recording = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_recording = False

    def take(self) -> np.ndarray:
        """Return the experts of the last forward pass, int64 [tokens, layers, top-k]."""
        chosen = torch.stack(self._chosen, dim=1)
        self._chosen = []
        return chosen.cpu().numpy()

    def _record(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Append the indices [tokens, top-k] of the chosen experts, the only integers."""
        if self._is_recording:
            (chosen,) = (each for each in output if not each.is_floating_point())
            self._chosen.append(chosen)


class RouterReplay:
    """Lets the routers of a model choose given experts; their weights come from the model's own
    logits, and so do the gradients. Until experts are given, the model is not changed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        moe = ModelSpec.from_config(model.config).moe
        self.routers = router_modules(model)
        self._num_experts = 0 if moe is None else moe.num_experts
        self._experts: Tensor | None = None
        self._is_installed = False

    def set(self, experts: Tensor | None) -> None:
        """Choose `experts`, int [tokens, layers, top-k], until the next call; -1 and None: own.

        Raises ConfigError for a model whose routers cannot.
        """
        if experts is not None and experts.shape[1] != len(self.routers):
            raise ConfigError(
                f"the generator returns experts of {experts.shape[1]} layers, and"
                f" {len(self.routers)} routers of the model can use them: set policy.router_replay"
                " to false, or policy.engine to megatron"
            )
        if experts is not None and not self._is_installed:
            self._is_installed = True
            for index, router in enumerate(self.routers):
                router.forward = self._replaying(index, router.forward)
        self._experts = experts

    def _replaying(self, index: int, forward: Any) -> Any:
        """Return `forward` of router `index` with given experts."""

        def route(*args: Any, **kwargs: Any) -> Any:
            """Return what the router returns for the same arguments, which differ by type."""
            if self._experts is None:
                return forward(*args, **kwargs)
            with _Chosen(self._experts[:, index], self._num_experts) as chosen:
                output = forward(*args, **kwargs)
            if not chosen.is_used:
                raise ConfigError(
                    f"{type(self.routers[index]).__name__} does not choose experts by a top-k over"
                    f" [tokens, {self._num_experts}] scores, so it cannot use the experts"
                    " of the generator: set policy.router_replay to false"
                )
            return output

        return route


class _Chosen(TorchFunctionMode):
    """Gives `torch.topk` over all experts the result that `experts` [tokens, top-k] name."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._num_experts = num_experts
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        # Scores of groups of experts are [tokens, groups, experts of a group].
        if args[0].ndim != 2 or args[0].shape[-1] != self._num_experts:
            return result
        self.is_used = True
        scores, indices = replayed(args[0], result.indices, self._experts)
        return torch.return_types.topk((scores, indices))


def replayed(scores: Tensor, own: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and indices, [tokens, top-k] each, of `experts`, or of `own` where they are -1.

    `scores` is [tokens, experts], `own` int64 [tokens, top-k]. Raises RuntimeError for experts of
    other tokens.
    """
    if experts.shape != own.shape:
        raise RuntimeError(
            f"the generator's experts have the shape {tuple(experts.shape)}, and the router chooses"
            f" {tuple(own.shape)}; set policy.router_replay to false"
        )
    chosen = torch.where(experts < 0, own, experts.long())
    return scores.gather(-1, chosen), chosen
