"""A Hugging Face causal LM, sharded by tensor parallelism and FSDP2, that returns log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import PolicyConfig
from nemo_like.models.output_head import meta_model
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.decoder_layers import (
    LoraState,
    checkpoint_layers,
    compile_layers,
    frozen_names,
)
from nemo_like.policy.device import ComputeClock
from nemo_like.policy.dtensor.loading import (
    VocabularyHead,
    allocate,
    check_head,
    compute_buffers,
    fsdp_parameter_groups,
    is_tied,
)
from nemo_like.policy.dtensor.lora import add_adapters
from nemo_like.policy.dtensor.parallel import Groups, ShardSpec
from nemo_like.policy.dtensor.quantized import quantize_layers
from nemo_like.policy.heads.row_outputs import ScoreHead, SequenceShare
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.attention import varlen_kernel
from nemo_like.policy.inputs.model_inputs import ModelInputs, TokenLogprobs
from nemo_like.sampling_filter import SamplingFilter


class LogprobModel(nn.Module):
    """Backbone and output head under one FSDP root.

    The log-probs are computed inside the root's forward, because only there the output embedding is
    unsharded.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, head: VocabularyHead | ScoreHead, groups: Groups
    ) -> None:
        """`causal_lm` has a score head in place of the output embedding if `head` is one."""
        super().__init__()
        self.causal_lm = causal_lm
        self.groups = groups
        self._head = head

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
            # Sequence parallelism shards the tokens along one dim.
            inputs = inputs.flattened()
        options: dict[str, Any] = {}
        if inputs.cu_seqlens is not None:
            options["cu_seqlens"] = inputs.cu_seqlens
            options["max_seqlen"] = inputs.max_seqlen
        if self.groups.cp is not None:
            options["cp_group"] = self.groups.cp
        output = backbone(self.causal_lm)(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **options
        )
        return self._head(output.last_hidden_state, inputs, temperature, with_entropy, token_filter)


def backbone(causal_lm: PreTrainedModel) -> Callable[..., Any]:
    """Return the model without its output embedding."""
    return causal_lm.base_model


def decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks in order; each is an FSDP unit and a unit of recomputation."""
    names = set(causal_lm._no_split_modules or [])
    layers = []
    for module in causal_lm.modules():
        # FSDP makes the class of a unit a subclass of it.
        if names.intersection(each.__name__ for each in type(module).__mro__):
            layers.append(module)
    if not layers:
        raise ConfigError(
            f"{type(causal_lm).__name__} does not declare its layers (_no_split_modules); use a"
            " Llama- or Qwen-like model"
        )
    return layers


def build_model(
    config: PolicyConfig,
    model_config: PretrainedConfig,
    parallel_layout: ParallelLayout,
    groups: Groups,
    device: torch.device,
    *,
    trainable: bool,
) -> tuple[LogprobModel, dict[str, ShardSpec], LoraState | None]:
    """Build the model of `model_config` with float32 weights on `device`, sharded over `groups`.

    Returns the model, the tensor-parallel spec of each parameter by Hugging Face name, and the
    state of its LoRA adapters, which a trainable model has if `config.lora` is enabled. Nothing is
    initialized: `loading.load_weights` reads the weights, `lora.initialize` sets the adapters.
    Raises ConfigError for a model whose log-probs are not the softmax of its output embedding.
    """
    attention.register()
    causal_lm = meta_model(
        model_config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
    )
    has_vocabulary = ModelSpec.from_config(model_config).head == "vocabulary"
    if has_vocabulary:
        check_head(causal_lm, config.model_name)
    compute_buffers(causal_lm, device)
    if groups.tensor is not None:
        specs = groups.tensor.parallelize(causal_lm, config.model_name)
    else:
        specs = {
            name: ShardSpec(tuple(weight.shape))
            for name, weight in causal_lm.named_parameters(remove_duplicate=False)
        }
    has_adapters = trainable and config.lora.enabled
    if has_adapters and config.lora.is_quantized:
        quantize_layers(causal_lm, specs, groups.tensor, device)
    frozen = _frozen_parameters(causal_lm, config, trainable=trainable)
    if config.precision == "bfloat16":
        _store_in_bfloat16(frozen)
    for parameter in frozen:
        parameter.requires_grad_(False)
    lora = None
    if has_adapters:
        # Float32 and trainable, unlike the weights beside them.
        lora = add_adapters(causal_lm, decoder_layers(causal_lm), config.lora, specs, groups.tensor)
    is_compiled = config.compile == "layers"
    share = None
    if groups.tensor is not None and groups.tensor.sequence:
        share = SequenceShare(groups.tensor.group, groups.tensor.rank)
    head = ScoreHead(causal_lm, share)
    if has_vocabulary:
        chunk_size = config.chunk_size(device.type)
        head = VocabularyHead(causal_lm, groups, chunk_size, compile=is_compiled)
    model = LogprobModel(causal_lm, head, groups)
    # Evaluation mode also in training: dropout stays off, because the log-probs of one policy must
    # agree between two forwards.
    model.eval()
    if config.activation_checkpointing != "none" and trainable:
        checkpoint_layers(decoder_layers(model.causal_lm), config.activation_checkpointing)
    if is_compiled:
        if device.type == "cuda":
            # The choice of a kernel cannot be traced.
            varlen_kernel()
        compile_layers(decoder_layers(model.causal_lm))
    if groups.fsdp_mesh is not None:
        reshard = not keep_unsharded(model, parallel_layout)
        _shard(model, groups.fsdp_mesh, config.precision, reshard_after_forward=reshard)
    allocate(model, device)
    return model, specs, lora


def keep_unsharded(model: LogprobModel, parallel_layout: ParallelLayout) -> bool:
    """Return True if the model stays unsharded between the microbatches of a step."""
    # Not from the parameters themselves: the driver plans with the same rule before they exist.
    spec = ModelSpec.from_config(model.causal_lm.config)
    return parallel_layout.keeps_unsharded("dtensor", spec.num_params)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every FSDP unit; none without FSDP."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def exclude_fsdp_communication(modules: Sequence[FSDPModule], clock: ComputeClock) -> None:
    """Stop `clock` while a rank waits for a collective of FSDP.

    These are all-gathers of weights (on CPU their start waits, on CUDA their end), reduce-scatters
    of a unit's gradients, and the wait for all of them after the backward.
    """
    for module in modules:
        state: Any = module._get_fsdp_state()
        # FSDP queues this method as a callback of each backward.
        state._root_post_backward_final_callback = clock.excluded(
            state._root_post_backward_final_callback
        )
        for group in fsdp_parameter_groups(module):
            group.unshard = clock.excluded(group.unshard)
            group.wait_for_unshard = clock.excluded(group.wait_for_unshard)
            group.post_backward = clock.excluded(group.post_backward)


def _frozen_parameters(
    causal_lm: PreTrainedModel, config: PolicyConfig, *, trainable: bool
) -> list[nn.Parameter]:
    """Return the weights that have no gradient: all, or those that `policy.freeze` matches.

    With LoRA these are all but a score head, which has no adapter.
    """
    if not trainable:
        return list(causal_lm.parameters())
    if config.lora.enabled:
        return [weight for name, weight in causal_lm.named_parameters() if name != SCORE_WEIGHT]
    if not config.freeze:
        return []
    frozen = frozen_names(causal_lm, config.freeze)
    return [weight for name, weight in causal_lm.named_parameters() if name in frozen]


def _store_in_bfloat16(parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters bfloat16.

    FSDP computes with bfloat16 copies of float32 weights, so the outputs of a weight that is not
    trained stay equal to the bit, in half of the memory.
    """
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)


def _shard(
    model: LogprobModel, mesh: DeviceMesh, precision: str, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2: a unit per layer and untied embedding, the root for the rest."""
    param_dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    units = decoder_layers(model.causal_lm)
    if not is_tied(model.causal_lm):
        units.append(model.causal_lm.get_input_embeddings())
    for unit in units:
        fully_shard(
            unit, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard_after_forward
        )
    # The root has the output embedding, which the backward needs first: freeing it after the
    # forward saves nothing.
    fully_shard(model, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # A sum and not a mean: the loss is already divided by the count of the global batch.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
