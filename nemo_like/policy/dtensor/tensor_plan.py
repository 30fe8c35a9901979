"""Tensor and sequence parallelism of a Hugging Face model, from transformers' plan for it.

Each rank has its shards as plain local weights, so FSDP2, the optimizer and every forward see
ordinary tensors, and no operation goes through DTensor's dispatch. FSDP may shard dim 0 of such a
shard again: the result is still a rectangle of the full weight.

    style of the plan        shard                    collectives
    colwise                  rows (output features)   input of the block: identity / all-reduce
    rowwise                  columns (inputs)         output: all-reduce; the bias is added after it
    colwise_gather_output    rows                     input: identity / all-reduce; output: gather
    rowwise_split_input      columns                  input: split; output: all-reduce
    moe_tp_experts           complete experts         as a block of colwise and rowwise layers
    embeddings               rows (vocabulary)        output: all-reduce, or in `token_logprobs`

A block is the module around column- and row-parallel layers: attention or a feed-forward block. In
a plain block (`colwise`, `rowwise`) each rank has its own heads or channels. In a gathered block
every rank computes what is between the layers completely.

With sequence parallelism the input of a block is all-gathered over the tokens and its output is
reduce-scattered, so that norms and residuals are computed once and not on every tp rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config

from nemo_like.config.errors import ConfigError
from nemo_like.models.layout_check import model_problems
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import LayoutError, ParallelLayout
from nemo_like.policy.dtensor.experts import distribute, distribute_all
from nemo_like.policy.dtensor.parallel import ExpertParallel, ShardSpec, Specs, TensorParallel
from nemo_like.policy.dtensor.vision import language_model

_COLUMN = "colwise"
_ROW = "rowwise"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")
_EXPERTS = "moe_tp_experts"
_COMPRESSED = "mla_kv_a_proj"
"""Of latent attention: the compressed keys and values are computed on all ranks."""
_PARTIAL_GRAD = ("replicated_with_grad_allreduce", _COMPRESSED)
_LINEAR = (_COLUMN, _ROW, *_GATHERED, *_SPLIT)


class _Planned(NamedTuple):
    """A module in the plan, or a parameter of it."""

    name: str
    module: nn.Module
    style: str
    parameter: str | None = None


def parallelize(
    tensor: TensorParallel,
    causal_lm: PreTrainedModel,
    model_name: str,
    expert: ExpertParallel | None = None,
) -> dict[str, ShardSpec]:
    """Shard the weights of a model on the meta device and add the collectives.

    Experts are divided over the ranks of `expert` as well. Returns the spec of each parameter by
    name, tied names included. Raises ConfigError or LayoutError, the same on every rank, for a
    model that cannot be sharded this way.
    """
    layout = ParallelLayout(tp=tensor.size, sequence_parallel=tensor.sequence)
    check_sizes(layout, causal_lm, model_name)
    specs: Specs = {}
    blocks: dict[nn.Module, list[_Planned]] = {}
    modules = dict(language_model(causal_lm).named_modules())
    for planned in _planned_modules(causal_lm, modules, model_name):
        if planned.style == _EXPERTS:
            specs |= distribute(tensor, expert, planned.module)
            continue
        if planned.parameter is not None:
            # A value per head, such as attention sinks.
            specs |= _shard(tensor, planned.module, planned.parameter, 0)
            continue
        blocks.setdefault(modules[planned.name.rpartition(".")[0]], []).append(planned)
    if tensor.sequence:
        _check_attention(modules, blocks, model_name)
    for block, layers in blocks.items():
        _shard_block(tensor, block, layers, specs, model_name)
    if expert is not None:
        distribute_all(expert, causal_lm, model_name, specs)
    specs |= _shard_vocabulary(tensor, causal_lm, model_name)
    for weight in causal_lm.parameters():
        if weight not in specs:
            # With sequence parallelism a norm sees this rank's tokens only, and a vision tower gets
            # the gradient of their features.
            specs[weight] = ShardSpec(tuple(weight.shape), has_partial_grad=tensor.sequence)
    names = causal_lm.named_parameters(remove_duplicate=False)
    return {name: specs[weight] for name, weight in names}


def _planned_modules(
    causal_lm: PreTrainedModel, modules: dict[str, nn.Module], model_name: str
) -> Iterator[_Planned]:
    """Yield the modules of the backbone, and the parameters, that the model's plan lists.

    The input embedding is left out: `_shard_vocabulary` shards it with the output head, whether or
    not the plan lists it.
    """
    backbone = language_model(causal_lm)
    plan = getattr(backbone.config, "base_model_tp_plan", None)
    if backbone.config.model_type == "qwen3_vl_text":
        # Its layers are those of Qwen3; transformers has no plan for it.
        plan = Qwen3Config.base_model_tp_plan
    if not plan:
        raise _unsupported(model_name, "transformers has no tensor-parallel plan for it")
    embedding = causal_lm.get_input_embeddings()
    for name, module in modules.items():
        if module is embedding:
            # Some releases of transformers add it to the plan of a model with a tied head.
            continue
        # The plan names layers with a wildcard: layers.*.self_attn.q_proj.
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = plan.get(pattern)
        if style is None:
            for key in list(module._parameters):
                if plan.get(f"{pattern}.{key}") == _COLUMN:
                    yield _Planned(name, module, _COLUMN, key)
            continue
        is_linear = style in _LINEAR and isinstance(module, nn.Linear)
        if not is_linear and style not in (_EXPERTS, *_PARTIAL_GRAD):
            raise _unsupported(
                model_name, f"its plan requires {name}, a {type(module).__name__}, to be {style}"
            )
        yield _Planned(name, module, style)


def _shard_block(
    tensor: TensorParallel, block: nn.Module, layers: list[_Planned], specs: Specs, model_name: str
) -> None:
    """Shard the layers of a block, add its collectives, and add its parameters to `specs`."""
    for _, module, style, _ in layers:
        if style in _PARTIAL_GRAD:
            for weight in module.parameters():
                specs[weight] = ShardSpec(tuple(weight.shape), has_partial_grad=True)
        elif style in (_COLUMN, *_GATHERED):
            specs |= _shard(tensor, module, "weight", 0)
            specs |= _shard(tensor, module, "bias", 0)
        else:
            assert isinstance(module, nn.Linear)
            specs |= _shard(tensor, module, "weight", 1)
            linear: Any = module
            linear.forward = partial(_row_parallel_linear, tensor.reduce_output, module)
    styles = {style for _, _, style, _ in layers} - set(_PARTIAL_GRAD)
    if not styles:
        return
    if styles <= {*_GATHERED, *_SPLIT}:
        specs |= _gather_block(tensor, block, layers, specs, model_name)
        return
    if styles != {_COLUMN, _ROW}:
        raise _unsupported(
            model_name,
            f"its plan shards {type(block).__name__} only {' and '.join(sorted(styles))}",
        )
    is_latent = any(style == _COMPRESSED for _, _, style, _ in layers)
    for name, weight in list(_unplanned(block, specs)):
        # Inside the block each rank has its own heads or channels, so the gradient of an unlisted
        # parameter would be silently wrong. Compressions of latent attention have the gradient of
        # this rank's heads.
        if not is_latent:
            raise _unsupported(
                model_name, f"its plan does not list the parameter {name} of {type(block).__name__}"
            )
        specs[weight] = ShardSpec(tuple(weight.shape), has_partial_grad=True)
    # The hook of the block, so that its column-parallel layers share one collective.
    _transform_input(block, tensor.gather_input)


def _gather_block(
    tensor: TensorParallel, block: nn.Module, layers: list[_Planned], specs: Specs, model_name: str
) -> Specs:
    """Add the collectives of a gathered block; return the specs of its other parameters."""
    if tensor.sequence and not any(style in _SPLIT for _, _, style, _ in layers):
        raise _unsupported(
            model_name,
            f"its plan has no row-parallel layer in {type(block).__name__}, which"
            " parallel.sequence needs",
            "parallel.sequence to false, or parallel.tensor to 1",
        )
    for name, module, style, _ in layers:
        assert isinstance(module, nn.Linear)
        is_split = style in _SPLIT
        size = module.in_features if is_split else module.out_features
        if size % tensor.size:
            raise _unsupported(
                model_name, f"the {size} features of {name} are not a multiple of {tensor.size}"
            )
        if is_split:
            _transform_input(module, tensor.split_features)
            continue
        _transform_input(module, tensor.copy_input)
        module.register_forward_hook(partial(_transformed_output, tensor.gather_features))
    _transform_input(block, tensor.gather_tokens)
    # Every rank computes all heads or channels, of all tokens.
    return {weight: ShardSpec(tuple(weight.shape)) for _, weight in _unplanned(block, specs)}


def _unplanned(block: nn.Module, specs: Specs) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a block that the plan does not list, without row-parallel biases."""
    # A row-parallel bias is added after the reduction, so it is replicated.
    biases = {module.bias for module in block.modules() if isinstance(module, nn.Linear)}
    for name, weight in block.named_parameters():
        if weight not in specs and weight not in biases:
            yield name, weight


