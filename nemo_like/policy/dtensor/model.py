"""A Hugging Face causal LM, sharded by tensor parallelism and FSDP2, that returns log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import is_local
from nemo_like.config.schema import PolicyConfig
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy import attention
from nemo_like.policy.activation_checkpointing import checkpoint_layers
from nemo_like.policy.compilation import compile_layers
from nemo_like.policy.compute_clock import ComputeClock
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.loading import (
    allocate,
    check_head,
    compute_buffers,
    fsdp_parameter_groups,
)
from nemo_like.policy.dtensor.parallel import ShardSpec
from nemo_like.policy.dtensor.vocab_head import VocabularyHead, output_head
from nemo_like.policy.engine import TokenLogprobs
from nemo_like.policy.model_inputs import ModelInputs
from nemo_like.policy.varlen_kernels import varlen_kernel
from nemo_like.sampling_filter import SamplingFilter


class LogprobModel(nn.Module):
    """Backbone and output embedding under one FSDP root.

    The log-probs are computed inside the root's forward, because only there the output embedding is
    unsharded.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        chunk_size: int,
        groups: Groups,
        *,
        compile_head: bool = False,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.groups = groups
        self._head = VocabularyHead(causal_lm, groups, chunk_size, compile=compile_head)

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
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            **options,
        )
        return self._head(output.last_hidden_state, inputs, temperature, with_entropy, token_filter)


def backbone(causal_lm: PreTrainedModel) -> Callable[..., Any]:
    """Return the model without its output embedding."""
    return causal_lm.base_model


def decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks in order; each is an FSDP unit and a unit of recomputation."""
    names = causal_lm._no_split_modules or []
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(causal_lm).__name__} does not declare its layers (_no_split_modules); use a"
            " Llama- or Qwen-like model"
        )
    return layers


def build_model(
    config: PolicyConfig,
    parallel_layout: ParallelLayout,
    groups: Groups,
    device: torch.device,
    *,
    trainable: bool,
) -> tuple[LogprobModel, dict[str, ShardSpec]]:
    """Build `policy.model_name` with float32 weights on `device`, sharded over `groups`.

    Returns the model and the tensor-parallel spec of each parameter by Hugging Face name. The
    weights are not initialized: `loading.load_weights` reads them. Raises ConfigError for a model
    whose log-probs are not the softmax of its output embedding.
    """
    attention.register()
    causal_lm = _meta_model(config.model_name)
    check_head(causal_lm, config.model_name)
    compute_buffers(causal_lm, device)
    if groups.tensor is not None:
        specs = groups.tensor.parallelize(causal_lm, config.model_name)
    else:
        specs = {
            name: ShardSpec(tuple(weight.shape))
            for name, weight in causal_lm.named_parameters(remove_duplicate=False)
        }
    if not trainable and config.precision == "bfloat16":
        _store_in_bfloat16(causal_lm)
    is_compiled = config.compile == "layers"
    model = LogprobModel(
        causal_lm,
        config.chunk_size(device.type),
        groups,
        compile_head=is_compiled,
    )
    # Evaluation mode also in training: dropout stays off, because the log-probs of one policy must
    # agree between two forwards.
    model.requires_grad_(trainable).eval()
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
    return model, specs


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


def _meta_model(model_name: str) -> PreTrainedModel:
    """Build the architecture on the meta device, with tied weights where the model ties them."""
    model_config = AutoConfig.from_pretrained(
        model_name, trust_remote_code=False, local_files_only=is_local(model_name)
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
        )
    model.tie_weights()
    return model


def _store_in_bfloat16(causal_lm: PreTrainedModel) -> None:
    """Make all parameters bfloat16, but not the buffers of rotary embeddings.

    FSDP computes with bfloat16 copies of float32 weights, so the outputs of a model that is not
    trained stay equal to the bit, in half of the memory.
    """
    for parameter in causal_lm.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def _shard(
    model: LogprobModel,
    mesh: DeviceMesh,
    precision: str,
    *,
    reshard_after_forward: bool,
) -> None:
    """Apply FSDP2: a unit per layer and untied embedding, the root for the rest."""
    param_dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    units = decoder_layers(model.causal_lm)
    embedding = model.causal_lm.get_input_embeddings()
    if embedding.weight is not output_head(model.causal_lm).weight:
        units.append(embedding)
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=mp_policy,
            reshard_after_forward=reshard_after_forward,
        )
    # The root has the output embedding, which the backward needs first: freeing it after the
    # forward saves nothing.
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=mp_policy,
        reshard_after_forward=False,
    )
    for module in fsdp_modules(model):
        # A sum and not a mean: the loss is already divided by the count of the global batch.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
