"""Tensor and sequence parallelism for a Hugging Face model, by the plan the model itself carries.

Each rank holds slices as plain local weights, so FSDP2, the optimizer and every forward see
ordinary tensors: a block of a row-major matrix is still a block when FSDP cuts dim 0 of it again,
and no operation goes through DTensor's dispatch.

    embedding          rows of the vocabulary            lookups are summed
    q, k, v, gate, up  rows of the weight (columns of    what enters the block is shared, its gradients are summed
                       the product): heads, channels
    o, down            columns of the weight             products are summed, then the bias is added once
    output embedding   rows of the vocabulary            `token_logprobs` compares across the ranks

With sequence parallelism a sum leaves each rank its share of the tokens and what enters a block is
gathered from the shares, so that norms and residuals are not computed n times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.policy.collectives import copy_to, gather_rows, scatter_sum, sum_over

_COLUMN, _ROW, _PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"


class Cut(NamedTuple):
    """Which part of a weight a tensor-parallel rank holds.

    Example: rows 33 to 67 of an embedding, `Cut((67, 32), dim=0, start=33, stop=67,
    has_partial_grad=False)`.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    """The dim that is cut; None where every rank holds the whole weight."""
    start: int = 0
    stop: int = 0
    has_partial_grad: bool = False
    """Held whole, but the gradient is of this rank's heads or tokens only: to be summed over the tp
    ranks.
    """

    def of(self, full: Tensor) -> Tensor:
        """This rank's part of the `full` tensor, as memory of its own where it is cut."""
        return (
            full
            if self.dim is None
            else full.narrow(self.dim, self.start, self.stop - self.start).clone()
        )


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place among the ranks that share every matrix product."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence: bool
    """Whether norms and residuals are shared as well, by tokens."""

    def apply(self, causal_lm: PreTrainedModel, model_name: str) -> dict[str, Cut]:
        """Cut the weights of a model on the meta device and give it the collectives; returns the
        cut of each parameter.

        Raises ConfigError, the same on every rank, for a model that cannot be cut this way.
        """
        self._check_heads(causal_lm.config, model_name)
        cuts: dict[nn.Parameter, Cut] = {}
        blocks: dict[nn.Module, set[str]] = {}
        for parent, module, style in _planned(causal_lm, model_name):
            if style == _PARTIAL:
                cuts |= {
                    weight: Cut(tuple(weight.shape), has_partial_grad=True)
                    for weight in module.parameters()
                }
                continue
            blocks.setdefault(parent, set()).add(style)
            cuts |= self._cut(module, "weight", 0 if style == _COLUMN else 1)
            if style == _COLUMN:
                cuts |= self._cut(module, "bias", 0)
            else:
                module.forward = partial(_row_product, self.leave, module)
        for block, styles in blocks.items():
            _check_block(block, styles, cuts, model_name)
            block.register_forward_pre_hook(partial(_enter, self.enter), with_kwargs=True)
        cuts |= self._cut_vocabulary(causal_lm, model_name)
        whole = {
            weight: Cut(tuple(weight.shape), has_partial_grad=self.sequence)
            for weight in causal_lm.parameters()
        }
        cuts = whole | cuts
        return {
            name: cuts[weight]
            for name, weight in causal_lm.named_parameters(remove_duplicate=False)
        }

    def enter(self, hidden: Tensor) -> Tensor:
        """The input [1, T, D] of a computation that the ranks divide among them."""
        return (
            gather_rows(self.group, hidden[0])[None]
            if self.sequence
            else copy_to(self.group, hidden)
        )

    def leave(self, parts: Tensor) -> Tensor:
        """What such a computation amounts to, from each rank's part of the sum."""
        return (
            scatter_sum(self.group, parts[0])[None]
            if self.sequence
            else sum_over(self.group, parts)
        )

    def span(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """[start, stop) of `size` rows that this tp rank, or another, holds. Example: 67 over 2 are
        (0, 33), (33, 67).
        """
        rank = self.rank if rank is None else rank
        return rank * size // self.size, (rank + 1) * size // self.size

    def _cut(self, module: nn.Module, key: str, dim: int) -> dict[nn.Parameter, Cut]:
        """Put this rank's part, still without memory, in the place of the weight; nothing where
        there is no such one.
        """
        weight = module._parameters.get(key)
        if weight is None:
            return {}
        start, stop = self.span(weight.shape[dim])
        shape = (*weight.shape[:dim], stop - start, *weight.shape[dim + 1 :])
        part = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)
        module._parameters[key] = part
        return {part: Cut(tuple(weight.shape), dim, start, stop)}

    def _cut_vocabulary(
        self, causal_lm: PreTrainedModel, model_name: str
    ) -> dict[nn.Parameter, Cut]:
        embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        if type(embedding) is not nn.Embedding:
            raise _refused(
                model_name,
                f"its input embedding is a {type(embedding).__name__}, not a plain table",
            )
        if embedding.num_embeddings < self.size:
            raise _refused(
                model_name,
                f"its vocabulary of {embedding.num_embeddings} is smaller than {self.size} ranks",
            )
        is_tied = head.weight is embedding.weight
        start, stop = self.span(embedding.num_embeddings)
        embedding.forward = partial(_look_up, self.leave, embedding, range(start, stop))
        cuts = self._cut(embedding, "weight", 0)
        if is_tied:
            head.weight = embedding.weight
        else:
            cuts |= self._cut(head, "weight", 0)
        return cuts | self._cut(head, "bias", 0)

    def _check_heads(self, model_config: Any, model_name: str) -> None:
        heads = model_config.num_attention_heads
        kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
        for what, count in (("attention heads", heads), ("key-value heads", kv_heads)):
            if count % self.size:
                raise ConfigError(
                    f"policy.model_name={model_name} has {count} {what}, which {self.size}"
                    f" tensor-parallel ranks cannot share "
                    f"evenly; set parallel.tensor to a divisor of {count}"
                )


