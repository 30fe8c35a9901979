"""A Hugging Face causal LM as the module FSDP2 shards: microbatch in, log-prob and entropy of each token out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.schema import PolicyConfig
from nemo_like.data.packing.layout import ModelInputs
from nemo_like.policy import attention
from nemo_like.policy.logprobs import token_logprobs

WHOLE_BYTES_ON_CPU = 4 << 30
WHOLE_SHARE_OF_GPU = 1 / 8
"""A model whose float32 weights are at most this stays whole on every rank within a step: one all-gather and one
reduce-scatter per optimizer step instead of one per microbatch, for the memory of its weights and gradients."""


class TokenScorer(nn.Module):
    """Backbone and output embedding under one root, so that FSDP has both at hand where log-probs are computed."""

    def __init__(self, causal_lm: PreTrainedModel, chunk_size: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_size = chunk_size

    def forward(self, inputs: ModelInputs, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """float32 [T] each, 0 where `inputs.label_mask` is False; only the other positions meet the vocabulary."""
        segments: dict[str, Any] = {}
        if inputs.cu_seqlens is not None:
            segments = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": inputs.max_seqlen}
        output = backbone(self.causal_lm)(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **segments
        )
        hidden = output.last_hidden_state.flatten(0, 1)
        positions = inputs.label_mask.nonzero().squeeze(1)
        head = output_head(self.causal_lm)
        logprobs, entropy = token_logprobs(
            hidden.index_select(0, positions),
            head.weight,
            inputs.labels.index_select(0, positions),
            temperature=temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            bias=head.bias,
        )
        spread = partial(_spread, positions=positions, size=len(hidden))
        return spread(logprobs), None if entropy is None else spread(entropy)


def backbone(causal_lm: PreTrainedModel) -> Callable[..., Any]:
    """The model without its output embedding."""
    return causal_lm.base_model


def output_head(causal_lm: PreTrainedModel) -> nn.Linear:
    """The output embedding, tied or not; raises ValueError if it is anything but a linear layer."""
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(causal_lm).__name__} has no linear output embedding but {type(head).__name__}")
    return head


def decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, in order: what is sharded and checkpointed one by one."""
    names = causal_lm._no_split_modules or []
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(f"{type(causal_lm).__name__} does not say what its layers are; use a Llama- or Qwen-like model")
    return layers


def build_scorer(config: PolicyConfig, mesh: DeviceMesh | None, device: torch.device, *, trainable: bool) -> TokenScorer:
    """The model of `policy.model_name` with float32 weights on `device`, sharded over `mesh` unless that is None.

    Only rank 0 of the mesh reads the weights; the others build the model without memory and receive it layer by layer.
    Dropout is off and stays off: log-probs of one policy must agree between two forwards. Raises ValueError for a model
    whose log-probs are not the softmax of its output embedding.
    """
    attention.register()
    source = None
    if mesh is None or mesh.get_rank() == 0:
        source = _read(config.model_name)
        _check_head(source, config.model_name)
    if mesh is None:
        assert source is not None
        scorer = TokenScorer(source.to(device), config.logprob_chunk_size)  # type: ignore[arg-type]
    else:
        scorer = TokenScorer(_empty(config.model_name), config.logprob_chunk_size)
    scorer.requires_grad_(trainable).eval()
    if config.activation_checkpointing and trainable:
        for layer in decoder_layers(scorer.causal_lm):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    if mesh is not None:
        _shard(scorer, mesh, device, source, config.precision)
    return scorer


def keeps_whole(scorer: nn.Module, device: torch.device) -> bool:
    """Whether the model is small enough to stay unsharded between the microbatches of a step."""
    limit = WHOLE_BYTES_ON_CPU
    if device.type == "cuda":
        limit = WHOLE_SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory
    return 4 * sum(parameter.numel() for parameter in scorer.parameters()) <= limit


def fsdp_modules(scorer: nn.Module) -> list[FSDPModule]:
    """Every module FSDP shards as a unit; none without FSDP."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def _spread(values: Tensor, positions: Tensor, size: int) -> Tensor:
    """[size] with `values` at `positions` and 0 elsewhere."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_copy(0, positions, values)


def _read(model_name: str) -> PreTrainedModel:
    """The weights in float32, on the CPU; raises ValueError if the files lack some of them."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_name,
        dtype=torch.float32,
        attn_implementation=attention.IMPLEMENTATION,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"policy.model_name={model_name} lacks {len(missing)} weights, among them {missing[0]}")
    return model.eval()


def _empty(model_name: str) -> PreTrainedModel:
    """The architecture on the meta device, tied where the model ties."""
    model_config = AutoConfig.from_pretrained(model_name, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION)
    model.tie_weights()
    return model


@torch.no_grad()
def _check_head(causal_lm: PreTrainedModel, model_name: str) -> None:
    """Raises ValueError if the logits are more than hidden states times output embedding (soft caps, scales)."""
    head = output_head(causal_lm)
    input_ids = torch.arange(8)[None] % head.weight.shape[0]
    logits = causal_lm(input_ids=input_ids, use_cache=False).logits
    expected = head(backbone(causal_lm)(input_ids=input_ids, use_cache=False).last_hidden_state)
    if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
        raise ValueError(
            f"policy.model_name={model_name}: the logits of {type(causal_lm).__name__} are not hidden states times output"
            " embedding (a soft cap or a scale), so its log-probs would be wrong; use a model without one"
        )


def _shard(scorer: TokenScorer, mesh: DeviceMesh, device: torch.device, source: PreTrainedModel | None, precision: str) -> None:
    """FSDP2: one unit per layer, one for an untied input embedding, the root for the rest."""
    param_dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    reshard = not keeps_whole(scorer, device)
    units = decoder_layers(scorer.causal_lm)
    embedding, head = scorer.causal_lm.get_input_embeddings(), output_head(scorer.causal_lm)
    if embedding.weight is not head.weight:
        units.append(embedding)
    values = _Source(source, mesh, device)
    for unit in units:
        values.fill(scorer, unit)
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    values.fill(scorer, scorer)
    # The root holds the output embedding, which the backward needs first: freeing it after the forward saves nothing.
    fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(scorer):
        # A sum: the loss is already divided by what the whole global batch holds.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class _Source:
    """Rank 0's weights and buffers, broadcast one at a time into a model on the meta device."""

    def __init__(self, source: PreTrainedModel | None, mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        if source is not None:
            self._tensors = dict(source.named_parameters(prefix="causal_lm", remove_duplicate=False))
            self._tensors |= dict(source.named_buffers(prefix="causal_lm", remove_duplicate=False))

    def fill(self, root: nn.Module, unit: nn.Module) -> None:
        """Give `unit` (a module inside `root`) real tensors wherever it is still on the meta device."""
        names = {module: name for name, module in root.named_modules()}
        filled: dict[int, Tensor] = {}
        for module in unit.modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in filled:  # a tied weight is one tensor in two places
                    filled[id(tensor)] = self._receive(f"{names[module]}.{key}", tensor)
                setattr(module, key, filled[id(tensor)])

    def _receive(self, name: str, like: Tensor) -> Tensor:
        value = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        if self._tensors:
            value.copy_(self._tensors[name].detach())
        if self._mesh.size() > 1:
            dist.broadcast(value, group=self._mesh.get_group(), group_src=0)
        return nn.Parameter(value, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else value
