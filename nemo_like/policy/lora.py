"""LoRA adapters: initial values, files in the format of PEFT, and frozen weights in NF4.

    <directory>/adapter_config.json        rank, alpha, targets, base model
    <directory>/adapter_model.safetensors  float32, `base_model.model.<layer>.lora_A.weight`, ...

`peft.PeftModel.from_pretrained(model, directory)` reads it. That of a reward model also has the
score head, `base_model.model.score.weight`, which is trained in full.

A weight [m, n] in NF4 (QLoRA, by bitsandbytes) is stored as two tensors with the dim 0 of the
weight: codes, uint8 [m, n / 2], with two values per byte (the first in the upper bits), and the
largest magnitude of each block of 64 inputs, float32 [m, n / 64]. As no block has values of two
rows, any rows, and any columns that begin and end with a block, are quantized by themselves as in
the complete weight.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.paths import hub_name, require_model_directory
from nemo_like.config.schema import ALL_LINEAR, AdapterConfig, PolicyConfig
from nemo_like.integer_math import block_index
from nemo_like.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BLOCK_SIZE,
    PREFIX,
    SCORE_MODULE,
    adapter_names,
    check_matrices,
    is_adapter,
    stored_shapes,
)
from nemo_like.models.output_head import meta_model
from nemo_like.models.spec import SCORE_WEIGHT
from nemo_like.models.weight_files import Shape
from nemo_like.policy.checkpoint.hf_reader import ModelFiles, TensorFiles, check_values, open_model
from nemo_like.policy.checkpoint.sharded_reader import CheckpointReader
from nemo_like.policy.optim import NonFiniteError
from nemo_like.run.files import finish_library_file, reporting_write_errors, write_json

ADAPTER_DIRECTORY = "adapter"
"""Directory of the adapter inside an exported model."""

ReadBlock = Callable[[str, Shape, Shape], Tensor]
"""`read(name, offset, shape)` returns a block of the matrix `name`, float32 [*shape] on the CPU."""

_FORMAT = "nf4"
_MAX_VALUES = 1 << 24
"""Values that are quantized at once: on CPU the library needs several temporary copies of them."""


class AdapterState:
    """State that all adapters of a model share."""

    def __init__(self, config: AdapterConfig) -> None:
        self.scale = config.scale
        self.is_enabled = True

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model computes without adapters."""
        before = self.is_enabled
        self.is_enabled = False
        try:
            yield
        finally:
            self.is_enabled = before


def initial_matrix(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Return the initial values of A or B, float32 [*shape]: A uniform in +-1/sqrt(inputs), B 0.

    The values have the distribution of PEFT's. They depend on `seed` and `name`, and not on the
    engine or the layout of the ranks.
    """
    matrix = torch.zeros(shape)
    if name.endswith(".lora_A.weight"):
        generator = torch.Generator().manual_seed((seed << 32) % 2**63 + zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(shape[1])
        matrix.uniform_(-bound, bound, generator=generator)
    return matrix


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], policy: PolicyConfig) -> None:
    """Write the adapter of `policy.model_name`; `tensors` are A [rank, inputs] and
    B [outputs, rank] by name, and of a reward model its score head.

    Raises WriteError if a file cannot be written, and NonFiniteError for NaN or infinity.
    """
    path = directory / ADAPTER_WEIGHTS
    stored = {}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(
                f"adapter matrix {name} contains NaN or infinity, so the adapter is not written to"
                f" {directory}"
            )
        stored[PREFIX + name] = tensor.to("cpu", torch.float32).contiguous()
    with reporting_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(stored, path, metadata={"format": "pt"})
    finish_library_file(path)
    write_json(directory / ADAPTER_CONFIG, _peft_settings(policy, tensors))


def _peft_settings(policy: PolicyConfig, names: Collection[str]) -> dict[str, object]:
    """Return the contents of PEFT's `adapter_config.json`; `names` has the name of every tensor."""
    adapter = policy.lora
    has_score_head = SCORE_WEIGHT in names
    is_composite = any(".language_model." in name for name in names)
    targets = adapter.target_modules
    if ALL_LINEAR in targets:
        # PEFT gives adapters to experts too where it reads `all-linear`.
        targets = sorted({name.split(".")[-3] for name in names if is_adapter(name)})
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_score_head else "CAUSAL_LM",
        "base_model_name_or_path": hub_name(policy.model_name) or policy.model_name,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.use_rslora,
        "target_modules": list(targets),
        # Layers of a vision tower have the same names, and no adapter.
        "exclude_modules": r"(.*\.)?visual\..*" if is_composite else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": [SCORE_MODULE] if has_score_head else None,
    }