def _planned(causal_lm: PreTrainedModel, model_name: str) -> Iterator[tuple[nn.Module, Any, str]]:
    """(module around it, module, style) for each module that the model's plan names; a linear layer
    unless `_PARTIAL`.
    """
    backbone = causal_lm.base_model
    plan = getattr(backbone.config, "base_model_tp_plan", None)
    if not plan:
        raise _refused(model_name, "transformers has no tensor-parallel plan for it")
    modules = dict(backbone.named_modules())
    for name, module in modules.items():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        if style not in (_COLUMN, _ROW, _PARTIAL) or (
            style != _PARTIAL and not isinstance(module, nn.Linear)
        ):
            raise _refused(
                model_name, f"its plan wants {name}, a {type(module).__name__}, to be {style}"
            )
        yield modules[name.rpartition(".")[0]], module, style


def _check_block(
    block: nn.Module, styles: set[str], cuts: dict[nn.Parameter, Cut], model_name: str
) -> None:
    """Inside a block every rank has its own heads or channels, so the plan must say how each weight
    is held.
    """
    if styles != {_COLUMN, _ROW}:
        raise _refused(
            model_name, f"its plan cuts {type(block).__name__} only {' and '.join(sorted(styles))}"
        )
    rows = {module.bias for module in block.modules() if isinstance(module, nn.Linear)}
    unnamed = [
        name
        for name, weight in block.named_parameters()
        if weight not in cuts and weight not in rows
    ]
    if unnamed:
        raise _refused(
            model_name, f"its plan does not say how {type(block).__name__} holds {unnamed[0]}"
        )


def _refused(model_name: str, why: str) -> ConfigError:
    return ConfigError(
        f"policy.model_name={model_name} cannot be split by tensor parallelism: {why}; set"
        f" parallel.tensor to 1, or use a "
        "dense Llama-, Qwen2- or Qwen3-like model"
    )


def _enter(
    enter: Callable[[Tensor], Tensor],
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}


def _row_product(leave: Callable[[Tensor], Tensor], module: nn.Linear, hidden: Tensor) -> Tensor:
    out = leave(F.linear(hidden, module.weight))
    return out if module.bias is None else out + module.bias


def _look_up(
    leave: Callable[[Tensor], Tensor], module: nn.Embedding, rows: range, input: Tensor
) -> Tensor:
    # The padding token's row gets no gradient from look-ups, as in the whole table.
    padding = (
        module.padding_idx - rows.start
        if module.padding_idx is not None and module.padding_idx in rows
        else None
    )
    local = input - rows.start
    is_here = (local >= 0) & (local < len(rows))
    found = F.embedding(torch.where(is_here, local, 0), module.weight, padding_idx=padding)
    return leave(found * is_here.unsqueeze(-1))
