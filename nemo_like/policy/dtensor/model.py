"""A Hugging Face causal LM as the module that is sharded: microbatch in, log-prob and entropy of
each token out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import is_local
from nemo_like.config.schema import PolicyConfig
from nemo_like.policy import attention
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.parallel import Cut
from nemo_like.policy.engine import TokenLogprobs
from nemo_like.policy.logprobs import VocabShard, scatter_logprobs, token_logprobs
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.sampling_filter import SamplingFilter

WHOLE_BYTES_ON_CPU = 4 << 30
WHOLE_SHARE_OF_GPU = 1 / 8
"""A model whose float32 weights are at most this stays whole on every rank within a step: one
all-gather and one reduce-scatter per optimizer step instead of one per microbatch, for the memory
of its weights and gradients."""


class TokenScorer(nn.Module):
    """Backbone and output embedding under one root, so that FSDP has both at hand where log-probs
    are computed.
    """

    def __init__(self, causal_lm: PreTrainedModel, chunk_size: int, groups: Groups) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_size = chunk_size
        self.groups = groups

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        with_entropy: bool,
        token_filter: SamplingFilter | None,
    ) -> TokenLogprobs:
        """See `TokenLogprobs`; logits are computed only where `inputs.label_mask` is True."""
        tensor = self.groups.tensor
        if tensor is not None and tensor.sequence:
            inputs = inputs.flattened()  # tokens are shared out along one dim
        segments: dict[str, Any] = {}
        if inputs.cu_seqlens is not None:
            segments = {"cu_seqlens": inputs.cu_seqlens, "max_seqlen": inputs.max_seqlen}
        if self.groups.cp is not None:
            segments["cp_group"] = self.groups.cp
        output = backbone(self.causal_lm)(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            **segments,
        )
        hidden = output.last_hidden_state
        if tensor is not None and tensor.sequence:
            hidden = tensor.enter(hidden)
        hidden = hidden.flatten(0, 1)
        positions = inputs.label_mask.nonzero().squeeze(1)
        head = output_head(self.causal_lm)
        outputs = token_logprobs(
            hidden.index_select(0, positions),
            head.weight,
            inputs.labels.index_select(0, positions),
            temperature=temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            bias=head.bias,
            vocab=self._vocabulary(),
            token_filter=token_filter,
        )
        return scatter_logprobs(outputs, positions, len(hidden))

    def _vocabulary(self) -> VocabShard | None:
        tensor = self.groups.tensor
        if tensor is None:
            return None
        start, _ = tensor.span(output_head(self.causal_lm).out_features)
        # The gather of hidden states adds their gradients up where it scatters them; otherwise the
        # log-probs do it.
        return VocabShard(tensor.group, start, partial_hidden_grad=tensor.sequence)


def backbone(causal_lm: PreTrainedModel) -> Callable[..., Any]:
    """The model without its output embedding."""
    return causal_lm.base_model


def output_head(causal_lm: PreTrainedModel) -> nn.Linear:
    """The output embedding, tied or not; raises ConfigError if it is anything but a linear
    layer.
    """
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{type(causal_lm).__name__} has no linear output embedding but {type(head).__name__}"
        )
    return head


def decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, in order: what is sharded and checkpointed one by one."""
    names = causal_lm._no_split_modules or []
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(causal_lm).__name__} does not say what its layers are; use a Llama- or"
            f" Qwen-like model"
        )
    return layers


def build_scorer(
    config: PolicyConfig, groups: Groups, rank: int, device: torch.device, *, trainable: bool
) -> tuple[TokenScorer, dict[str, Cut]]:
    """The model of `policy.model_name` with float32 weights on `device`, as the groups share it,
    and how each is cut.

    Only rank 0 reads the weights; the others build the model without memory and receive it weight
    by weight, layer by layer. Dropout is off and stays off: log-probs of one policy must agree
    between two forwards. Raises ConfigError for a model whose log-probs are not the softmax of its
    output embedding.
    """
    attention.register()
    source = None
    if rank == 0:
        source = _read(config.model_name)
        _check_head(source, config.model_name)
    is_shared = groups.world is not None or groups.fsdp_mesh is not None
    causal_lm = _empty(config.model_name) if is_shared else source
    assert causal_lm is not None, "a process that shares nothing is rank 0"
    if groups.tensor is not None:
        cuts = groups.tensor.apply(causal_lm, config.model_name)
    else:
        cuts = {
            name: Cut(tuple(weight.shape))
            for name, weight in causal_lm.named_parameters(remove_duplicate=False)
        }
    scorer = TokenScorer(causal_lm, config.logprob_chunk_size, groups)
    if not is_shared:
        scorer.to(device)
    scorer.requires_grad_(trainable).eval()
    if config.activation_checkpointing and trainable:
        for layer in decoder_layers(scorer.causal_lm):
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
    if is_shared:
        _fill_and_shard(scorer, _Source(source, cuts, groups, device), device, config.precision)
    return scorer, cuts


