"""Loading of weights into sharded parameters, and the vocabulary-parallel output embedding.

No rank has more than its shards and one block of a weight in memory, and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from nemo_like.config.errors import ConfigError
from nemo_like.distributed import activity
from nemo_like.policy.checkpoint.hf_reader import ModelFiles, open_model
from nemo_like.policy.dtensor.parallel import Groups
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.dtensor.quantized import QuantizedParameter
from nemo_like.policy.heads.logit_chunks import VocabShard
from nemo_like.policy.heads.logprobs import label_logprobs
from nemo_like.policy.inputs.model_inputs import ModelInputs, TokenLogprobs
from nemo_like.sampling_filter import SamplingFilter


class VocabularyHead:
    """The output embedding, tied or not."""

    def __init__(
        self, causal_lm: PreTrainedModel, groups: Groups, chunk_size: int, *, compile: bool
    ) -> None:
        self._causal_lm = causal_lm
        self._tensor = groups.tensor
        self._chunk_size = chunk_size
        self._compile = compile

    def __call__(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `label_logprobs`; `hidden` is [B, S, D], with sequence parallelism [1, T / tp, D]."""
        if self._tensor is not None and self._tensor.sequence:
            hidden = self._tensor.gather_input(hidden)
        # Looked up in each call: FSDP replaces the parameters of its modules.
        head = output_head(self._causal_lm)
        return label_logprobs(
            hidden.flatten(0, 1),
            head.weight,
            inputs,
            temperature=temperature,
            chunk_size=self._chunk_size,
            with_entropy=with_entropy,
            token_filter=token_filter,
            bias=head.bias,
            vocab=self._vocab_shard(head),
            compile=self._compile,
        )

    def _vocab_shard(self, head: nn.Linear) -> VocabShard | None:
        tensor = self._tensor
        if tensor is None:
            return None
        start, _ = tensor.shard_range(head.out_features)
        # With sequence parallelism the backward of the gather sums the ranks' gradients; without it
        # `token_logprobs` does.
        return VocabShard(tensor.group, start, partial_hidden_grad=tensor.sequence)


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the input embedding is the output embedding; False with a score head."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def output_head(causal_lm: PreTrainedModel) -> nn.Linear:
    """Return the output embedding, tied or not; raises ConfigError if it is no linear layer."""
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(causal_lm).__name__} has no linear output embedding but {type(head).__name__}"
        )
    return head


_CHECKED_LOGIT_STD = 30.0
"""Large enough that a soft cap (Gemma-2 caps at 30) changes the logits of `check_head`."""