@contextmanager
def open_merged(
    policy: PolicyConfig, model_config: PretrainedConfig, reader: CheckpointReader
) -> Iterator[MergedWeights]:
    """Open the weights of `policy.model_name` with the adapters of a checkpoint.

    Weights that the run had in 4 bits are rounded in the same way. Raises ConfigError if a file of
    the model is missing or of another shape.
    """
    model = meta_model(model_config)
    with open_model(policy.model_name, model) as files:
        yield MergedWeights(files, model, reader, policy.lora)


class MergedWeights:
    """The weights of a model with the adapters of a checkpoint, read one at a time."""

    def __init__(
        self,
        files: ModelFiles,
        model: PreTrainedModel,
        reader: CheckpointReader,
        adapter: AdapterConfig,
    ) -> None:
        """`model` may be on the meta device; only names and shapes of its weights are used."""
        self._files = files
        self._reader = reader
        self._scale = adapter.scale
        self._quantized: set[str] = set()
        if adapter.is_quantized:
            require_library()
            self._quantized = {f"{layer}.weight" for layer in quantized_layers(model)}
        self._shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        # A score head is in the checkpoint, and may not be in the files of the model.
        self._stored = self._shapes.keys() - reader.shapes.keys()
        files.check({name: self._shapes[name] for name in self._stored})

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the full shape of each weight by Hugging Face name."""
        return self._shapes

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with W + scale B A, float32 [*shape] as in `weight_shapes`."""
        for name in names:
            if name not in self._stored:
                yield from self._reader.full_weights([name])
                continue
            shape = self._shapes[name]
            start = (0,) * len(shape)
            weight = self._files.read(name, start, shape).float()
            if name in self._quantized:
                weight = rounded(weight)
            pair = adapter_names(name)
            if pair.a in self._reader.shapes:
                matrix_a, matrix_b = (matrix for _, matrix in self._reader.full_weights(pair))
                weight = torch.addmm(weight, matrix_b, matrix_a, alpha=self._scale)
            yield name, weight


@contextmanager
def open_initial(
    adapter: AdapterConfig, shapes: Mapping[str, Shape], seed: int
) -> Iterator[ReadBlock]:
    """Open the values with which the training of adapters starts.

    `shapes` are the full shapes of the matrices of all ranks by name. Without
    `policy.lora.adapter_path` the values come from `initial_matrix`. Raises ConfigError for an
    adapter of other layers or shapes.
    """
    if adapter.adapter_path is None:
        yield partial(_random_block, shapes, seed)
        return
    require_model_directory("policy.lora.adapter_path", adapter.adapter_path)
    check_matrices(adapter, shapes)
    with closing(TensorFiles()) as files:
        yield partial(_stored_block, files, Path(adapter.adapter_path) / ADAPTER_WEIGHTS)


def stored_head(adapter: AdapterConfig, hidden_size: int) -> dict[str, Tensor]:
    """Return the score head of the adapter with which training starts, float32 [1, D] by name.

    It is empty without `policy.lora.adapter_path`, and for an adapter without a score head, such
    as the head of a language model. Raises ConfigError for a head of another shape.
    """
    if adapter.adapter_path is None:
        return {}
    shape = (1, hidden_size)
    stored = stored_shapes(adapter).get(SCORE_WEIGHT)
    if stored is None:
        return {}
    path = Path(adapter.adapter_path) / ADAPTER_WEIGHTS
    if stored != shape:
        raise ConfigError(
            f"policy.lora.adapter_path: {shown_path(path)} has {PREFIX}{SCORE_WEIGHT} as {stored},"
            f" and a reward model needs {shape}; give the adapter of a model with one label and"
            " this hidden size"
        )
    with closing(TensorFiles()) as files:
        return {SCORE_WEIGHT: _stored_block(files, path, SCORE_WEIGHT, (0, 0), shape)}