def keeps_whole(scorer: nn.Module, device: torch.device) -> bool:
    """Whether the model is small enough to stay unsharded between the microbatches of a step."""
    limit = WHOLE_BYTES_ON_CPU
    if device.type == "cuda":
        limit = WHOLE_SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory
    return 4 * sum(parameter.numel() for parameter in scorer.parameters()) <= limit


def fsdp_modules(scorer: nn.Module) -> list[FSDPModule]:
    """Every module FSDP shards as a unit; none without FSDP."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def exclude_fsdp_communication(modules: Sequence[FSDPModule], clock: ComputeClock) -> None:
    """Stop `clock` wherever FSDP's collectives are waited for: all-gathers of weights (on CPU their
    start waits, on CUDA their end), reduce-scatters of gradients of a module, and the end of all of
    them after the backward.
    """
    for module in modules:
        state: Any = module._get_fsdp_state()
        # FSDP queues this method as a callback of each backward.
        state._root_post_backward_final_callback = clock.excluded(
            state._root_post_backward_final_callback
        )
        for group in state._fsdp_param_groups:
            group.unshard = clock.excluded(group.unshard)
            group.wait_for_unshard = clock.excluded(group.wait_for_unshard)
            group.post_backward = clock.excluded(group.post_backward)


def _read(model_name: str) -> PreTrainedModel:
    """The weights in float32, on the CPU; raises ConfigError if the files lack some of them."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_name,
        dtype=torch.float32,
        attn_implementation=attention.IMPLEMENTATION,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=is_local(model_name),
        output_loading_info=True,
    )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"policy.model_name={model_name} lacks {len(missing)} weights, among them {missing[0]}"
        )
    return model.eval()


def _empty(model_name: str) -> PreTrainedModel:
    """The architecture on the meta device, tied where the model ties."""
    model_config = AutoConfig.from_pretrained(
        model_name, trust_remote_code=False, local_files_only=is_local(model_name)
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
        )
    model.tie_weights()
    return model


@torch.no_grad()
def _check_head(causal_lm: PreTrainedModel, model_name: str) -> None:
    """Raises ConfigError if the logits are more than hidden states times output embedding (soft
    caps, scales).
    """
    head = output_head(causal_lm)
    input_ids = torch.arange(8)[None] % head.weight.shape[0]
    logits = causal_lm(input_ids=input_ids, use_cache=False).logits
    expected = head(backbone(causal_lm)(input_ids=input_ids, use_cache=False).last_hidden_state)
    if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
        raise ConfigError(
            f"policy.model_name={model_name}: the logits of {type(causal_lm).__name__} are not"
            f" hidden states times output"
            " embedding (a soft cap or a scale), so its log-probs would be wrong; use a model"
            " without one"
        )


def _fill_and_shard(
    scorer: TokenScorer, source: _Source, device: torch.device, precision: str
) -> None:
    """FSDP2: one unit per layer, one for an untied input embedding, the root for the rest. Without
    a mesh, only fill.
    """
    mesh = scorer.groups.fsdp_mesh
    if mesh is None:
        source.fill(scorer, scorer)
        return
    param_dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    reshard = not keeps_whole(scorer, device)
    units = decoder_layers(scorer.causal_lm)
    embedding, head = scorer.causal_lm.get_input_embeddings(), output_head(scorer.causal_lm)
    if embedding.weight is not head.weight:
        units.append(embedding)
    for unit in units:
        source.fill(scorer, unit)
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    source.fill(scorer, scorer)
    # The root holds the output embedding, which the backward needs first: freeing it after the
    # forward saves nothing.
    fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(scorer):
        # A sum: the loss is already divided by what the whole global batch holds.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


class _Source:
    """Rank 0's weights and buffers, broadcast one at a time into a model on the meta device; each
    rank keeps its part.
    """

    def __init__(
        self,
        source: PreTrainedModel | None,
        cuts: dict[str, Cut],
        groups: Groups,
        device: torch.device,
    ) -> None:
        self._cuts = cuts
        self._group = groups.world
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        if source is not None:
            self._tensors = dict(source.named_parameters(remove_duplicate=False))
            self._tensors |= dict(source.named_buffers(remove_duplicate=False))

    def fill(self, scorer: TokenScorer, unit: nn.Module) -> None:
        """Give `unit` (a module inside `scorer`) real tensors wherever it is still on the meta
        device.
        """
        names = {module: name for name, module in scorer.causal_lm.named_modules()}
        filled: dict[int, Tensor] = {}
        for module in unit.modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in filled:  # a tied weight is one tensor in two places
                    name = f"{names[module]}.{key}" if names[module] else key
                    filled[id(tensor)] = self._receive(name, tensor)
                setattr(module, key, filled[id(tensor)])

    def _receive(self, name: str, like: Tensor) -> Tensor:
        cut = self._cuts.get(name, Cut(tuple(like.shape)))
        value = torch.empty(cut.full_shape, dtype=like.dtype, device=self._device)
        if self._tensors:
            value.copy_(self._tensors[name].detach())
        if self._group is not None:
            dist.broadcast(value, group=self._group, group_src=0)
        value = cut.of(value)
        return (
            nn.Parameter(value, requires_grad=like.requires_grad)
            if isinstance(like, nn.Parameter)
            else value
        )
