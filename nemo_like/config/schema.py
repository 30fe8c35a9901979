"""The keys that several jobs share: type, default, constraints and description.

A field's description is the string below it; `config.keys` reads it from this source for
`nemo-like config` and docs/configuration.md. Constraints on one value are annotations of the field;
relations between keys are checked in `config.check`. Batches are counted in rows, microbatch
budgets in tokens, times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from nemo_like.config.constraints import (
    DIRECTORY_NAME,
    DURATION,
    NO_EMPTY_TEXTS,
    NOT_EMPTY,
    PROMPT_TEMPLATE,
    RANGE_OF_SHARES,
    Ge,
    Gt,
    Le,
    Lt,
)
from nemo_like.config.errors import Problem
from nemo_like.config.health import HealthConfig
from nemo_like.config.needs import BatchNeeds, RunNeeds
from nemo_like.config.rollout import (
    MAX_VLLM_RANK,
    EnvironmentConfig,
    GenerationConfig,
    RewardConfig,
)
from nemo_like.parallel_layout import Oversize
from nemo_like.training_engines import ENGINES

Switch = Literal["auto", True, False]
"""`auto` is true where it is possible or pays off."""

ALL_LINEAR = "all-linear"
"""Target that stands for every linear layer that can have an adapter, as in PEFT."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA: the weights of the model are frozen, and every target layer gets a low-rank update. Its
    output is W x + scale B A x with A [rank, inputs] and B [outputs, rank].
    """

    enabled: bool = False
    """Train adapters only. Weights are stored in `policy.precision`, and checkpoints have the
    adapters. The reference policy needs no second copy of the model."""
    rank: Annotated[int, Ge(1)] = 16
    """Rank of the update of each layer."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """The scale of the update is `alpha / rank`."""
    use_rslora: bool = False
    """Rank-stabilized LoRA: the scale is `alpha / sqrt(rank)`, so that the size of the update does
    not depend on the rank."""
    target_modules: Annotated[tuple[str, ...], NO_EMPTY_TEXTS] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers with an adapter, by the end of their name, as in PEFT; `all-linear` are all
    linear layers except the output embedding."""
    quantization: Literal["none", "nf4"] = "none"
    """QLoRA: `nf4` stores the frozen linear layers in 4 bits per value, by bitsandbytes (extra
    `qlora`); every data-parallel rank has all of them. Only with the DTensor engine, and for models
    without experts."""
    adapter_path: str | None = None
    """Directory of an adapter in the format of PEFT with which training starts, e.g. `hf/adapter`
    of another run; its rank, alpha and layers must be those set here."""
    reference: Literal["base", "adapter"] = "base"
    """The reference policy of DPO, IPO and a KL penalty. `base`: the model without adapters.
    `adapter`: the model with the adapter of `adapter_path`, also after a resume, so that a run
    starts at its reference; every rank keeps a copy of its shard in host memory."""
    weight_sync: Literal["auto", "merged", "adapter"] = "auto"
    """What the generator receives after each step. `merged`: all weights, W + scale B A, rounded to
    `policy.precision`. `adapter`: A and B alone, so that updates are small and no change is lost in
    rounding; decoding computes the adapters as well. `auto` is `adapter` in bfloat16, and `merged`
    in float32, with `quantization`, and above rank 512."""

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        if self.use_rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank

    @property
    def is_quantized(self) -> bool:
        """True if frozen linear layers are stored in 4 bits."""
        return self.enabled and self.quantization != "none"

    def is_target(self, name: str) -> bool:
        """Return True if the layer `name`, e.g. `model.layers.0.self_attn.q_proj`, gets an adapter.

        A target is the complete name, or its end after a dot, or `all-linear`.
        """
        if ALL_LINEAR in self.target_modules:
            return True
        return any(f".{name}".endswith(f".{target}") for target in self.target_modules)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, with moments in float32 or 8 bits, or Muon. Weight decay is not applied to norms and
    biases.
    """

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` stores both moments in 8 bits and needs the extra `optim` (torchao). `muon`
    updates the matrices of attention and feed-forward blocks by Muon, and embeddings,
    norms and biases by AdamW. Both need `policy.engine=dtensor`."""
    lr: Annotated[float, Gt(0)] = 1e-5
    """Peak learning rate; `policy.scheduler` scales it per optimizer step."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the running mean of gradients."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the running mean of squared gradients."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Constant added to the denominator of the update."""
    muon_lr: Annotated[float | None, Gt(0)] = None
    """Peak learning rate of the matrices that Muon updates; null is `lr`. For a matrix [m, n] it is
    multiplied by 0.2 sqrt(max(m, n)), with which `lr` and `weight_decay` of AdamW can be kept."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning-rate schedule, as a fraction of `policy.optimizer.lr` per optimizer step."""

    kind: Literal["constant", "linear", "cosine", "wsd", "cosine_restarts"] = "constant"
    """Shape of the schedule after warm-up. `wsd` (warm-up, stable, decay) is constant and then
    decays, `cosine_restarts` is a cosine that starts again at the full rate."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int | None = None
    """Optimizer step at which `min_ratio` is reached, warm-up included; null is the last step of
    the run. Must be above `warmup_steps`."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Final learning rate as a fraction of `policy.optimizer.lr` (all kinds but constant)."""
    wsd_decay_steps: Annotated[int | None, Ge(1)] = None
    """Optimizer steps of the decay of `wsd`, which ends at `decay_steps`; null is a tenth of
    `decay_steps`, rounded up."""
    wsd_decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of the decay of `wsd` by its progress p: `linear` is 1 - p, `sqrt` is 1 - sqrt(p),
    `cosine` is half a period of a cosine."""
    num_cycles: Annotated[int, Ge(1)] = 1
    """Cycles of `cosine_restarts` of equal length between warm-up and `decay_steps`."""
    batch_size_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate of each step by its number of rows over `base_batch_size`, or by
    the square root of that ratio."""
    base_batch_size: Annotated[int | None, Ge(1)] = None
    """Rows of a step for which `policy.optimizer.lr` was chosen; needed by `batch_size_scaling`."""


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Exponential moving average (EMA) of the trained weights: after each applied optimizer step it
    is decay x average + (1 - decay) x weight. Training does not use it.
    """

    enabled: bool = False
    """Keep the average in float32, save it in checkpoints, and export it at the end of the run to
    `hf_ema` beside `hf`."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Weight of the previous average; 0.999 averages over about 1000 steps."""