@torch.no_grad()
def check_head(causal_lm: PreTrainedModel, model_name: str) -> None:
    """Raise ConfigError unless the logits are hidden states times output embedding.

    Some models scale their logits or apply a soft cap, which the chunked log-probs leave out. The
    model may be on the meta device: what it does after its backbone is computed with random hidden
    states and a small output embedding.
    """
    head = output_head(causal_lm)
    backbone = causal_lm.base_model
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 8, head.in_features, generator=generator)
    small_head = nn.Linear(head.in_features, 8, bias=head.bias is not None)
    for parameter in small_head.parameters():
        parameter.normal_(generator=generator)
    small_head.weight.mul_(_CHECKED_LOGIT_STD / head.in_features**0.5)

    def return_hidden(*args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        """Return `hidden`, [1, 8, D], as the output of the backbone."""
        # The class has the fields of a dense model's output as well.
        return MoeModelOutputWithPast(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]

    try:
        backbone.forward = return_hidden
        causal_lm.set_output_embeddings(small_head)
        logits = causal_lm(input_ids=torch.arange(8)[None], use_cache=False).logits
    finally:
        del backbone.forward
        causal_lm.set_output_embeddings(head)
    if not torch.allclose(logits, small_head(hidden), rtol=1e-4, atol=1e-4):
        raise ConfigError(
            f"policy.model_name={model_name}: the logits of {type(causal_lm).__name__} are not"
            " hidden states times output embedding (a soft cap or a scale), so its log-probs would"
            " be wrong; use a model without one"
        )


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace the meta parameters of `model` by uninitialized memory on `device`.

    Of a parameter that FSDP shards only this rank's shard is allocated. A tied weight is one
    parameter in two modules and stays one.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in allocated:
                memory = torch.empty_like(parameter, device=device)
                allocated[parameter] = nn.Parameter(memory, parameter.requires_grad)
            module._parameters[key] = allocated[parameter]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_parameter_groups(module):
                for fsdp_parameter in group.fsdp_params:
                    # FSDP pads shards to equal sizes, which moves the smaller ones.
                    fsdp_parameter.reset_sharded_param()


def fsdp_parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of an FSDP unit; none if it has no parameters of its own."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # Releases before the support of several meshes in a unit, such as torch 2.11.
    group = state._fsdp_param_group
    return [] if group is None else [group]


@torch.no_grad()
def compute_buffers(causal_lm: PreTrainedModel, device: torch.device) -> None:
    """Replace the meta buffers, such as the frequencies of rotary embeddings, by their values.

    `causal_lm` is on the meta device. Values that its class does not compute stay NaN until
    `load_weights`.
    """
    for module in causal_lm.modules():
        has_buffers = False
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _unknown_like(buffer, device)
                has_buffers = True
        if has_buffers:
            # Also initializes the module's own weights, without effect: they have no memory yet.
            causal_lm._init_weights(module)


@torch.no_grad()
def load_weights(
    model_name: str,
    causal_lm: PreTrainedModel,
    parameters: Sequence[ShardedParameter],
    initial: Mapping[str, Tensor],
) -> None:
    """Read this rank's shard of every weight of `model_name`, converted to float32 or to NF4.

    The weights `initial` [*shape] are not in the files. Raises ConfigError if the files lack a
    weight or have it in another shape, or if a buffer is neither in the files nor computed by
    transformers.
    """
    names = _names_of_parameters(causal_lm)
    for sharded in parameters:
        if sharded.name in initial:
            block = zip(*sharded.block(), strict=True)
            index = tuple(slice(start, start + size) for start, size in block)
            local_shard(sharded.parameter).copy_(initial[sharded.name][index])
    parameters = [sharded for sharded in parameters if sharded.name not in initial]
    with open_model(model_name) as files:
        stored_names = {}
        for sharded in parameters:
            candidates = names.get(sharded.parameter, [sharded.name])
            # A tied weight may be stored under any of its names.
            stored = next((name for name in candidates if name in files), sharded.name)
            stored_names[sharded.name] = stored
        shapes = {stored_names[sharded.name]: sharded.spec.full_shape for sharded in parameters}
        files.check(shapes)
        for sharded in parameters:
            activity.note(f"reading {sharded.name}")
            if isinstance(sharded, QuantizedParameter):
                sharded.read(files, stored_names[sharded.name])
                continue
            offset, _ = sharded.block()
            files.read_into(local_shard(sharded.parameter), stored_names[sharded.name], offset)
        _load_buffers(causal_lm, files)


def _load_buffers(causal_lm: PreTrainedModel, files: ModelFiles) -> None:
    """Read the buffers that the files have. Raises ConfigError for one without values."""
    for name, buffer in causal_lm.named_buffers():
        if name in files:
            files.read_into(buffer, name, (0,) * buffer.ndim)
        elif bool(buffer.isnan().any()):
            raise ConfigError(
                f"policy.model_name={files.model_name}: the buffer {name} of"
                f" {type(causal_lm).__name__} is neither in its files nor computed by transformers,"
                " so the model cannot be loaded; use a Llama- or Qwen-like model"
            )


def _names_of_parameters(causal_lm: PreTrainedModel) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter; a tied weight has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _unknown_like(buffer: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like `buffer` [...] on `device`, NaN if it is floating-point, else 0."""
    if buffer.is_floating_point():
        return torch.full_like(buffer, torch.nan, device=device)
    return torch.zeros_like(buffer, device=device)
