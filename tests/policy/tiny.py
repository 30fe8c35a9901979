"""Tiny random models and batches, and processes to run ranks in: what the policy's tests share."""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.policy.worker import PolicyWorker

VOCABULARY = 67
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # logits far from uniform, so that a mistake shows
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
ARCHITECTURES: dict[str, tuple[type, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SIZES)),
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=16)),
    "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen3_window": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, **_WINDOW, head_dim=16)),
}
WINDOWED: dict[str, tuple[type, Any]] = {
    "mistral": (MistralForCausalLM, MistralConfig(**_SIZES, head_dim=16, sliding_window=5))
}
"""A window in every layer. Kept apart: `qwen3_window` covers windows where it matters."""
BLOCKS: dict[str, tuple[type, Any]] = {
    "qwen2_blocks": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **_SIZES | {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1},
            tie_word_embeddings=True,
        ),
    )
}
"""All inputs of layers are multiples of 64, the block of NF4, as halves over two ranks too."""
_MIXTURE: dict[str, Any] = _SIZES | {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LATENT: dict[str, Any] = _SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
MIXTURES: dict[str, tuple[type, Any]] = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**_MIXTURE, norm_topk_prob=True)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**_SIZES, head_dim=16, num_local_experts=4, sliding_window=5),
    ),
    # The first layer is dense, the outputs of the chosen experts do not add up to 1, and all layers
    # have a window.
    "qwen3_moe_mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **_MIXTURE,
            mlp_only_layers=[0],
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
        ),
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **_LATENT,
            q_lora_rank=24,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            rms_norm_eps=1e-3,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        ),
    ),
    # All groups, weights that do not add up to 1, and what some models leave out.
    "deepseek_v3_plain": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **_LATENT,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            n_shared_experts=1,
            rope_interleave=False,
            tie_word_embeddings=True,
        ),
    ),
    # One layer with a window; the activations reach the limit.
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_SIZES,
            head_dim=16,
            sliding_window=5,
            num_local_experts=4,
            num_experts_per_tok=2,
            swiglu_alpha=1.3,
            swiglu_limit=0.5,
        ),
    ),
}
"""Of experts; kept apart, as not every test holds for them: what an expert multiplies depends on
all rows together.
"""
_FIVE_LAYERS: dict[str, Any] = _SIZES | {"num_hidden_layers": 5}
_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "head_dim": 16}
_DEEP_SIZES: dict[str, Any] = _SIZES | _FOUR_LAYERS
_DEEP_MIXTURE: dict[str, Any] = _MIXTURE | _FOUR_LAYERS
_DEEP_LATENT: dict[str, Any] = _LATENT | {"num_hidden_layers": 4}
DEEP: dict[str, tuple[type, Any]] = {
    "llama_deep": (LlamaForCausalLM, LlamaConfig(**_FIVE_LAYERS, tie_word_embeddings=True)),
    "qwen3_deep": (Qwen3ForCausalLM, Qwen3Config(**_DEEP_SIZES, **_WINDOW)),
    # Every other layer is dense.
    "qwen3_moe_deep": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**_DEEP_MIXTURE, mlp_only_layers=[0, 2]),
    ),
    "deepseek_v3_deep": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**_DEEP_LATENT, q_lora_rank=None, n_group=4, topk_group=2),
    ),
    "gpt_oss_deep": (
        GptOssForCausalLM,
        GptOssConfig(**_DEEP_SIZES, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    ),
}
"""A layer or two for each of four virtual stages."""