OutputHead = Literal["vocabulary", "scores"]
"""`vocabulary`: the output embedding of a language model. `scores`: one number per row, from the
last hidden state of its last token, as of a reward model.
"""

PackingName = Literal[
    "balanced",
    "best_fit_decreasing",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
]


ActivationCheckpointing = Literal["none", "selective", "full"]
CheckpointingChoice = Literal["auto", "none", "selective", "full"]
CHUNK_TOKENS = 1024
"""Default of `policy.logprob_chunk_size` on CPU."""
CUDA_CHUNK_TOKENS = 4096
"""The same on CUDA, where smaller products are limited by kernel launches."""


@dataclass(frozen=True, kw_only=True)
class SequencePackingConfig:
    """Sequence packing: microbatches of rows concatenated without padding between them. Excludes
    `policy.dynamic_batching`.
    """

    enabled: bool = False
    """Use sequence packing."""
    train_mb_tokens: Annotated[int, Ge(1)] = 4096
    """Max tokens per packed training microbatch. With context parallelism this counts the tokens of
    all context ranks together."""
    logprob_mb_tokens: Annotated[int, Ge(1)] = 4096
    """Max tokens per packed microbatch of the log-prob pass, which saves no activations."""
    algorithm: PackingName = "balanced"
    """Algorithm that forms the microbatches. `balanced` assigns rows to microbatches and ranks
    jointly; the others form bins first, which are then assigned to ranks."""
    sequence_length_round: Annotated[int, Ge(1)] = 1
    """Pad each row to a multiple of this many tokens, combined (least common multiple) with the
    multiple that context and sequence parallelism require."""
    microbatch_length_round: Annotated[int, Ge(1)] = 1
    """Pad each microbatch to a multiple of this many tokens, for few shapes; with the value of
    `train_mb_tokens` all microbatches have that length."""
    balance: Literal["flops", "tokens", "none"] = "flops"
    """Work measure that is balanced over data-parallel ranks: FLOPs (attention included) or tokens;
    `none` assigns bins round-robin and needs an algorithm other than `balanced`."""