def _shard(tensor: TensorParallel, module: nn.Module, key: str, dim: int) -> Specs:
    """Replace a meta parameter by its shard; does nothing if the module has no such one."""
    weight = module._parameters.get(key)
    if weight is None:
        return {}
    start, stop = tensor.shard_range(weight.shape[dim])
    shape = (*weight.shape[:dim], stop - start, *weight.shape[dim + 1 :])
    shard = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)
    module._parameters[key] = shard
    return {shard: ShardSpec(tuple(weight.shape), dim, start, stop)}


def _shard_vocabulary(tensor: TensorParallel, causal_lm: PreTrainedModel, model_name: str) -> Specs:
    embedding = causal_lm.get_input_embeddings()
    head = causal_lm.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise _unsupported(
            model_name, f"its input embedding is a {type(embedding).__name__}, not a table"
        )
    is_tied = head is not None and head.weight is embedding.weight
    rows = range(*tensor.shard_range(embedding.num_embeddings))
    if embedding.padding_idx is not None:
        # As in the full table, the row of the padding token gets no gradient from look-ups.
        is_local = embedding.padding_idx in rows
        embedding.padding_idx = embedding.padding_idx - rows.start if is_local else None
    # The look-up of the model's own class, which may scale the rows.
    embedding.forward = partial(
        _vocab_parallel_embedding, tensor.reduce_output, embedding.forward, rows
    )
    specs = _shard(tensor, embedding, "weight", 0)
    if head is None:
        # A score head is one row, which every rank has.
        return specs
    assert isinstance(head, nn.Linear)
    if is_tied:
        head.weight = embedding.weight
    else:
        specs |= _shard(tensor, head, "weight", 0)
    return specs | _shard(tensor, head, "bias", 0)


