r"""Real tokens per second of a training step: padded, dynamic and packed, on the same rows, in one
run.

    python benchmarks/train_step.py    # built-in lengths
    python benchmarks/train_step.py --lengths traces/conv.csv \
        --columns ContextTokens,GeneratedTokens --scale-to 1024
    python benchmarks/train_step.py --jsonl gsm8k/train.jsonl --fields question,answer \
        --tokenizer models/SmolLM2-135M-Instruct
    # tokens/s, MFU and peak memory of one GPU:
    python benchmarks/train_step.py --device cuda --model llama-1b --precision bfloat16 \
        --budget 8192 --rows 512 --lengths traces/conv.csv --scale-to 8192

Every mode trains the same rows with the same model and the same token budget per microbatch, in
this process; on a CPU the modes take turns, so that a noisy machine disturbs all of them alike, on
a GPU they follow each other, so that each has the memory to itself. `transformers` is the loop
people write: rows in the given order, so many at a time, padded to the longest among them, logits
and all; `padded` pads every row to the longest of the batch, as a batch kept as one tensor does;
`padded mb` takes the same number of rows at a time, padded to the longest among those. MFU counts
the FLOPs of real tokens.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_like.config.schema import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.spec import CostModel
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import NllLoss
from nemo_like.models.spec import ModelSpec, load_spec
from nemo_like.policy.device import peak_flops
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy

_VOCABULARY = 8192


@dataclass(frozen=True)
class Result:
    """One mode: median seconds of a step, and what its batches looked like."""

    name: str
    seconds: float
    padding_share: float
    num_microbatches: float
    loss: float
    peak_gb: float
    """Most memory the device held; 0 on a CPU."""


class Mode(Protocol):
    """A way to train a batch."""

    padding_share: float
    num_microbatches: float

    def step(self) -> float:
        """One optimizer step; the loss before it."""
        ...

    def close(self) -> None: ...


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    lengths = load_lengths(arguments)
    rng = np.random.default_rng(arguments.seed)
    rows = rng.choice(lengths, arguments.rows, replace=len(lengths) < arguments.rows)
    print(
        f"{arguments.rows} rows: {rows.sum()} tokens, mean {rows.mean():.0f}, median"
        f" {np.median(rows):.0f}, longest {rows.max()};"
        f" budget {arguments.budget} tokens; {torch.get_num_threads()} threads; device"
        f" {arguments.device}"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments)
        results = measure(Path(folder), rows, arguments)
        spec = ModelSpec.from_config(AutoConfig.from_pretrained(folder))
        # No position predicts the first token of a row. The backward pass is twice the forward.
        flops = 3.0 * CostModel.from_spec(spec).of(rows, rows - 1).sum()
    peak, source = peak_flops(torch.device(arguments.device))
    print(f"MFU is of {peak / 1e12:.3g} TFLOP/s ({source})")
    print(
        f"{'mode':<13}{'real tokens/s':>15}{'step s':>9}{'padding':>9}{'microbatches':>14}"
        f"{'loss':>10}{'MFU':>8}{'peak GB':>9}{'ratio':>8}"
    )
    for result in results:
        tokens_per_s = rows.sum() / result.seconds
        mfu = flops / result.seconds / peak
        print(
            f"{result.name:<13}{tokens_per_s:>15,.0f}{result.seconds:>9.2f}"
            f"{result.padding_share:>9.1%}{result.num_microbatches:>14.0f}{result.loss:>10.5f}"
            f"{mfu:>8.1%}{result.peak_gb:>9.1f}{results[0].seconds / result.seconds:>7.2f}x"
        )


def load_lengths(arguments: argparse.Namespace) -> np.ndarray:
    """int64: tokens of each row, from the given file or from a long-tailed stand-in (lognormal,
    median 180).
    """
    if arguments.lengths is not None:
        with arguments.lengths.open(newline="") as file:
            table = list(csv.DictReader(file))
        lengths = np.array(
            [sum(int(row[name]) for name in arguments.columns.split(",")) for row in table]
        )
    elif arguments.jsonl is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        with arguments.jsonl.open() as file:
            texts = [
                " ".join(json.loads(line)[name] for name in arguments.fields.split(","))
                for line in file
            ]
        lengths = np.array([len(ids) for ids in tokenizer(texts)["input_ids"]])
    else:
        lengths = np.random.default_rng(0).lognormal(np.log(180), 0.9, 4096)
    if arguments.scale_to is not None:
        lengths = lengths * (arguments.scale_to / lengths.max())
    return np.maximum(lengths.astype(np.int64), 2)


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """A random Llama of the given size."""
    torch.manual_seed(0)
    if arguments.model == "llama-1b":  # the shape of Llama 3.2 1B
        sizes: dict[str, Any] = {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "vocab_size": 128256,
        }
        sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    else:
        sizes = {
            "hidden_size": arguments.hidden,
            "intermediate_size": arguments.hidden * 3,
            "vocab_size": _VOCABULARY,
        }
        sizes |= {
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": arguments.hidden // 64,
        }
        sizes |= {"num_key_value_heads": arguments.hidden // 64}
    config = LlamaConfig(**sizes, max_position_embeddings=131072, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(model: Path, rows: np.ndarray, arguments: argparse.Namespace) -> list[Result]:
    """Median seconds per step of each mode."""
    rng = np.random.default_rng(arguments.seed)
    input_ids = Jagged.from_lengths(rng.integers(0, _VOCABULARY, rows.sum()).astype(np.int32), rows)
    mask = Jagged(np.ones(len(input_ids.values), dtype=np.uint8), input_ids.offsets)
    batch = BatchedDataDict(input_ids=input_ids, token_mask=mask, length=rows)
    openers: dict[str, Callable[[], Mode]] = {
        "transformers": lambda: TransformersLoop(model, batch, arguments),
        **{
            name: partial(PolicyMode, model, name, batch, arguments)
            for name in ("padded", "padded mb", "dynamic", "packed")
        },
    }
    openers = {
        name: opener for name, opener in openers.items() if name in arguments.modes.split(",")
    }
    if arguments.device == "cpu":
        modes = {name: opener() for name, opener in openers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in modes}
        losses: dict[str, list[float]] = {name: [] for name in modes}
        for _ in range(arguments.steps + 1):
            for name, mode in modes.items():
                _timed_step(mode, seconds[name], losses[name])
        return [
            _result(name, mode, seconds[name], losses[name], 0.0) for name, mode in modes.items()
        ]
    return [_measure_alone(name, opener, arguments.steps) for name, opener in openers.items()]


def _measure_alone(name: str, opener: Callable[[], Mode], num_steps: int) -> Result:
    """Measure one mode with the device's memory to itself."""
    torch.cuda.reset_peak_memory_stats()
    mode, times, values = opener(), [], []
    for _ in range(num_steps + 1):
        _timed_step(mode, times, values)
    result = _result(name, mode, times, values, torch.cuda.max_memory_allocated() / 1e9)
    mode.close()
    del mode
    # A model's hooks refer to the model, so that only the garbage collector frees it.
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _timed_step(mode: Mode, seconds: list[float], losses: list[float]) -> None:
    start = time.perf_counter()
    losses.append(mode.step())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