@dataclass(frozen=True, kw_only=True)
class DynamicBatchingConfig:
    """Dynamic batching: microbatches of rows of similar length, padded together under a token
    budget. Excludes `policy.sequence_packing`.
    """

    enabled: bool = False
    """Use dynamic batching."""
    train_mb_tokens: Annotated[int, Ge(1)] = 4096
    """Max tokens per training microbatch, padding included: rows x padded length."""
    logprob_mb_tokens: Annotated[int, Ge(1)] = 4096
    """Max tokens per microbatch of the log-prob pass, padding included."""
    sequence_length_round: Annotated[int, Ge(1)] = 1
    """Pad the rows of a microbatch to a multiple of this many tokens, combined (least common
    multiple) with the multiple that context and sequence parallelism require."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower of a model that is trained with images."""

    train: Literal["frozen", "projector", "all"] = "frozen"
    """Trained weights of the tower."""
    min_pixels: Annotated[int | None, Ge(1)] = None
    """Smaller images are enlarged; null: as the model does."""
    max_pixels: Annotated[int | None, Ge(1)] = 1048576
    """Larger images are reduced."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model that is trained, and how its batches are formed."""

    model_name: Annotated[str, NOT_EMPTY]
    """Directory of a Hugging Face model, or the name of one on the hub (OWNER/NAME), which is
    downloaded."""
    tokenizer_name: str | None = None
    """Directory or hub name of the tokenizer; null uses the model's."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    engine: Literal["dtensor", "megatron"] = "dtensor"
    """Training engine: `dtensor` is PyTorch FSDP2 on the Hugging Face model, `megatron` is
    Megatron-Core."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of forward and backward pass. Master weights and optimizer state are always
    float32."""
    train_global_batch_size: Annotated[int, Ge(1)] = 32
    """Rows per optimizer step over all data-parallel ranks. In GRPO it must divide the rows per
    step, `grpo.num_prompts_per_step` x `grpo.num_generations_per_prompt`."""
    train_micro_batch_size: Annotated[int, Ge(1)] = 4
    """Rows per training microbatch, if neither sequence packing nor dynamic batching is enabled."""
    logprob_batch_size: Annotated[int, Ge(1)] = 4
    """Rows per microbatch of the log-prob pass, if neither sequence packing nor dynamic batching is
    enabled."""
    max_total_sequence_length: Annotated[int, Ge(2)] = 1024
    """Max tokens of a row, prompt and completion together."""
    oversize_rows: Oversize = "error"
    """Treatment of rows above `max_total_sequence_length`: `error` stops, `truncate` removes the
    end of a conversation or the beginning of a prompt, `drop` leaves the row out, `singleton` runs
    it in a separate microbatch (needs packing or dynamic batching)."""
    logprob_chunk_size: Annotated[int | None, Ge(1)] = None
    """Tokens per chunk in which logits are computed; null is 4096 on CUDA and 1024 elsewhere. The
    full [tokens, vocabulary] matrix is never materialized."""
    activation_checkpointing: CheckpointingChoice = "none"
    """Activations that are computed again in the backward pass instead of being stored: all of a
    layer but its input (`full`), all but the results of matrix products and attention
    (`selective`), or nothing (`none`). `auto` takes at the start of a run the first of `none`,
    `selective`, `full` whose predicted peak fits into the memory of a GPU; on a CPU `none`."""
    compile: Literal["auto", "none", "layers"] = "auto"
    """`layers` compiles each decoder layer and the passes over the logits with torch.compile; the
    first step takes longer. Needs `policy.engine=dtensor`. `auto` is `layers` on CUDA in bfloat16
    for models whose layers have attention and no experts, and `none` elsewhere."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Gradients are clipped to this global L2 norm; 0 turns clipping off."""
    max_skipped_steps: Annotated[int, Ge(0)] = 3
    """Max consecutive optimizer steps that may be skipped because loss or gradients are not finite;
    one more saves a checkpoint and stops the run."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    shared_prefix: Switch = "auto"
    """Compute the leading tokens that rows of a group have in common once per microbatch, such as
    the prompt of several completions. Needs sequence packing. `auto` does so in steps where the
    plan has at least 3 % less work."""
    router_replay: Switch = "auto"
    """For models with experts: policy and reference use the experts that the generator chose for
    each token, with weights of their own routers. `auto` does so where generator and engine can,
    `true` stops where they cannot."""
    router_replay_gib: Annotated[float, Gt(0)] = 32.0
    """Max GiB of the experts of one rollout in the driver's memory, for rows of
    `policy.max_total_sequence_length` tokens; a run that may need more does not start."""
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    freeze: Annotated[tuple[str, ...], NO_EMPTY_TEXTS] = ()
    """Weights that are not trained: patterns on their Hugging Face names, e.g.
    `[model.embed_tokens.*, "model.layers.[0-7].*"]`."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    oom: Literal["stop", "shrink"] = "stop"
    """What follows when a policy worker runs out of memory: `stop` ends the run; `shrink` continues
    from the latest checkpoint with 0.8 times the tokens (or rows) per microbatch, at most 5 times.
    Results are equal up to rounding. Needs `data.batching.kind=fixed`."""
    parity_check: bool = True
    """While the workers start, train a tiny copy of the model for one step on CPU, in the run's
    engine, batching mode, layout and recomputation, and compare it with transformers. A difference
    ends the run before its first step. The check takes at most 20 s, and its outcome is cached."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapters that are trained in place of the weights; None without."""
        return self.lora if self.lora.enabled else None

    @property
    def sends_adapters(self) -> bool:
        """True if weight updates of the generator have the adapters alone."""
        adapter = self.adapter
        if adapter is None:
            return False
        if adapter.weight_sync != "auto":
            return adapter.weight_sync == "adapter"
        is_possible = not adapter.is_quantized and adapter.rank <= MAX_VLLM_RANK
        return self.precision == "bfloat16" and is_possible

    @property
    def recorded_experts(self) -> Switch:
        """Whether the generator of a training run returns the experts that it chooses."""
        # Compiled layers have no given experts.
        is_compiled = self.compile == "layers"
        return False if is_compiled and self.router_replay == "auto" else self.router_replay

    def may_record_experts(self, *, is_on_cpu: bool) -> bool:
        """Return False if the generator returns no experts, whatever the model is."""
        if self.recorded_experts == "auto":
            # vLLM's build for CPUs cannot return them.
            return not (is_on_cpu and self.generation.backend == "vllm")
        return self.recorded_experts is True

    def frozen(self, model_name: str) -> PolicyConfig:
        """Return the settings of `model_name` as a model that is not trained."""
        return replace(
            self,
            model_name=model_name,
            optimizer=OptimizerConfig(),
            lora=AdapterConfig(),
            ema=EmaConfig(),
            freeze=(),
        )

    def in_rows(self, rows_per_example: int) -> PolicyConfig:
        """Return the settings with batch sizes in rows, for planning."""
        if rows_per_example == 1:
            return self
        return replace(
            self,
            train_global_batch_size=self.train_global_batch_size * rows_per_example,
            train_micro_batch_size=self.train_micro_batch_size * rows_per_example,
            logprob_batch_size=self.logprob_batch_size * rows_per_example,
        )

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        """The activation checkpointing; `none` for `auto` before the memory of a GPU is known."""
        chosen = self.activation_checkpointing
        return "none" if chosen == "auto" else chosen

    def compiles_layers(self, device_type: str, *, is_dense: bool) -> bool:
        """Return True if the layers are compiled on a device type of torch.

        `is_dense` is True for a model whose layers have attention and no experts.
        """
        if self.compile != "auto":
            return self.compile == "layers"
        # In float32 and with values in 4 bits a layer is not one graph.
        is_quantized = self.adapter is not None and self.adapter.is_quantized
        has_compiler = ENGINES[self.engine].compiles_layers
        is_traced = self.precision == "bfloat16" and not is_quantized
        return device_type == "cuda" and has_compiler and is_dense and is_traced

    def chunk_size(self, device_type: str) -> int:
        """Return `logprob_chunk_size`, or its default on a device type of torch."""
        if self.logprob_chunk_size is not None:
            return self.logprob_chunk_size
        return CUDA_CHUNK_TOKENS if device_type == "cuda" else CHUNK_TOKENS


