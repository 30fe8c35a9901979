"""A Hugging Face causal LM, sharded by tensor parallelism and FSDP2, that returns log-probs.

Weights are loaded shard by shard: no rank has more than its shards and one block of a weight in
memory, and no rank waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.config.schema import PolicyConfig
from nemo_like.distributed import activity
from nemo_like.integer_math import block_index
from nemo_like.models.output_head import meta_model
from nemo_like.models.routers import RouterReplay
from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.checkpoint.hf_reader import ModelFiles, open_model
from nemo_like.policy.decoder_layers import (
    checkpoint_layers,
    compile_layers,
    frozen_names,
    layers_are_compiled,
)
from nemo_like.policy.device import ComputeClock
from nemo_like.policy.dtensor import vision
from nemo_like.policy.dtensor.experts import ExpertLoads, distribute_all, expert_modules
from nemo_like.policy.dtensor.lora import QuantizedParameter, add_adapters, quantize_layers
from nemo_like.policy.dtensor.parallel import Groups, ShardSpec, Specs
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.dtensor.row_rope import RowRope
from nemo_like.policy.dtensor.tensor_plan import check_sizes, parallelize
from nemo_like.policy.heads.logit_chunks import capped
from nemo_like.policy.heads.logprobs import label_logprobs
from nemo_like.policy.heads.row_outputs import ScoreHead, SequenceShare
from nemo_like.policy.inputs import attention
from nemo_like.policy.inputs.model_inputs import ModelInputs
from nemo_like.policy.inputs.stateful_layers import reset_states_between_rows
from nemo_like.policy.inputs.varlen_kernels import varlen_kernel
from nemo_like.policy.lora import AdapterState
from nemo_like.policy.outputs import (
    LogitOptions,
    OutputEmbedding,
    TokenDistribution,
    TokenLogprobs,
    VocabShard,
)

_CHECKED_LOGIT_STD = 30.0
"""Large enough that a soft cap, such as 30, changes the logits of `check_head`."""


class VocabularyHead:
    """The output embedding, tied or not."""

    def __init__(
        self, causal_lm: PreTrainedModel, groups: Groups, chunk_size: int, *, compile: bool
    ) -> None:
        self._causal_lm = causal_lm
        self._tensor = groups.tensor
        spec = ModelSpec.from_config(causal_lm.config)
        self._options = LogitOptions(
            chunk_size=chunk_size,
            scale=spec.logit_scale,
            softcap=spec.logit_softcap,
            is_compiled=compile,
        )

    def __call__(
        self, hidden: Tensor, inputs: ModelInputs, distribution: TokenDistribution
    ) -> TokenLogprobs:
        """See `label_logprobs`; `hidden` is [B, S, D], with sequence parallelism [1, T / tp, D]."""
        if self._tensor is not None and self._tensor.sequence:
            hidden = self._tensor.gather_input(hidden)
        # Looked up in each call: FSDP replaces the parameters of its modules.
        head = output_head(self._causal_lm)
        options = dataclasses.replace(self._options, vocab=self._vocab_shard(head))
        embedding = OutputEmbedding(
            hidden=hidden.flatten(0, 1), weight=head.weight, bias=head.bias, options=options
        )
        return label_logprobs(embedding, inputs, distribution)

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


@torch.no_grad()
def check_head(causal_lm: PreTrainedModel, model_name: str) -> None:
    """Raise ConfigError unless the logits are those that `VocabularyHead` computes.

    They are hidden states times output embedding, with the scale and the soft cap of the spec. The
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
        output: Any = MoeModelOutputWithPast(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]
        output.cross_attentions = output.rope_deltas = None
        return output

    try:
        backbone.forward = return_hidden
        causal_lm.set_output_embeddings(small_head)
        logits = causal_lm(input_ids=torch.arange(8)[None], use_cache=False).logits.cpu()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise not_callable(causal_lm, error) from error
    finally:
        del backbone.forward
        causal_lm.set_output_embeddings(head)
    spec = ModelSpec.from_config(causal_lm.config)
    expected = small_head(hidden) * spec.logit_scale
    if spec.logit_softcap is not None:
        expected = capped(expected, spec.logit_softcap)
    if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
        raise ConfigError(
            f"policy.model_name={model_name}: {type(causal_lm).__name__} changes its logits in a"
            " way that its config.json does not describe, so its log-probs would be wrong; use"
            " another model"
        )


