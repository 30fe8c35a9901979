"""Real tokens per second of a training step: padded, dynamic and packed, on the same rows, in one run.

    python benchmarks/train_step.py                                      # built-in lengths
    python benchmarks/train_step.py --lengths traces/conv.csv --columns ContextTokens,GeneratedTokens --scale-to 1024
    python benchmarks/train_step.py --jsonl gsm8k/train.jsonl --fields question,answer --tokenizer models/SmolLM2-135M-Instruct

Every mode trains the same rows with the same model and the same token budget per microbatch, in this process, and the
modes take turns, so that a noisy machine disturbs all of them alike. `padded` pads every row to the longest of the batch, as
a batch kept as one tensor does; `padded mb` takes the same number of rows at a time, padded to the longest among those.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_like.config.schema import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import NllLoss
from nemo_like.policy.dtensor_worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy

_VOCABULARY = 8192


@dataclass(frozen=True)
class Result:
    """One mode: median seconds of a step, and what its plan looked like."""

    name: str
    seconds: float
    tokens: int
    padding_share: float
    num_microbatches: float
    loss: float


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    lengths = load_lengths(arguments)
    rng = np.random.default_rng(arguments.seed)
    rows = rng.choice(lengths, arguments.rows, replace=len(lengths) < arguments.rows)
    print(
        f"{arguments.rows} rows: {rows.sum()} tokens, mean {rows.mean():.0f}, median {np.median(rows):.0f}, longest {rows.max()};"
        f" budget {arguments.budget} tokens; {torch.get_num_threads()} threads; device {arguments.device}"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments)
        results = measure(Path(folder), rows, arguments)
    print(f"{'mode':<10}{'real tokens/s':>15}{'step s':>9}{'padding':>9}{'microbatches':>14}{'loss':>10}{'ratio':>8}")
    for result in results:
        rate = result.tokens / result.seconds
        ratio = results[0].seconds / result.seconds
        print(
            f"{result.name:<10}{rate:>15,.0f}{result.seconds:>9.2f}{result.padding_share:>9.1%}"
            f"{result.num_microbatches:>14.0f}{result.loss:>10.5f}{ratio:>7.2f}x"
        )


def load_lengths(arguments: argparse.Namespace) -> np.ndarray:
    """int64: tokens of each row, from the file asked for or from a long-tailed stand-in (lognormal, median 180)."""
    if arguments.lengths is not None:
        with arguments.lengths.open(newline="") as file:
            table = list(csv.DictReader(file))
        lengths = np.array([sum(int(row[name]) for name in arguments.columns.split(",")) for row in table])
    elif arguments.jsonl is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        with arguments.jsonl.open() as file:
            texts = [" ".join(json.loads(line)[name] for name in arguments.fields.split(",")) for line in file]
        lengths = np.array([len(ids) for ids in tokenizer(texts)["input_ids"]])
    else:
        lengths = np.random.default_rng(0).lognormal(np.log(180), 0.9, 4096)
    if arguments.scale_to is not None:
        lengths = lengths * (arguments.scale_to / lengths.max())
    return np.maximum(lengths.astype(np.int64), 2)


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """A random Llama of the asked size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(model: Path, rows: np.ndarray, arguments: argparse.Namespace) -> list[Result]:
    """Median seconds per step of each mode; the modes alternate."""
    rng = np.random.default_rng(arguments.seed)
    input_ids = Jagged.from_lengths(rng.integers(0, _VOCABULARY, rows.sum()).astype(np.int32), rows)
    mask = Jagged(np.ones(len(input_ids.values), dtype=np.uint8), input_ids.offsets)
    batch = BatchedDataDict(input_ids=input_ids, token_mask=mask, length=rows)
    names = ("padded", "padded mb", "dynamic", "packed")
    policies = {name: open_policy(model, name, rows, arguments) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    plans = {name: policy.plan(batch["length"]) for name, policy in policies.items()}
    for turn in range(arguments.steps + 1):
        for name, policy in policies.items():
            start = time.perf_counter()
            placed = policy.place(batch, plans[name])
            metrics = policy.train(placed, None, NllLoss())
            if turn == 0:
                losses[name] = metrics[0]["policy/loss"].value  # before any update: must agree between modes
            else:
                seconds[name].append(time.perf_counter() - start)
    return [
        Result(
            name,
            float(np.median(seconds[name])),
            int(rows.sum()),
            plans[name].metrics()["packing/padding_share"],
            plans[name].metrics()["packing/num_microbatches"],
            losses[name],
        )
        for name in names
    ]


def open_policy(model: Path, mode: str, rows: np.ndarray, arguments: argparse.Namespace) -> Policy:
    """A policy of one worker in this process."""
    config = PolicyConfig(
        model_name=str(model),
        precision=arguments.precision,
        train_global_batch_size=len(rows),
        train_micro_batch_size=max(1, arguments.budget // int(rows.max())),
        max_total_sequence_length=int(rows.max()),
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
    kwargs = {"config": config, "seed": 0, "needs_reference": False}
    return Policy(LocalGroup(DTensorPolicyWorker, kwargs, local_context(device=arguments.device), name="policy"), config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="CSV file with token counts")
    parser.add_argument("--columns", default="ContextTokens,GeneratedTokens", help="its columns, added up")
    parser.add_argument("--jsonl", type=Path, help="JSONL file of texts, tokenised")
    parser.add_argument("--fields", default="question,answer")
    parser.add_argument("--tokenizer", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--scale-to", type=int, help="scale lengths so that the longest has this many tokens")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048, help="most tokens of a microbatch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
