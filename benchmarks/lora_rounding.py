r"""What is left of a small LoRA update when it is merged into bfloat16 weights.

    python benchmarks/lora_rounding.py --model models/SmolLM2-135M-Instruct

A is uniform in +-1/sqrt(inputs), as at the start of training, and B is random with the standard
deviation `std of B`; AdamW changes a value by up to the learning rate in each step. Of the layers
that have an adapter by default:

    changed   share of the weights that differ from the base model's after merging
    error     norm of (merged - W - scale B A) over the norm of scale B A
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from nemo_like.config.schema import AdapterConfig

_STDS = (1e-4, 3e-4, 1e-3)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line per standard deviation of B."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    arguments = parser.parse_args(argv)
    lora = AdapterConfig(enabled=True, rank=16, alpha=32.0)
    num_weights = 0
    num_changed = dict.fromkeys(_STDS, 0)
    errors = dict.fromkeys(_STDS, 0.0)
    updates = dict.fromkeys(_STDS, 0.0)
    with safe_open(arguments.model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
            if not lora.is_target(name.removesuffix(".weight")):
                continue
            weight = file.get_tensor(name).bfloat16()
            num_weights += weight.numel()
            num_outputs, num_inputs = weight.shape
            product = _product(num_outputs, num_inputs, lora.rank)
            for std in _STDS:
                update = lora.scale * std * product
                merged = (weight.float() + update).bfloat16()
                num_changed[std] += int((merged != weight).sum())
                errors[std] += float((merged.float() - weight.float() - update).square().sum())
                updates[std] += float(update.square().sum())
    print(f"{'std of B':>9}{'changed':>9}{'error':>7}")
    for std in _STDS:
        error = (errors[std] / updates[std]) ** 0.5
        print(f"{std:>9.0e}{num_changed[std] / num_weights:>9.1%}{error:>7.2f}")


def _product(num_outputs: int, num_inputs: int, rank: int) -> torch.Tensor:
    """Return B A [outputs, inputs] for a B with the standard deviation 1."""
    generator = torch.Generator().manual_seed(0)
    matrix_a = (2 * torch.rand(rank, num_inputs, generator=generator) - 1) / num_inputs**0.5
    matrix_b = torch.randn(num_outputs, rank, generator=generator)
    return matrix_b @ matrix_a


if __name__ == "__main__":
    main()
