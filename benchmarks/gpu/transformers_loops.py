"""Training loops of plain transformers, for comparison: padded rows and packed rows in bfloat16.

`padded` takes a fixed number of rows at a time, in the given order, padded to their longest.
`packed` concatenates rows up to the budget and restarts the position ids, as transformers supports
it; the attention is the named implementation of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cells import SkipCell, require_modules
from benchmarks.gpu.rows import random_rows
from benchmarks.gpu.training_steps import throughput, time_calls
from nemo_like.models.spec import load_spec

_MODULES = {"flash_attention_2": ("flash_attn",), "flash_attention_3": ("flash_attn_interface",)}
"""Modules that an attention implementation of transformers needs."""


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """One loop."""

    folder: Path
    layout: Literal["padded", "packed"]
    num_rows: int
    """Rows of a padded microbatch."""
    attention: str
    """`attn_implementation` of transformers."""
    master: Literal["bfloat16", "float32"]
    """dtype of the weights; float32 weights are cast by autocast."""
    lengths: np.ndarray
    """int64 [B]"""
    budget: int
    """Max tokens of a packed microbatch."""
    num_steps: int


def time_loop(case: LoopCase, device: str) -> dict[str, Any]:
    """Return tokens/s, MFU and peak memory of a loop. Raises SkipCell without its kernels."""
    require_modules(*_MODULES.get(case.attention, ()))
    if case.attention == "flex_attention" and not device.startswith("cuda"):
        raise SkipCell("flex attention is compiled for a GPU")
    model: Any = AutoModelForCausalLM.from_pretrained(
        case.folder,
        dtype=getattr(torch, case.master),
        attn_implementation=case.attention,
        local_files_only=True,
    )
    model.to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.startswith("cuda"))
    rows = [ids.astype(np.int64) for ids in _token_rows(case)]
    microbatches = padded(rows, case.num_rows)
    if case.layout == "packed":
        microbatches = packed(rows, case.budget)
    num_labels = sum(int((each["labels"] != -100).sum()) for each in microbatches)
    if case.layout == "padded":
        # The first token of a row has a label that transformers leaves out.
        num_labels -= len(rows)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []

    def step() -> None:
        total = torch.zeros((), device=device)
        for microbatch in microbatches:
            inputs = {name: tensor.to(device) for name, tensor in microbatch.items()}
            is_mixed = case.master == "float32"
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=is_mixed):
                loss = model(**inputs, use_cache=False, num_items_in_batch=num_labels).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))

    seconds = time_calls(step, device, case.num_steps, 1)
    values = throughput(case.folder, case.lengths, seconds["median_s"], device)
    num_positions = sum(microbatch["input_ids"].numel() for microbatch in microbatches)
    values |= {
        "step_s": seconds["median_s"],
        "first_step_s": seconds["first_s"],
        "loss": losses[0],
        "num_microbatches": len(microbatches),
        "padding_share": 1 - int(case.lengths.sum()) / num_positions,
    }
    if device.startswith("cuda"):
        values["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return values


def _token_rows(case: LoopCase) -> list[np.ndarray]:
    vocab_size = load_spec(str(case.folder)).vocab_size
    return list(random_rows(case.lengths, vocab_size)["input_ids"])


def padded(rows: list[np.ndarray], num_rows: int) -> list[dict[str, Tensor]]:
    """Return microbatches [R, S] of `num_rows` rows int64 [L], padded to the longest of them."""
    microbatches = []
    for start in range(0, len(rows), num_rows):
        part = [torch.from_numpy(row) for row in rows[start : start + num_rows]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(row) for row in part], batch_first=True
        )
        labels = ids.masked_fill(mask == 0, -100)
        microbatches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return microbatches


def packed(rows: list[np.ndarray], budget: int) -> list[dict[str, Tensor]]:
    """Return microbatches [1, T] of consecutive rows int64 [L] with at most `budget` tokens.

    The first token of a row has no label, so that no row predicts another.
    """
    groups: list[list[np.ndarray]] = [[]]
    for row in rows:
        if groups[-1] and sum(map(len, groups[-1])) + len(row) > budget:
            groups.append([])
        groups[-1].append(row)
    microbatches = []
    for group in groups:
        ids = torch.from_numpy(np.concatenate(group))
        positions = torch.cat([torch.arange(len(row)) for row in group])
        labels = ids.masked_fill(positions == 0, -100)
        microbatches.append(
            {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}
        )
    return microbatches