def _random_block(
    shapes: Mapping[str, Shape], seed: int, name: str, offset: Shape, shape: Shape
) -> Tensor:
    """Return a block [*shape] of the initial values of a matrix, float32 on the CPU."""
    num_rows, num_columns = shapes[name]
    full = initial_matrix(name, (num_rows, num_columns), seed)
    return full[block_index(offset, shape)]


def _stored_block(files: TensorFiles, path: Path, name: str, offset: Shape, shape: Shape) -> Tensor:
    """Read a block [*shape] of a matrix of the adapter, as float32 on the CPU."""
    block = torch.empty(shape, dtype=torch.float32)
    files.read_into(block, path, PREFIX + name, block_index(offset, shape))
    check_values(block, path, PREFIX + name)
    return block


class Nf4(NamedTuple):
    """A quantized weight [m, n], or rows of one."""

    codes: Tensor
    """uint8 [m, n / 2]."""
    scales: Tensor
    """The largest magnitude of each block, float32 [m, n / 64]."""


def require_library() -> None:
    """Raise ConfigError unless bitsandbytes, which defines the operators, can be imported."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "policy.lora.quantization is nf4, which needs bitsandbytes: pip install"
            f" 'nemo-like[qlora]' on every node, or set policy.lora.quantization to none ({error})"
        ) from error


def quantize(weight: Tensor) -> Nf4:
    """Return `weight`, floating point [m, n] with n a multiple of 64, in NF4."""
    num_rows, num_columns = weight.shape
    codes = weight.new_empty((num_rows, num_columns // 2), dtype=torch.uint8)
    scales = weight.new_empty((num_rows, num_columns // BLOCK_SIZE), dtype=torch.float32)
    step = rows_at_once(num_columns)
    for start in range(0, num_rows, step):
        rows = weight[start : start + step].contiguous()
        found_codes, found_scales = torch.ops.bitsandbytes.quantize_4bit.default(
            rows, BLOCK_SIZE, _FORMAT, torch.uint8
        )
        codes[start : start + step] = found_codes.view(len(rows), -1)
        scales[start : start + step] = found_scales.view(len(rows), -1)
    return Nf4(codes, scales)


def rows_at_once(num_columns: int) -> int:
    """Return the number of rows that are read and quantized at once."""
    return max(1, _MAX_VALUES // num_columns)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [m, n] of codes [m, n / 2] and scales [m, n / 64] in `dtype`."""
    shape = (codes.shape[0], 2 * codes.shape[1])
    if codes.shape[0] == 0:
        # A kernel is not started without rows; FSDP leaves ranks without some.
        return torch.empty(shape, dtype=dtype, device=codes.device)
    return torch.ops.bitsandbytes.dequantize_4bit.default(
        codes, scales, BLOCK_SIZE, _FORMAT, shape, dtype
    )


def rounded(weight: Tensor) -> Tensor:
    """Return `weight`, floating point [m, n], as it is after quantization, in float32."""
    codes, scales = quantize(weight)
    return dequantize(codes, scales, torch.float32)


class _Linear(torch.autograd.Function):
    """Product with a frozen NF4 weight, which the backward pass dequantizes again.

    Autograd would keep the dequantized weight of every layer until the backward pass.
    """

    @staticmethod
    def forward(hidden: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return F.linear(hidden, dequantize(codes, scales, hidden.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, codes, scales = inputs
        ctx.save_for_backward(codes, scales)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (grad,) = grads
        codes, scales = ctx.saved_tensors
        return grad @ dequantize(codes, scales, grad.dtype), None, None


def nf4_linear(hidden: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return W x, [..., m], of `hidden` [..., n] and a weight W [m, n] in NF4.

    The product has the precision of `hidden`.
    """
    output: Any = _Linear.apply(hidden, codes, scales)
    return output


def quantized_layers(causal_lm: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers of a model that are quantized, by name.

    transformers replaces them by layers of bitsandbytes: all linear layers except
    the output embedding.
    """
    head = causal_lm.get_output_embeddings()
    modules = causal_lm.named_modules()
    return {
        name: module for name, module in modules if type(module) is nn.Linear and module is not head
    }