MAIN_SET = "train"
"""Name of `data.train_path` among `data.train_sets`."""
VALIDATION_SET = "validation"
"""Name of `data.validation_path` in `data.set_columns`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and validation files. The row format is detected from the columns."""

    train_path: Annotated[str, NOT_EMPTY]
    """A .jsonl, .ndjson, .csv (each also as .gz or .zst), .json or .parquet file, a pattern such as
    `data/train-*.jsonl`, a directory of such files or one written by `datasets.save_to_disk`, or a
    data set of the Hugging Face hub as `hf://NAME?split=SPLIT`."""
    train_sets: dict[str, str] = field(default_factory=dict)
    """Further training files by name, e.g. `{code: code.jsonl}`, mixed with `train_path` by
    `train_weights`. Names are of lower-case letters, digits and '_'; `train` is `train_path`."""
    train_weights: dict[str, float] = field(default_factory=dict)
    """Relative weights of `train` and of the other sets in every part of the run, e.g.
    `{train: 0.7, code: 0.3}`. Without weights they are the numbers of rows."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of the files by what they mean here, e.g. `{prompt: problem, answer: solution}`."""
    set_columns: dict[str, dict[str, str]] = field(default_factory=dict)
    """`columns` of single sets in its place: `train`, `validation`, and the names of `train_sets`
    and `validation_sets`. Example: `{validation: {}}` if only the training file has other names."""
    image_root: str | None = None
    """Directory that relative paths of images start from; null means the data file's directory."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of rows that cannot be read, have another format, or that the chat template
    refuses: `error` stops before the first step, `skip` leaves them out and counts them."""
    validation_path: str | None = None
    """Validation rows in the same formats; null turns validation off."""
    validation_sets: dict[str, str] = field(default_factory=dict)
    """Further validation files by name, e.g. `{gsm8k: gsm8k.jsonl}`: their metrics are
    `validation/<name>/...`. Names are of lower-case letters, digits and '_'."""
    max_train_rows: Annotated[int | None, Ge(1)] = None
    """Use only the first rows of each training file; null uses all."""
    max_validation_rows: Annotated[int | None, Ge(1)] = None
    """Use only the first rows of each validation file; null uses all."""
    pass_rate_range: Annotated[tuple[float, ...], RANGE_OF_SHARES] = (0.0, 1.0)
    """[lowest, highest]: leave out training rows whose column `pass_rate` is outside. [0, 1] keeps
    all rows, and they need no such column."""
    max_prompt_tokens: Annotated[int | None, Ge(1)] = None
    """Leave out prompts of rollouts that have more tokens than this, as the chat template renders
    them; null keeps all."""
    prompt_template: Annotated[str | None, PROMPT_TEMPLATE] = None
    """Format string applied to the user's text, e.g. "Solve: {prompt}"."""
    system_prompt: str | None = None
    """System message put in front of every conversation that has none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, e.g. `{enable_thinking: false}`, in training,
    rollouts and evaluation alike."""
    train_on: Literal["assistant", "all", "last"] = "assistant"
    """Tokens that contribute to the SFT loss: of all assistant turns (`assistant`), of all turns
    (`all`), or of the last assistant turn (`last`).
    A message with `train: false` or `weight: 0` never contributes."""
    shuffle: bool = True
    """Visit the rows in a new random order in every epoch, derived from `seed`."""
    allow_changed_rows: bool = False
    """Resume although the training rows changed since the checkpoint. If their number changed, or
    with `data.batching`, the epoch begins again."""
    last_batch: Literal["keep", "drop"] = "keep"
    """Rows left at the end of an epoch that do not fill a batch: train a smaller step on them, or
    leave them out."""
    num_encoding_workers: Annotated[int | None, Ge(0)] = None
    """Processes that tokenize rows before the first step; 0 tokenizes in the driver, null decides
    by the size of the data."""

    @property
    def validation_files(self) -> dict[str, str]:
        """Paths of the validation sets by name; the name of `validation_path` is ''."""
        files = {} if self.validation_path is None else {"": self.validation_path}
        return files | self.validation_sets

    def columns_of(self, name: str) -> dict[str, str]:
        """Return the columns of a training or validation set; of `validation_path` with ''."""
        return self.set_columns.get(name or VALIDATION_SET, self.columns)