def _result(
    name: str, mode: Mode, seconds: list[float], losses: list[float], peak_gb: float
) -> Result:
    # The first step warms up; its loss, before any update, must agree between modes.
    return Result(
        name,
        float(np.median(seconds[1:])),
        mode.padding_share,
        mode.num_microbatches,
        losses[0],
        peak_gb,
    )


class PolicyMode:
    """A policy of one worker in this process, batching one way."""

    def __init__(
        self, model: Path, mode: str, batch: BatchedDataDict, arguments: argparse.Namespace
    ) -> None:
        self._policy, self._batch = open_policy(model, mode, batch["length"], arguments), batch
        metrics = self._policy.plan(batch["length"]).metrics()
        self.padding_share, self.num_microbatches = (
            metrics["packing/padding_share"],
            metrics["packing/num_microbatches"],
        )

    def step(self) -> float:
        sharded = self._policy.shard(self._batch, self._policy.plan(self._batch["length"]))
        return self._policy.train(sharded, None, NllLoss())[0]["policy/loss"].value

    def close(self) -> None:
        self._policy.shutdown()


class TransformersLoop:
    """Plain transformers and AdamW: `budget // longest row` rows at a time, padded to the longest
    of them.
    """

    def __init__(self, model: Path, batch: BatchedDataDict, arguments: argparse.Namespace) -> None:
        self._model = LlamaForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.to(arguments.device)
        if arguments.activation_checkpointing:
            self._model.gradient_checkpointing_enable()
            self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._device, self._half = arguments.device, arguments.precision == "bfloat16"
        lengths = batch["length"]
        size = max(1, arguments.budget // int(lengths.max()))
        self._parts = [
            range(start, min(start + size, len(lengths))) for start in range(0, len(lengths), size)
        ]
        self._rows, self._num_tokens = list(batch["input_ids"]), int((lengths - 1).sum())
        positions = sum(len(part) * int(lengths[list(part)].max()) for part in self._parts)
        self.padding_share, self.num_microbatches = (
            1 - lengths.sum() / positions,
            float(len(self._parts)),
        )

    def step(self) -> float:
        total = 0.0
        for part in self._parts:
            ids = [torch.from_numpy(self._rows[row].astype(np.int64)) for row in part]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self._device)
            mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(row) for row in ids], batch_first=True
            ).to(self._device)
            labels = padded.masked_fill(mask == 0, -100)
            with torch.autocast(
                torch.device(self._device).type, torch.bfloat16, enabled=self._half
            ):
                output = self._model(
                    padded,
                    attention_mask=mask,
                    labels=labels,
                    use_cache=False,
                    num_items_in_batch=self._num_tokens,
                )
            output.loss.backward()
            total += float(output.loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def close(self) -> None:
        del self._model, self._optimizer


def open_policy(model: Path, mode: str, rows: np.ndarray, arguments: argparse.Namespace) -> Policy:
    """A policy of one worker in this process."""
    config = PolicyConfig(
        model_name=str(model),
        precision=arguments.precision,
        train_global_batch_size=len(rows),
        train_micro_batch_size=max(1, arguments.budget // int(rows.max())),
        max_total_sequence_length=int(rows.max()),
        activation_checkpointing="full" if arguments.activation_checkpointing else "none",
    )
    if mode == "packed":
        packing = SequencePackingConfig(
            enabled=True, train_mb_tokens=arguments.budget, logprob_mb_tokens=arguments.budget
        )
        config = replace(config, sequence_packing=packing)
    elif mode in ("dynamic", "padded"):
        dynamic = DynamicBatchingConfig(
            enabled=True,
            train_mb_tokens=arguments.budget,
            logprob_mb_tokens=arguments.budget,
            sequence_length_round=int(rows.max()) if mode == "padded" else 1,
        )
        config = replace(config, dynamic_batching=dynamic)
    kwargs = {"config": config}
    return Policy(
        LocalGroup(
            DTensorPolicyWorker, kwargs, local_context(device=arguments.device), name="policy"
        ),
        config,
        load_spec(config.model_name),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help="CSV file with token counts")
    parser.add_argument(
        "--columns", default="ContextTokens,GeneratedTokens", help="its columns, added up"
    )
    parser.add_argument("--jsonl", type=Path, help="JSONL file of texts, tokenised")
    parser.add_argument("--fields", default="question,answer")
    parser.add_argument("--tokenizer", default="models/SmolLM2-135M-Instruct")
    parser.add_argument(
        "--scale-to", type=int, help="scale lengths so that the longest has this many tokens"
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="most tokens of a microbatch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--modes",
        default="transformers,padded,padded mb,dynamic,packed",
        help="which ones, by comma",
    )
    parser.add_argument(
        "--model",
        choices=("tiny", "llama-1b"),
        default="tiny",
        help="tiny: of --hidden and --layers",
    )
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