def not_callable(causal_lm: PreTrainedModel, error: Exception) -> ConfigError:
    """Return the error about a model whose forward has other arguments, which raised `error`."""
    return ConfigError(
        f"policy.model_name: {type(causal_lm).__name__} of transformers is not a backbone that"
        " computes hidden states without an attention mask and an output embedding after it"
        f" ({error_text(error)}); use another model, such as a Llama- or Qwen-like one"
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
    for sharded in parameters:
        if sharded.name in initial:
            index = block_index(*sharded.block())
            local_shard(sharded.parameter).copy_(initial[sharded.name][index])
    parameters = [sharded for sharded in parameters if sharded.name not in initial]
    with open_model(model_name, causal_lm) as files:
        files.check({sharded.name: sharded.spec.full_shape for sharded in parameters})
        for sharded in parameters:
            activity.note(f"reading {sharded.name}")
            if isinstance(sharded, QuantizedParameter):
                sharded.read(files, sharded.name)
                continue
            offset, _ = sharded.block()
            files.read_into(local_shard(sharded.parameter), sharded.name, offset)
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


def _unknown_like(buffer: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like `buffer` [...] on `device`, NaN if it is floating-point, else 0."""
    if buffer.is_floating_point():
        return torch.full_like(buffer, torch.nan, device=device)
    return torch.zeros_like(buffer, device=device)


class LogprobModel(nn.Module):
    """Backbone and output head under one FSDP root.

    The log-probs are computed inside the root's forward, because only there the output embedding is
    unsharded.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        head: VocabularyHead | ScoreHead,
        groups: Groups,
        expert_loads: ExpertLoads,
    ) -> None:
        """`causal_lm` has a score head in place of the output embedding if `head` is one."""
        super().__init__()
        self.causal_lm = causal_lm
        self.groups = groups
        self.expert_loads = expert_loads
        self._head = head
        self._is_composite = vision.is_composite(causal_lm)
        self._replay = RouterReplay(causal_lm)
        self._rope = RowRope(causal_lm, ModelSpec.from_config(causal_lm.config).rope_threshold)

    def forward(self, inputs: ModelInputs, distribution: TokenDistribution) -> TokenLogprobs:
        """See `TokenLogprobs`; logits are computed only where `inputs.label_mask` is True."""
        tensor = self.groups.tensor
        experts = inputs.routed_experts
        if experts is not None and tensor is not None and tensor.sequence:
            # The routers have this rank's tokens only.
            experts = experts.chunk(tensor.size)[tensor.rank]
        self._replay.set(experts)
        if tensor is not None and tensor.sequence:
            # Sequence parallelism shards the tokens along one dim.
            inputs = inputs.flattened()
        self._rope.set(inputs)
        options: dict[str, Any] = {}
        if inputs.cu_seqlens is not None:
            options["cu_seqlens"] = inputs.cu_seqlens
            options["max_seqlen"] = inputs.max_seqlen
        if inputs.exchange is not None:
            options["exchange"] = inputs.exchange
        if (group := self.groups.cp_group(inputs.cp_size)) is not None:
            options["cp_group"] = group
        if self._is_composite:
            hidden = vision.hidden_states(
                self.causal_lm,
                inputs.input_ids,
                inputs.position_ids,
                inputs.vision,
                tensor.rank if tensor is not None and tensor.sequence else None,
                **options,
            )
            return self._head(hidden, inputs, distribution)
        output = backbone(self.causal_lm)(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **options
        )
        return self._head(output.last_hidden_state, inputs, distribution)


def backbone(causal_lm: PreTrainedModel) -> Callable[..., Any]:
    """Return the model without its output embedding."""
    return causal_lm.base_model


def decoder_layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks in order; each is an FSDP unit and a unit of recomputation.

    Of a composite model they are those of the language model.
    """
    names = set(causal_lm._no_split_modules or [])
    is_composite = vision.is_composite(causal_lm)
    layers = []
    for module in (vision.language_model(causal_lm) if is_composite else causal_lm).modules():
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
    config: PolicyConfig, model_config: PretrainedConfig, groups: Groups, *, trainable: bool
) -> tuple[LogprobModel, dict[str, ShardSpec], AdapterState | None]:
    """Build the model of `model_config` with float32 weights, sharded over `groups`.

    Returns the model, the tensor-parallel spec of each parameter by Hugging Face name, and the
    state of the adapters of a trainable model. Nothing is initialized: `load_weights` reads the
    weights, `lora.initialize` sets the adapters.
    Raises ConfigError for a model whose log-probs are not the softmax of its output embedding.
    """
    device = groups.device
    attention.register()
    causal_lm = _meta_model(config, model_config)
    if vision.is_composite(causal_lm):
        vision.prepare(causal_lm)
    spec = ModelSpec.from_config(model_config)
    has_vocabulary = spec.head == "vocabulary"
    if has_vocabulary:
        check_head(causal_lm, config.model_name)
    compute_buffers(causal_lm, device)
    num_stateful = reset_states_between_rows(causal_lm)
    is_dense = spec.moe is None and num_stateful == 0
    is_compiled = layers_are_compiled(config, device.type, is_dense=is_dense)
    # A graph with recomputation cannot change the counts.
    counted = [] if is_compiled else list(expert_modules(causal_lm).values())
    expert_loads = ExpertLoads(counted, device)
    # A teacher in the layout of a policy with experts may be dense.
    expert = None if spec.moe is None else groups.expert
    if expert is not None:
        check_sizes(groups.layout, causal_lm, config.model_name)
    if groups.tensor is not None:
        specs = parallelize(groups.tensor, causal_lm, config.model_name, expert)
    else:
        experts: Specs = {}
        if expert is not None:
            experts = distribute_all(expert, causal_lm, config.model_name, {})
        specs = {
            name: experts.get(weight, ShardSpec(tuple(weight.shape)))
            for name, weight in causal_lm.named_parameters(remove_duplicate=False)
        }
    adapter = config.adapter if trainable else None
    if adapter is not None and adapter.is_quantized:
        quantize_layers(causal_lm, specs, groups.tensor, device)
    frozen = _frozen_parameters(causal_lm, config, trainable=trainable)
    if config.precision == "bfloat16":
        _store_in_bfloat16(frozen)
    for parameter in frozen:
        parameter.requires_grad_(False)
    state = None
    if adapter is not None:
        # Float32 and trainable, unlike the weights beside them.
        state = add_adapters(causal_lm, decoder_layers(causal_lm), adapter, specs, groups.tensor)
    share = None
    if groups.tensor is not None and groups.tensor.sequence:
        share = SequenceShare(groups.tensor.group, groups.tensor.rank)
    head = ScoreHead(causal_lm, share)
    if has_vocabulary:
        chunk_size = config.chunk_size(device.type)
        head = VocabularyHead(causal_lm, groups, chunk_size, compile=is_compiled)
    model = LogprobModel(causal_lm, head, groups, expert_loads)
    # Evaluation mode also in training: dropout stays off, because the log-probs of one policy must
    # agree between two forwards.
    model.eval()
    if config.checkpointing != "none" and trainable:
        layers = decoder_layers(model.causal_lm)
        if config.vision.train == "all":
            layers += vision.tower_layers(causal_lm)
        checkpoint_layers(layers, config.checkpointing)
    if is_compiled:
        if device.type == "cuda":
            # The choice of a kernel cannot be traced.
            varlen_kernel()
        compile_layers(decoder_layers(model.causal_lm))
    if groups.fsdp_mesh is not None:
        reshard = not keep_unsharded(model, groups.layout)
        _shard(model, groups, config.precision, reshard_after_forward=reshard)
    allocate(model, device)
    return model, specs, state


def _meta_model(config: PolicyConfig, model_config: PretrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device with the attention of `policy.inputs`.

    Raises ConfigError for a model that computes attention in its own code, or with other keys than
    those of the tokens.
    """
    kinds = getattr(model_config, "layer_types", None) or ()
    compressed = next((kind for kind in kinds if "compressed" in kind), None)
    if compressed is not None:
        raise ConfigError(
            f"policy.model_name={config.model_name}: models of the type {model_config.model_type}"
            f" attend to keys that are computed from several tokens ({compressed} in layer_types),"
            " which does not know the bounds of rows; use another model"
        )
    try:
        causal_lm = meta_model(
            model_config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
        )
        if causal_lm._can_set_attn_implementation():
            return causal_lm
    # Some models look up the class of their attention by the name of the implementation.
    except KeyError as error:
        if error.args != (attention.IMPLEMENTATION,):
            raise
    raise ConfigError(
        f"policy.model_name={config.model_name}: models of the type {model_config.model_type}"
        " compute attention in their own code, which does not know the bounds of rows; use another"
        " model"
    )


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

    With adapters these are all but a score head, which has none.
    """
    if not trainable:
        return list(causal_lm.parameters())
    if config.adapter is not None:
        return [weight for name, weight in causal_lm.named_parameters() if name != SCORE_WEIGHT]
    frozen = set(vision.frozen_names(causal_lm, config.vision.train))
    if config.freeze:
        frozen |= frozen_names(causal_lm, config.freeze)
    return [weight for name, weight in causal_lm.named_parameters() if name in frozen]


def _store_in_bfloat16(parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters bfloat16.

    FSDP computes with bfloat16 copies of float32 weights, so the outputs of a weight that is not
    trained stay equal to the bit, in half of the memory.
    """
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)


def _shard(
    model: LogprobModel, groups: Groups, precision: str, *, reshard_after_forward: bool
) -> None:
    """Apply FSDP2: a unit per layer and untied embedding, the root for the rest.

    The experts of an expert-parallel rank are a unit inside their layer, over fewer ranks.
    """
    param_dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    mp_policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    if groups.expert is not None:
        # The weights of the router stay in its precision, as inside the unit of a layer.
        policy = replace(mp_policy, cast_forward_inputs=False)
        for experts in expert_modules(model).values():
            fully_shard(
                experts,
                mesh=groups.expert_mesh,
                mp_policy=policy,
                reshard_after_forward=reshard_after_forward,
            )
    units = decoder_layers(model.causal_lm) + vision.tower_layers(model.causal_lm)
    if not is_tied(model.causal_lm):
        units.append(model.causal_lm.get_input_embeddings())
    mesh = groups.fsdp_mesh
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