def check_sizes(layout: ParallelLayout, causal_lm: PreTrainedModel, model_name: str) -> None:
    """Raise LayoutError for sizes of the model that the ranks cannot share evenly."""
    spec = ModelSpec.from_config(causal_lm.config, model_name)
    problems = model_problems(layout, "dtensor", spec)
    if problems:
        raise LayoutError(problems)


def _check_attention(
    modules: dict[str, nn.Module], blocks: dict[nn.Module, list[_Planned]], model_name: str
) -> None:
    """Raise ConfigError for attention outside of the plan, which would see this rank's tokens."""
    for name, module in modules.items():
        is_attention = name.endswith("attn") or type(module).__name__.endswith("Attention")
        if is_attention and module not in blocks:
            raise _unsupported(
                model_name,
                f"its plan does not list {name}, and with parallel.sequence a rank has a part of"
                " the tokens",
                "parallel.sequence to false, or parallel.tensor to 1",
            )


def _unsupported(
    model_name: str,
    reason: str,
    fix: str = "parallel.tensor to 1, or use a model that docs/models.md lists with tp",
) -> ConfigError:
    return ConfigError(
        f"policy.model_name={model_name} cannot be sharded by tensor parallelism: {reason}; set"
        f" {fix}"
    )


def _transform_input(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> None:
    """Replace the hidden states, positional (MLP) or by keyword (attention), in each call."""
    module.register_forward_pre_hook(partial(_transformed_input, transform), with_kwargs=True)


def _transformed_input(
    transform: Callable[[Tensor], Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (transform(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": transform(kwargs["hidden_states"])}


def _transformed_output(
    transform: Callable[[Tensor], Tensor], module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Replace the output of a layer, [..., D / tp] by [..., D]: a forward hook."""
    return transform(output)


def _row_parallel_linear(
    reduce_output: Callable[[Tensor], Tensor], module: nn.Linear, hidden: Tensor
) -> Tensor:
    """Compute a row-parallel layer; the bias is added once, after the reduction.

    `hidden` [B, S, F] has this rank's F input features. The result is [B, S, D], with sequence
    parallelism [1, T / tp, D].
    """
    out = reduce_output(F.linear(hidden, module.weight))
    return out if module.bias is None else out + module.bias


def _vocab_parallel_embedding(
    reduce_output: Callable[[Tensor], Tensor],
    look_up: Callable[[Tensor], Tensor],
    rows: range,
    input: Tensor,
) -> Tensor:
    """Look up `input` int64 [B, S] where this rank has the row and sum over the ranks.

    The result is [B, S, D], with sequence parallelism this rank's tokens [1, T / tp, D].
    """
    local_ids = input - rows.start
    is_local = (local_ids >= 0) & (local_ids < len(rows))
    # Row 0 stands in for tokens of other ranks; its result is multiplied by 0.
    embedded = look_up(torch.where(is_local, local_ids, 0))
    return reduce_output(embedded * is_local.unsqueeze(-1))