@dataclass(frozen=True, kw_only=True)
class EpochLoopConfig:
    """Length of a run over the rows of a file, and validation."""

    max_num_steps: Annotated[int | None, Ge(1)] = None
    """Max optimizer steps; null leaves the length to `max_num_epochs`. The run ends at the smaller
    of the two."""
    max_num_epochs: Annotated[int, Ge(1)] = 1
    """Max passes over the training rows."""
    val_period: Annotated[int, Ge(0)] = 0
    """Validate after every so many steps; 0 validates only at the end. Needs
    `data.validation_path`."""
    val_at_start: bool = False
    """Validate before the first step as well."""


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """Automatic restart of a run that lost a policy worker, a node or a connection between workers.
    It continues from the latest checkpoint. A failure that would repeat ends the run: wrong input,
    an exception of the model or of user code, a failure before the first step, and the same failure
    after the same step.
    """

    max_restarts: Annotated[int, Ge(0)] = 3
    """Max restarts within `window_s`; 0 turns them off."""
    window_s: Annotated[float, Gt(0)] = 3600.0
    """Seconds after which a restart no longer counts for `max_restarts`."""
    backoff_s: Annotated[float, Ge(0)] = 10.0
    """Seconds before a restart; each restart within `window_s` doubles it."""
    min_nodes: Annotated[int | None, Ge(1)] = None
    """Continue with fewer than `cluster.num_nodes` nodes, but at least so many, if
    `cluster.placement_timeout_s` passes at a restart; when nodes return, the run saves a checkpoint
    and continues with all. null waits for all nodes."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Workers and the resources they request from Ray."""

    backend: Literal["ray", "local"] = "ray"
    """`local` runs one worker of each kind in the driver's process, without Ray."""
    num_nodes: Annotated[int, Ge(1)] = 1
    """Nodes with policy workers."""
    gpus_per_node: Annotated[int, Ge(0)] = 0
    """Policy workers per node, one per GPU; 0 runs `workers_per_node` workers on CPU."""
    workers_per_node: Annotated[int, Ge(1)] = 1
    """Policy workers per node if `gpus_per_node` is 0."""
    cpus_per_worker: Annotated[float, Gt(0)] = 1.0
    """CPU cores reserved per policy worker; a colocated generation worker shares them."""
    generation_workers: Annotated[int, Ge(0)] = 0
    """Generation workers with separate resources; 0 colocates generation with the policy
    workers."""
    exclude_nodes: tuple[str, ...] = ()
    """Addresses of nodes that get no workers of the policy and of the generator, e.g. `[10.0.0.7]`
    for a node that the health rule `slow_rank` named; applied when a run starts or resumes."""
    offload: Switch = "auto"
    """Move policy and generator that share GPUs to host memory while the other runs. `auto` does so
    only if both together are predicted not to fit in the memory of a GPU."""
    placement_timeout_s: Annotated[float, Gt(0)] = 120.0
    """Max seconds to wait until the cluster has the requested resources."""
    progress_timeout_s: Annotated[float, Ge(0)] = 1800.0
    """Max seconds without progress (microbatch, decoding step or reward sample) of a worker, after
    which the run ends with an error. In a collective a worker waits a third of it for the other
    ranks. 0 turns the check off, and a worker waits 600 s."""
    max_restarts: Annotated[int, Ge(0)] = 10
    """Max restarts in a run of workers without state of the training, whose process died or hung:
    replicas of the generator, processes of the environment, and workers of each reward model. The
    next failure of the same kind stops the run."""
    restart: RestartConfig = field(default_factory=RestartConfig)
    """Automatic restart of the run."""
    env: dict[str, str | None] = field(default_factory=dict)
    """Environment variables of all workers, e.g. `{NCCL_IB_HCA: mlx5_0}`; null takes the driver's
    value, which keeps a secret out of config files. `NCCL_*`, `GLOO_*` and `HF_*` of the driver are
    always passed on."""
    time_limit: Annotated[str | None, DURATION] = None
    """Time since the start of the process after which the run finishes the current step, saves a
    checkpoint and exits with code 75; null means no limit."""

    @property
    def collective_timeout_s(self) -> float:
        """Max seconds that a worker waits for the other ranks in a collective operation.

        A worker that waits for the others must not be mistaken for one that hangs.
        """
        return self.progress_timeout_s / 3 or 600.0


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout of the policy. Data-parallel size = workers / (tensor x context x pipeline);
    each data-parallel rank trains on different rows.
    """

    tensor: Annotated[int, Ge(1)] = 1
    """Tensor-parallel size. Must divide the attention heads, the MLP columns and the key-value
    heads (megatron: or be a multiple of these). Keep a tensor-parallel group within one node."""
    context: Annotated[int, Ge(1)] = 1
    """Context-parallel size; each rank has 1/cp of every sequence, in zig-zag order (2 of 2 x cp
    chunks). Rows are padded to a multiple of 2 x cp tokens."""
    dynamic_context: bool = False
    """Context parallelism per microbatch: the rows of a packed microbatch are divided over groups
    of the `context` ranks (all, halves, ... single ranks), each row over as few ranks as the token
    limit and the balance of work allow. Short rows then need no exchange of keys and values."""
    pipeline: Annotated[int, Ge(1)] = 1
    """Number of pipeline stages; needs `policy.engine=megatron`."""
    virtual_pipeline: Annotated[int, Ge(1)] = 1
    """Virtual stages of each pipeline stage (interleaved schedule), by which the bubble is divided.
    Needs `pipeline` above 1 and at least pipeline x virtual layers."""
    expert: Annotated[int, Ge(1)] = 1
    """Expert-parallel size (MoE); must divide the number of experts and data x context / replicas,
    with `policy.engine=megatron` tensor x context x data."""
    sequence: bool = False
    """Sequence parallelism: also shard LayerNorm and residual activations over the tensor-parallel
    group; needs `tensor` above 1. Required for MoE models with `tensor` above 1."""
    replicas: Annotated[int, Ge(1)] = 1
    """Copies of the weights (HSDP), each sharded over data x context / `replicas` workers. Must
    divide the data-parallel size; with one copy per node weights are gathered within a node. Needs
    `policy.engine=dtensor`."""
    reshard: Switch = "auto"
    """Whether FSDP2 frees gathered weights after each layer. `true`: every microbatch gathers them
    again and reduces gradients. `false`: both happen once per step, which needs memory for complete
    weights and gradients. `auto` is `false` for models of up to 8 GiB of float32 weights per
    tensor-parallel rank. Needs `policy.engine=dtensor`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig:
    """Checkpoints in `<output_dir>/<run_name>/checkpoints/step_<N>`."""

    enabled: bool = True
    """Save checkpoints."""
    save_period: Annotated[int, Ge(0)] = 100
    """Save after every so many steps, and always at the end; 0 saves only at the end."""
    keep_latest: Annotated[int, Ge(1)] = 2
    """Number of checkpoints that are kept; older ones are removed."""
    keep_hours: Annotated[float | None, Gt(0)] = None
    """Keep all checkpoints of the last so many hours, in addition to `keep_latest`, also in the
    store of `upload_to`, which may lack some of them. null keeps by number only."""
    async_save: bool = True
    """Write checkpoints while training continues, from a copy in host memory (12 bytes per
    parameter)."""
    keep_best: Annotated[str | None, NOT_EMPTY] = None
    """Name of a logged metric, e.g. `validation/reward_mean`, whose best checkpoint is kept in
    addition to `keep_latest`; the file `best` names it."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller value of `keep_best` is better."""
    export_hf: bool = True
    """Write a Hugging Face model to `<output_dir>/<run_name>/hf` at the end."""
    upload_to: Annotated[str | None, NOT_EMPTY] = None
    """URL of a store, e.g. `s3://bucket/prefix`, `gs://bucket` or `file:///backup`, to which the
    latest and the best checkpoint and the exported model are copied while training continues. With
    `resume` a machine without the files of the run downloads them. Credentials come from the
    environment, as for the AWS and Google tools. null is no copy."""
    upload_wait_s: Annotated[float, Ge(0)] = 600.0
    """Max seconds that a run waits at its end for uploads."""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingConfig:
    """End of a run whose metric `checkpointing.keep_best` no longer improves: it saves a checkpoint
    and ends normally.
    """

    patience: Annotated[int | None, Ge(1)] = None
    """Number of values of `checkpointing.keep_best` in a row without an improvement after which the
    run ends; null turns early stopping off."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Metrics and samples, in addition to the console and `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard files to `<output_dir>/<run_name>/tb`."""
    wandb_project: str | None = None
    """Weights & Biases project; null turns it off. Needs the extra `wandb`."""
    mlflow_experiment: str | None = None
    """MLflow experiment; null turns it off. Needs the extra `mlflow`."""
    tracker: str | None = None
    """Import path of a class for any other tracker, e.g. `my_trackers.Trackio`; see
    docs/metrics.md. null uses none."""
    verbose: bool = False
    """Print a line per step. Without it a terminal shows the progress bar only, and a log has one
    line per step at most every 10 s."""
    num_samples_shown: Annotated[int, Ge(0)] = 3
    """Decoded samples printed at step 0 and in each validation."""
    save_rollouts: bool = True
    """Write every GRPO rollout to `rollouts/step_<N>.jsonl`."""
    max_rollout_rows: Annotated[int | None, Ge(1)] = 512
    """Max rows per step that `save_rollouts` writes, as complete groups. A larger rollout has no
    token ids to replay. null writes all rows."""
    keep_rollout_tokens: Annotated[int | None, Ge(0)] = 10
    """Number of newest files `rollouts/step_<N>.safetensors` that are kept, in addition to those of
    steps that can be replayed. They have the token ids, log-probs and advantages of a step for
    `nemo-like replay`, about 20 bytes per token. null keeps all, 0 writes none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys of every job."""

    output_dir: Annotated[str, NOT_EMPTY] = "runs"
    """Parent directory of all runs. On several nodes it must be on a shared file system."""
    run_name: Annotated[str, DIRECTORY_NAME]
    """Name of the run and of its directory in `output_dir`. An existing directory is reused only
    with `resume`."""
    resume: bool = False
    """Continue from the latest complete checkpoint of this run."""
    seed: Annotated[int, Ge(0)] = 42
    """Seed of row order, packing and sampling."""
    policy: PolicyConfig
    data: DataConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    # Of pydantic, which checks the values when a file is read.
    __pydantic_config__: ClassVar = {"allow_inf_nan": False, "coerce_numbers_to_str": True}
    kind: ClassVar[str] = ""
    """Name of the job: the command, and the section of its own keys."""

    @cached_property
    def needs(self) -> RunNeeds:
        """What the job needs of a run."""
        batch = BatchNeeds.of_one_step(self.policy.train_global_batch_size)
        return RunNeeds(job=self.kind, batch=batch)

    def job_problems(self) -> Iterator[Problem]:
        """Yield problems of relations that involve the keys of this job only."""
        yield from ()
