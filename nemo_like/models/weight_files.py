"""Safetensors files of a model without their values: names, shapes, sizes, digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.models.spec import SCORE_WEIGHT, ModelSpec

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

Shape = tuple[int, ...]


WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of the names of output embeddings."""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_CHUNK_BYTES = 2**24
_NUM_SAMPLES = 32
"""Samples of each file; values of a model that was trained differ in all of them."""

_SAMPLE_BYTES = 4096


def weight_paths(directory: Path) -> list[Path]:
    """Return the weight files of a model: model.safetensors, or the files that its index names.

    As in transformers, other files in the directory are not part of the model, for example
    consolidated.safetensors or an adapter. The list is empty without both files. Raises ValueError,
    with a text that continues the name of the index, for a damaged index.
    """
    if (directory / WEIGHTS_NAME).is_file():
        return [directory / WEIGHTS_NAME]
    index = directory / INDEX_NAME
    if not index.is_file():
        return []
    try:
        names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"is not an index of weight files ({type(error).__name__}: {error})"
        ) from error
    return [directory / name for name in sorted(names)]


def read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shape of each tensor of a safetensors file by name.

    Raises ValueError with the problem of a file that cannot be read or is damaged; see
    `read_header`.
    """
    return {name: tuple(entry["shape"]) for name, entry in read_header(path).items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of the header by name of the tensor: `dtype`, `shape`, `data_offsets`.

    The header is a JSON object after its length in 8 bytes; the tensors follow without a gap
    (https://github.com/huggingface/safetensors, "Format"). Raises ValueError, with a text that
    continues the name of the file, unless the header and the size of the file agree.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            # Checked before the read: a damaged length could exceed the memory.
            if header_size > min(size, MAX_HEADER_BYTES):
                raise ValueError("the length of the header exceeds the file")
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected_size = 8 + header_size + max(ends, default=0)
        for entry in header.values():
            tuple(entry["shape"])
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            "is damaged: it does not begin with the header of a safetensors file"
        ) from error
    if size != expected_size:
        raise ValueError(f"is damaged: it has {size:,} bytes and should have {expected_size:,}")
    return header


def has_own_head(directory: Path) -> bool:
    """Return True if the files have an output embedding with other values than the input embedding.

    transformers does not tie such a model, whatever its config.json has. The result is False if
    one of the two is missing or a file cannot be read.
    """
    try:
        paths = weight_paths(directory)
        return _has_own_head(tuple((path, path.stat().st_mtime_ns) for path in paths))
    except (OSError, ValueError):
        return False


@lru_cache(maxsize=16)
def _has_own_head(files: tuple[tuple[Path, int], ...]) -> bool:
    """See `has_own_head`; `files` are (path, time of the last change)."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path, _ in files:
        for name, entry in read_header(path).items():
            for kind, ends in (("head", HEADS), ("embedding", _EMBEDDINGS)):
                # Layers for multi-token prediction have copies of both.
                if name.endswith(ends) and re.search(r"\.\d+\.", name) is None:
                    found.setdefault(kind, (path, entry))
    if len(found) < 2:
        return False
    head, embedding = found["head"], found["embedding"]
    if any(head[1][key] != embedding[1][key] for key in ("dtype", "shape")):
        return True
    with head[0].open("rb") as head_file, embedding[0].open("rb") as embedding_file:
        num_bytes = 0
        for file, (_, entry) in ((head_file, head), (embedding_file, embedding)):
            start, end = entry["data_offsets"]
            num_bytes = end - start
            file.seek(8 + int.from_bytes(file.read(8), "little") + start)
        for start in range(0, num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, num_bytes - start)
            if head_file.read(size) != embedding_file.read(size):
                return True
    return False


def weights_digest(paths: Sequence[Path]) -> str:
    """Return a hash of the sizes and of evenly spaced samples of weight files.

    It does not depend on names and dates, so a copy of the files has the same one. Raises OSError
    for a file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def weight_sizes(spec: ModelSpec) -> dict[str, int] | None:
    """Return Hugging Face name -> number of values of each distinct weight.

    None for a model of another shape: experts, latent or linear attention, two-matrix feed-forward.
    """
    hidden = spec.hidden_size
    sizes = {"model.embed_tokens.weight": spec.embedding_params}
    for layer in range(spec.num_layers):
        for name, size in _layer_sizes(spec).items():
            sizes[f"model.layers.{layer}.{name}"] = size
    sizes["model.norm.weight"] = hidden
    if spec.head == "scores":
        sizes[SCORE_WEIGHT] = spec.head_params
    elif not spec.is_tied:
        sizes["lm_head.weight"] = spec.embedding_params
    # The count of the configuration is checked against transformers for every supported shape.
    return sizes if sum(sizes.values()) == spec.num_params else None


class LinearLayer(NamedTuple):
    """A linear layer of a decoder layer, without its bias."""

    num_inputs: int
    num_outputs: int
    is_row_parallel: bool = False
    """Tensor parallelism shards the inputs and not the outputs."""


def linear_layers_of(spec: ModelSpec) -> dict[str, LinearLayer]:
    """Return the linear layers of one decoder layer of a Llama, by the ends of their names."""
    hidden = spec.hidden_size
    query = spec.num_heads * spec.head_dim
    key = spec.num_kv_heads * spec.head_dim
    width = spec.intermediate_size
    return {
        "self_attn.q_proj": LinearLayer(hidden, query),
        "self_attn.k_proj": LinearLayer(hidden, key),
        "self_attn.v_proj": LinearLayer(hidden, key),
        "self_attn.o_proj": LinearLayer(query, hidden, is_row_parallel=True),
        "mlp.gate_proj": LinearLayer(hidden, width),
        "mlp.up_proj": LinearLayer(hidden, width),
        "mlp.down_proj": LinearLayer(width, hidden, is_row_parallel=True),
    }


def _layer_sizes(spec: ModelSpec) -> dict[str, int]:
    hidden = spec.hidden_size
    layers = linear_layers_of(spec)
    sizes = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    has_bias = {
        "self_attn.q_proj": spec.has_qkv_bias,
        "self_attn.k_proj": spec.has_qkv_bias,
        "self_attn.v_proj": spec.has_qkv_bias,
        "self_attn.o_proj": spec.has_output_bias,
    }
    for name, layer in layers.items():
        sizes[f"{name}.weight"] = layer.num_inputs * layer.num_outputs
        if has_bias.get(name, spec.has_mlp_bias):
            sizes[f"{name}.bias"] = layer.num_outputs
    if spec.has_qk_norm:
        sizes["self_attn.q_norm.weight"] = spec.head_dim
        sizes["self_attn.k_norm.weight"] = spec.head_dim
    return sizes
