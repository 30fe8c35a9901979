"""Training steps on the device against values that were recorded on a CPU.

    python -m benchmarks.gpu.step_check    # records benchmarks/gpu/cpu_steps.json again

The models are small and their weights are the same with every version of torch. Recorded are the
loss and the gradient norm of each step, and the mean log-prob of all tokens before the first.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.gpu.cells import Cell, SkipCell, write_json
from benchmarks.gpu.models import write_reproducible_model
from benchmarks.gpu.policies import PolicyHolder, policy_config
from benchmarks.gpu.rows import random_rows
from nemo_like.config.schema import OptimizerConfig
from nemo_like.losses import NllLoss

Precision = Literal["float32", "bfloat16"]

RECORDED = Path(__file__).with_name("cpu_steps.json")

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_SIZES, "use_sliding_window": False},
    "qwen3-window": {
        "model_type": "qwen3",
        **_SIZES,
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
}
_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest relative difference of a value from the recorded one."""
_NUM_STEPS = 3
_LONGEST = 64


def step_cells(device: str, work: Path, engine: str, *, is_tiny: bool) -> Iterator[Cell]:
    """Yield a cell per model and precision; if `is_tiny`, bfloat16 with one model only."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["values"]
    for model in MODELS:
        for precision in _PRECISIONS:
            if is_tiny and precision == "bfloat16" and model != "llama":
                # A bfloat16 step on a CPU takes three times as long as one in float32.
                continue
            name = f"{engine} step {model} {precision}"
            expected = recorded[f"{model} {precision}"]
            yield Cell(
                name=name,
                measure=partial(check_steps, device, work, engine, model, precision, expected),
                expected_s=6.0,
            )


def check_steps(
    device: str,
    work: Path,
    engine: str,
    model: str,
    precision: Precision,
    expected: Mapping[str, Any],
) -> Mapping[str, Any]:
    """Compare the steps of an engine with the recorded ones."""
    found = run_steps(device, work, engine, model, precision)
    if not np.isclose(found["weights_sum"], expected["weights_sum"], rtol=1e-6):
        raise SkipCell(
            "the recorded values are of a model with other weights; record them again with"
            " python -m benchmarks.gpu.step_check"
        )
    differences = {}
    for name in ("loss", "grad_norm", "mean_logprob"):
        reference = np.array(expected[name])
        difference = np.abs(np.array(found[name]) - reference) / np.abs(reference)
        differences[name] = float(difference.max())
    limit = _TOLERANCE[precision]
    is_passed = all(difference <= limit for difference in differences.values())
    return {
        "passed": is_passed,
        "limit": limit,
        "relative difference": differences,
        "found": found,
        "recorded": dict(expected),
    }


def run_steps(
    device: str, work: Path, engine: str, model: str, precision: Precision
) -> dict[str, Any]:
    """Train the model for a few steps; return the values that are compared."""
    folder = work / f"check-{model}"
    if not (folder / "tokenizer_config.json").exists():
        write_reproducible_model(folder, MODELS[model], seed=1)
    lengths = np.random.RandomState(2).randint(2, _LONGEST + 1, 24)
    batch = random_rows(lengths.astype(np.int64), _SIZES["vocab_size"], seed=3)
    config = policy_config(
        folder,
        budget=256,
        num_rows=len(lengths),
        longest=_LONGEST,
        options={"policy.optimizer": OptimizerConfig(lr=1e-3)},
        precision=precision,
    )
    holder = PolicyHolder(device, engine)
    try:
        policy = holder.get(config)
        policy.probe_isolation()
        sharded = policy.shard(batch, policy.plan(batch["length"]))
        logprobs = policy.fetch_logprobs(policy.compute_logprobs(sharded))["prev_logprobs"]
        losses = []
        norms = []
        for _ in range(_NUM_STEPS):
            metrics = policy.train(sharded, None, NllLoss())[0]
            losses.append(metrics["policy/loss"].value)
            norms.append(metrics["policy/grad_norm"].value)
    finally:
        holder.close()
    return {
        "loss": losses,
        "grad_norm": norms,
        "mean_logprob": [float(logprobs.values.mean())],
        "weights_sum": _weights_sum(folder),
    }


def _weights_sum(folder: Path) -> float:
    """Return the sum of the absolute values of all weights."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return float(sum(tensor.double().abs().sum() for tensor in tensors.values()))


def main() -> int:
    values = {}
    with tempfile.TemporaryDirectory() as work:
        for model in MODELS:
            for precision in _PRECISIONS:
                name = f"{model} {precision}"
                values[name] = run_steps("cpu", Path(work), "dtensor", model, precision)
                print(name, values[name], flush=True)
    write_json(RECORDED, {"torch": torch.__version__, "engine": "dtensor", "values": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
