"""Every key of every YAML, its type, its default and what it means: the only place where a default
lives.

The classes here are plain frozen dataclasses; `config.load` builds them and reports what does not
fit. Batches are counted in rows, budgets in tokens, times in seconds. Checks across keys live in
`config.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PackingName = Literal[
    "best_fit_decreasing",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
    "balanced",
]


@dataclass(frozen=True, kw_only=True)
class SequencePackingConfig:
    """`policy.sequence_packing`: rows concatenated into packed microbatches without padding between
    them.
    """

    enabled: bool = False
    train_mb_tokens: int = 4096
    """Most tokens of one packed training microbatch."""
    logprob_mb_tokens: int = 4096
    """The same for scoring, which keeps no activations and so can take more."""
    algorithm: PackingName = "best_fit_decreasing"
    """Which bin packer forms the microbatches."""
    sequence_length_round: int = 1
    """Each row is padded to a multiple of this (and of what cp and tp need)."""
    balance: Literal["flops", "tokens", "none"] = "flops"
    """What ranks are balanced by; `none` deals the packer's bins round-robin."""
    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """`largest_first` runs the fullest microbatch of a rank first, so the allocator peaks once."""


@dataclass(frozen=True, kw_only=True)
class DynamicBatchingConfig:
    """`policy.dynamic_batching`: rows of like length padded together under a token budget."""

    enabled: bool = False
    train_mb_tokens: int = 4096
    """Most tokens of one padded training microbatch, rows x padded length."""
    logprob_mb_tokens: int = 4096
    sequence_length_round: int = 1
    """The padded length of a microbatch is a multiple of this (and of what cp and tp need)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`policy.optimizer`: AdamW. Weight decay is not applied to norms and biases."""

    lr: float = 1e-5
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`policy.scheduler`: the learning rate as a share of `optimizer.lr` by optimizer step."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: int | None = None
    """Optimizer steps until `min_ratio` is reached, warm-up included; null means the whole run."""
    min_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """`policy.generation`: how completions are sampled."""

    backend: Literal["hf"] = "hf"
    max_new_tokens: int = 256
    temperature: float = 1.0
    """Sampling temperature; the policy's log-probs are taken at the same temperature. 0 is greedy
    (validation only).
    """
    top_p: float = 1.0
    """Sample from the fewest tokens with at least this probability mass; 1 is off."""
    top_k: int | None = None
    """Sample from the k most likely tokens; null, 0 or -1 is off."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the largest probability; 0 is off. The
    policy's log-probs are those of the distribution after these filters, which apply in the order
    min_p, top_k, top_p."""
    stop_strings: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these (the end-of-sequence token
    always ends it).
    """
    batch_size: int = 64
    """Most rows one generation worker decodes at once."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """`policy`: the model that learns and how its batches are formed."""

    model_name: str
    """Directory of a Hugging Face model, or a hub name where the machine has one cached."""
    tokenizer_name: str | None = None
    """Directory or name of the tokenizer; null means the model's."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    engine: Literal["dtensor", "megatron"] = "dtensor"
    """What trains the model: FSDP2 and DTensor over the Hugging Face model, or Megatron-Core."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimizer state are always float32."""
    train_global_batch_size: int = 32
    """Rows per optimizer step."""
    train_micro_batch_size: int = 4
    """Rows per microbatch when neither packing nor dynamic batching is on."""
    logprob_batch_size: int = 4
    """The same for scoring."""
    max_total_sequence_length: int = 1024
    """Longest row, prompt and completion together."""
    oversize_rows: Literal["error", "truncate", "drop", "singleton"] = "error"
    """What to do with a row above the cap: stop, cut it, leave it out, or (packing and dynamic) run
    it alone with a warning. A conversation is cut at its end, a prompt at its beginning."""
    logprob_chunk_size: int = 1024
    """Tokens whose logits exist at once; the [tokens, vocabulary] matrix never does."""
    activation_checkpointing: bool = False
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 turns clipping off."""
    max_skipped_steps: int = 3
    """Most optimizer steps in a row that are skipped because loss or gradients are not finite; one
    more stops the run.
    """
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`data`: files taken as they are; the format is recognised from the columns."""

    train_path: str
    """A .jsonl, .json or .parquet file, or a directory saved by `datasets.save_to_disk`."""
    validation_path: str | None = None
    max_train_rows: int | None = None
    max_validation_rows: int | None = None
    prompt_template: str | None = None
    """A format string with `{prompt}`, put around the user's text, e.g. "Solve: {prompt}"."""
    system_prompt: str | None = None
    train_on: Literal["assistant", "all"] = "assistant"
    """Which tokens carry loss in SFT."""
    shuffle: bool = True
    last_batch: Literal["keep", "drop"] = "keep"
    """What becomes of the rows left at the end of an epoch that do not fill a batch: a step of
    fewer rows, or none.
    """
    num_encoding_workers: int | None = None
    """Processes that tokenize rows ahead of their use; 0 is the driver itself, null decides by the
    size of the data.
    """
    encoding_timeout_s: float = 300.0
    """How long the first step waits for all rows to be tokenized; the rest is then tokenized during
    training.
    """


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """`sft`: the supervised loop."""

    max_num_steps: int | None = None
    """Optimizer steps; null means `max_num_epochs` decides. The smaller of the two ends the run."""
    max_num_epochs: int = 1
    val_period: int = 0
    """Validate every so many steps; 0 means only at the end."""
    val_at_start: bool = False
    val_generate: bool = False
    """Also generate answers for the validation prompts and score them with `reward`."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """`grpo.advantage`: how rewards of one prompt's group become advantages."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted: the group's mean, or the mean of the other completions of the group."""
    normalize: Literal["group_std", "leave_one_out_std", "none"] = "group_std"
    """Divide by the sample standard deviation (n-1) of the group, or of the group's other
    completions (NeMo-RL with a leave-one-out baseline), or do not divide (Dr.GRPO). Groups without
    spread get 0."""
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """`grpo`: the reinforcement loop. Rows per step = prompts x generations."""

    num_prompts_per_step: int = 8
    num_generations_per_prompt: int = 4
    max_num_steps: int = 100
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    val_period: int = 0
    val_at_start: bool = True
    val_temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLossConfig:
    """`loss_fn` of GRPO: the clipped surrogate."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    """Dual clip: an upper bound on the ratio's effect for negative advantages, above 1 (about 3);
    null is off.
    """
    normalization: Literal["token", "sequence"] = "token"
    """Mean over all completion tokens of the global batch, or mean over rows of each row's token
    mean.
    """
    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to the frozen starting policy; above 0 a reference copy of the model is
    kept.
    """
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the reported KL (k1, k2 or k3); the gradient is that of k2 for all of them."""
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus."""


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """One entry of `reward.functions`."""

    path: str
    """Import path of a function `(RewardSample) -> float`, e.g. `my_package.rewards.brevity`."""
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """`reward`: plain functions by name; the reward is their weighted sum."""

    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    num_workers: int = 1
    """Processes that score completions."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """`cluster`: what is asked of Ray."""

    backend: Literal["ray", "local"] = "ray"
    """`local` runs one worker of each kind in this process, without Ray."""
    num_nodes: int = 1
    gpus_per_node: int = 0
    """0 runs on CPU with `workers_per_node` workers."""
    workers_per_node: int = 1
    """Policy workers per node on CPU; with GPUs it is one per GPU."""
    cpus_per_worker: float = 1.0
    """CPU cores reserved for each policy worker, and shared by a generator that is colocated with
    it.
    """
    generation_workers: int = 0
    """Workers with resources of their own for generation; 0 shares the policy's (colocated)."""
    placement_timeout_s: float = 120.0
    """How long to wait for the cluster to have room before giving up."""
    collective_timeout_s: float = 600.0
    """How long a worker waits for the others in a collective before it fails."""
    progress_timeout_s: float = 1800.0
    """How long a worker may report no progress (no microbatch, decoding step or reward sample)
    before the run ends with an error that names it; 0 means without limit. Above
    `collective_timeout_s`."""
    time_limit: str | None = None
    """Time from the start of the process after which the run saves a checkpoint, once the current
    step is done, and exits with code 75: seconds, "H:MM:SS" or "D-HH:MM:SS"; null means no
    limit."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`parallel`: how the policy's workers share one copy of the model. What they leave is data
    parallel: workers / (tensor x context x pipeline) copies, each with rows of its own."""

    tensor: int = 1
    """Workers that share every matrix product; keep them on one node."""
    context: int = 1
    """Workers that share every row: each holds 2 of its 2 x context chunks."""
    pipeline: int = 1
    """Workers that have the layers in turn; needs `policy.engine=megatron`."""
    expert: int = 1
    """Workers that share the experts of a mixture, out of tensor x context x data; needs
    `policy.engine=megatron`.
    """
    sequence: bool = False
    """Also share what tensor parallelism leaves whole (norms, residuals); needs `tensor` above
    1.
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig:
    """`checkpointing`: step folders under `<output_dir>/<run_name>/checkpoints`."""

    enabled: bool = True
    save_period: int = 100
    """Save every so many steps, and always at the end."""
    keep_latest: int = 2
    """How many step folders to keep."""
    export_hf: bool = True
    """Write a Hugging Face model to `<run>/hf` at the end."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """`logger`: where metrics go besides the console and `metrics.jsonl`."""

    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_experiment: str | None = None
    num_samples_shown: int = 3
    """Decoded samples shown at step 0 and in each validation."""
    save_rollouts: bool = True


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys every job has."""

    output_dir: str = "runs"
    run_name: str
    """One run name is one directory; it is reused only with `resume`."""
    resume: bool = False
    """Continue from the latest complete checkpoint of this run name."""
    seed: int = 42
    policy: PolicyConfig
    data: DataConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass(frozen=True, kw_only=True)
class SftRunConfig(RunConfig):
    """A whole `nemo-like sft` YAML."""

    sft: SftConfig = field(default_factory=SftConfig)


@dataclass(frozen=True, kw_only=True)
class GrpoRunConfig(RunConfig):
    """A whole `nemo-like grpo` YAML."""

    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    loss_fn: PolicyGradientLossConfig = field(default_factory=PolicyGradientLossConfig)