def save_tiny_model(directory: Path, architecture: str) -> Path:
    """A random model with a tokenizer of numbered words, as a Hugging Face directory."""
    torch.manual_seed(0)
    model_class, config = (ARCHITECTURES | WINDOWED | MIXTURES | BLOCKS | DEEP)[architecture]
    model: PreTrainedModel = model_class(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # Norms and biases start at constants, and should matter too.
            if tensor.ndim == 1 or (tensor == 0).all():
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    words = {"<unk>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory


def save_with_value(model: str, directory: Path, value: float) -> str:
    """A copy of a model with `value` as the last element of one weight, whose name is returned."""
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "gate_proj" in name)
    tensors[name][-1, -1] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return name


def random_batch(lengths: list[int], seed: int = 0) -> BatchedDataDict:
    """Rows of random tokens with every column a policy-gradient loss reads; about two thirds of the
    tokens are trained.
    """
    generator = np.random.default_rng(seed)
    size = sum(lengths)

    def jagged(values: np.ndarray) -> Jagged:
        return Jagged.from_lengths(values, np.asarray(lengths))

    def logprobs() -> Jagged:
        return jagged(generator.normal(-4.0, 0.3, size).astype(np.float32))

    return BatchedDataDict(
        input_ids=jagged(generator.integers(0, VOCABULARY, size).astype(np.int32)),
        token_mask=jagged((generator.random(size) < 0.67).astype(np.uint8)),
        generation_logprobs=logprobs(),
        prev_logprobs=logprobs(),
        reference_logprobs=logprobs(),
        advantages=generator.normal(size=len(lengths)).astype(np.float32),
        length=np.asarray(lengths, dtype=np.int64),
        row_mask=np.arange(len(lengths)) != 2,
    )


GROUPED_LENGTHS = [9, 14, 6, 23, 2, 17, 1, 12]


def grouped_batch(seed: int = 0) -> BatchedDataDict:
    """`random_batch` of groups of four rows, three rows and one row, in the column `group`.

    In the first group rows 3 and 5 have 11 common tokens, of which row 0 is the first 9, and row 7
    has 4 of these. In the second row 4 is the start of row 1, of which row 2 has 3 tokens.
    """
    batch = random_batch(GROUPED_LENGTHS, seed)
    share_tokens(batch, {0: (3, 9), 5: (3, 11), 7: (3, 4), 2: (1, 3), 4: (1, 2)})
    batch["group"] = np.array([0, 1, 1, 0, 1, 0, 2, 0], dtype=np.int64)
    return batch


def share_tokens(batch: BatchedDataDict, prefixes: Mapping[int, tuple[int, int]]) -> None:
    """Let rows begin with tokens of others: {row: (other row, number of tokens)}."""
    rows = list(batch["input_ids"])
    for row, (other, num_tokens) in prefixes.items():
        rows[row][:num_tokens] = rows[other][:num_tokens]


def compute_and_fetch(worker: PolicyWorker, shard: SlicedDataDict) -> dict[str, Jagged]:
    """Compute every log-prob that the worker can compute, and fetch what this rank keeps."""
    return worker.fetch_logprobs(shard, worker.compute_logprobs(shard))


def row_loss(model: PreTrainedModel, batch: BatchedDataDict) -> Tensor:
    """Mean negative log-likelihood of the trained tokens by plain transformers, each row by itself
    and unpadded.
    """
    total, count = torch.zeros(()), 0
    for ids, mask, is_trained in zip(
        batch["input_ids"], batch["token_mask"], batch["row_mask"], strict=True
    ):
        if not is_trained:
            continue
        input_ids = torch.from_numpy(ids.astype(np.int64))[None]
        logprobs = (
            model(input_ids)
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, input_ids[0, 1:, None])
            .squeeze(1)
        )
        trained = torch.from_numpy(mask[1:].astype(bool))
        total, count = total - logprobs[trained].sum(), count + int(trained.sum())
    return total / count


@torch.no_grad()
def predictable_batch(model: PreTrainedModel, seed: int = 0) -> BatchedDataDict:
    """`grouped_batch`, with about half of the tokens replaced by those that `model` predicts."""
    batch = grouped_batch(seed)
    rows = [torch.from_numpy(row.astype(np.int64)) for row in batch["input_ids"]]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    is_predicted = np.random.default_rng(seed).random(padded.shape[1]) < 0.5
    for position in range(1, padded.shape[1]):
        if is_predicted[position]:
            padded[:, position] = model(padded[:, :position]).logits[:, -1].argmax(-1)
    lengths = batch["length"]
    tokens = [row[:length] for row, length in zip(padded.numpy(), lengths, strict=True)]
    batch["input_ids"] = Jagged.from_rows(tokens, np.int32)
    return batch


@torch.no_grad()
def row_accuracy(model: PreTrainedModel, batch: BatchedDataDict) -> float:
    """Share of the trained tokens that are the argmax of plain transformers in float64."""
    model = copy.deepcopy(model).double()
    num_correct, count = 0, 0
    for ids, mask, is_trained in zip(
        batch["input_ids"], batch["token_mask"], batch["row_mask"], strict=True
    ):
        if is_trained and len(ids) > 1:
            input_ids = torch.from_numpy(ids.astype(np.int64))[None]
            predicted = model(input_ids).logits[0, :-1].argmax(-1)
            trained = torch.from_numpy(mask[1:].astype(bool))
            num_correct += int((predicted == input_ids[0, 1:])[trained].sum())
            count += int(trained.sum())
    return num_correct / count


def context(rank: int = 0, world_size: int = 1, meeting: Path | None = None) -> WorkerContext:
    """A CPU worker's context; ranks meet in the file `meeting`."""
    return WorkerContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        device="cpu",
        init_method="" if meeting is None else meeting.as_uri(),
        collective_timeout_s=60.0,
        num_threads=1,
    )


def run_ranks(
    pool: ProcessPoolExecutor,
    function: Callable[..., Any],
    world_size: int,
    meeting: Path,
    *args: Any,
) -> list[Any]:
    """`function(context, *args)` on every rank of a fresh process group, each in a process of the
    pool.
    """
    futures = [
        pool.submit(_run_rank, function, context(rank, world_size, meeting), *args)
        for rank in range(world_size)
    ]
    return [future.result(timeout=600) for future in futures]


def _run_rank(function: Callable[..., Any], worker_context: WorkerContext, *args: Any) -> Any:
    try:
        return function(worker_context, *args)
    finally:
        # Engines are in reference cycles. What is left of them holds their process groups, and gloo
        # has three threads per group, one of which polls.
        gc.collect()


def saved_tensors(directory: Path, kind: str) -> dict[str, Tensor]:
    """Full tensors of one kind (`weight`, `exp_avg`, ...) from a policy checkpoint of any
    layout.
    """
    with open_checkpoint(directory) as reader:
        return {
            name: reader.read(f"{kind}/{name}", (0,) * len(shape), shape)
            for name, shape in reader.shapes.items()
        }


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest |found - expected| / |expected| over the tensors, in the 2-norm; the names must
    agree.
    """
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected
    )
