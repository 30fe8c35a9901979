"""Supervised fine-tuning with the Trainer of transformers, with and without token budgets.

    python benchmarks/drop_in_trainer.py --model models/SmolLM2-135M-Instruct --layers 2
        --data gsm8k/train.jsonl --lengths azure_conv.csv --json result.json

Four variants train the same model on the same rows, each row once, with the same learning rate:
random batches, batches of similar length (`train_sampling_strategy="group_by_length"`), and
`OnlineBatchesMixin` padded and packed. No microbatch has more than `--max-tokens` positions. The
first two have a fixed number of rows, so that number is what fits if all rows are as long as the
longest, and accumulate microbatches to about as many optimizer steps as the others.

The data sets are GSM8K, and a mixture of GSM8K with conversations made of several of its rows,
`--long-share` of the rows, whose token counts come from `--lengths`. `--rows 0` leaves out the
first, no `--lengths` the second.

The variants take turns in one process, in the reverse order every second round. tokens/s counts
tokens of rows without padding over all rounds. Compare ratios of one run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from nemo_like.policy.inputs import attention
from nemo_like.torch_data import PackingCollator
from nemo_like.torch_data.hf_trainer import OnlineBatchesMixin

VARIANTS = ("random", "group_by_length", "online padded", "online packed")


class TokenBudgetTrainer(OnlineBatchesMixin, Trainer):
    """A Trainer whose microbatches have a number of tokens, not of rows."""


@dataclass(frozen=True)
class Task:
    """A data set and what all variants have in common."""

    name: str
    train: list[list[int]]
    """Token ids of each row."""
    validation: list[list[int]]
    max_tokens: int
    """Positions of a microbatch, padding included."""
    microbatches_per_step: int
    """Those of the variants with a token budget."""
    learning_rate: float
    device: str
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.train))

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of a fixed batch: that many of the longest row fit."""
        return max(self.max_tokens // max(map(len, self.train)), 1)

    @property
    def fixed_accumulation(self) -> int:
        """Fixed microbatches per step, for about as many steps as full token budgets need."""
        num_steps = math.ceil(self.num_tokens / (self.max_tokens * self.microbatches_per_step))
        return max(round(len(self.train) / (self.rows_per_microbatch * num_steps)), 1)


@dataclass(frozen=True)
class Run:
    """Measurements of one variant in one round."""

    variant: str
    tokens: int
    """Tokens of the rows."""
    positions: int
    """Tokens and padding that the model computed."""
    microbatches: int
    largest: int
    """Positions of the largest microbatch."""
    steps: int
    """Optimizer steps."""
    seconds: float
    cpu_seconds: float
    validation_loss: float


class _Clock(TrainerCallback):
    """Seconds of the training loop."""

    seconds = 0.0
    cpu_seconds = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter(), time.process_time()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._start[0]
        self.cpu_seconds = time.process_time() - self._start[1]


def read_texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of the question and answer of each line."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    end = tokenizer.eos_token or ""
    return tokenizer([f"{row['question']}\n{row['answer']}{end}" for row in rows])["input_ids"]


def mixture(
    texts: list[list[int]],
    lengths: Sequence[int],
    num_rows: int,
    long_share: float,
    random: np.random.Generator,
) -> list[list[int]]:
    """Return `num_rows` rows in random order: `long_share` of them are several `texts` joined and
    cut to one of `lengths`, the others single ones.
    """
    num_long = round(num_rows * long_share)
    order = random.permutation(len(texts)).tolist()
    rows = [texts[order.pop()] for _ in range(num_rows - num_long)]
    for length in random.choice(lengths, num_long).tolist():
        row: list[int] = []
        while len(row) < length:
            row += texts[order.pop()]
        rows.append(row[:length])
    return [rows[index] for index in random.permutation(num_rows)]


def mean_loss(model: nn.Module, rows: list[list[int]]) -> float:
    """Return the mean loss of the tokens of `rows`, each row by itself."""
    total = 0.0
    count = 0
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row], device=device)
            total += model(input_ids=ids, labels=ids).loss.item() * (len(row) - 1)
            count += len(row) - 1
    return total / count


def run(variant: str, task: Task, initial: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Run:
    """Train a copy of `initial` on all rows of `task`.

    Raises RuntimeError if the model received other tokens than the rows have.
    """
    model: Any = copy.deepcopy(initial).to(task.device)
    has_budget = variant.startswith("online")
    accumulation = task.microbatches_per_step if has_budget else task.fixed_accumulation
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            use_cpu=task.device == "cpu",
            num_train_epochs=1,
            per_device_train_batch_size=task.rows_per_microbatch,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy="random" if has_budget or variant == "random" else variant,
            learning_rate=task.learning_rate,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=task.seed,
        )
        budget: dict[str, Any] = {"max_tokens": task.max_tokens} if has_budget else {}
        clock = _Clock()
        collator: Any = DataCollatorForSeq2Seq(tokenizer)
        if variant == "online packed":
            collator = PackingCollator()
            model.set_attn_implementation(attention.IMPLEMENTATION)
        trainer = (TokenBudgetTrainer if has_budget else Trainer)(
            model,
            arguments,
            train_dataset=Dataset.from_list(
                [{"input_ids": row, "labels": row} for row in task.train]
            ),
            data_collator=collator,
            callbacks=[clock],
            **budget,
        )
        trainer.remove_callback(PrinterCallback)
        positions: list[int] = []
        real: list[int] = []

        def count(_: nn.Module, __: Any, batch: Mapping[str, Any]) -> None:
            positions.append(batch["input_ids"].numel())
            mask = batch.get("attention_mask")
            real.append(positions[-1] if mask is None else int(mask.sum()))

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
        hook.remove()
    if sum(real) != task.num_tokens:
        raise RuntimeError(f"{variant} trained {sum(real)} of {task.num_tokens} tokens")
    return Run(
        variant=variant,
        tokens=sum(real),
        positions=sum(positions),
        microbatches=len(positions),
        largest=max(positions),
        steps=trainer.state.global_step,
        seconds=clock.seconds,
        cpu_seconds=clock.cpu_seconds,
        validation_loss=mean_loss(model, task.validation),
    )


def warm_up(initial: nn.Module, task: Task) -> None:
    """Compute the gradient of a microbatch of the largest size, and discard it."""
    model: Any = copy.deepcopy(initial).to(task.device)
    ids = torch.full((2, task.max_tokens // 2), task.train[0][0], device=task.device)
    model(input_ids=ids, labels=ids).loss.backward()


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one record per variant over all rounds, with its tokens/s over those of the others
    that have no token budget.
    """
    records: list[dict[str, Any]] = []
    for variant in VARIANTS:
        own = [one for one in runs if one.variant == variant]
        tokens = sum(one.tokens for one in own)
        record = {name: value for name, value in asdict(own[0]).items() if "seconds" not in name}
        record |= {
            "tokens_per_s": tokens / sum(one.seconds for one in own),
            "tokens_per_cpu_s": tokens / sum(one.cpu_seconds for one in own),
            "padding": 1 - own[0].tokens / own[0].positions,
        }
        records.append(record)
    for record in records:
        for name in ("tokens_per_s", "tokens_per_cpu_s"):
            for base in records[:2]:
                record[f"{name}_over_{base['variant']}"] = record[name] / base[name]
    return records


def print_table(records: Sequence[Mapping[str, Any]]) -> None:
    print(
        "| variant | tokens/s | padding | microbatches | largest | steps | validation loss", end=""
    )
    print(" | of random | of group_by_length | the same per CPU s |\n|" + "---|" * 10)
    for record in records:
        ratios = [
            record[f"{name}_over_{base}"]
            for name in ("tokens_per_s", "tokens_per_cpu_s")
            for base in VARIANTS[:2]
        ]
        print(
            f"| {record['variant']} | {record['tokens_per_s']:,.0f} | {record['padding']:.1%}"
            f" | {record['microbatches']} | {record['largest']:,} | {record['steps']}"
            f" | {record['validation_loss']:.3f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
            f" | {ratios[2]:.2f}, {ratios[3]:.2f} |",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    attention.register()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    overrides = {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    initial = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, **overrides
    )
    # A cache of keys and values would hide that a batch is packed.
    initial.config.use_cache = False
    random = np.random.default_rng(arguments.seed)
    texts = [row[: arguments.max_length] for row in read_texts(arguments.data, tokenizer)]
    lengths: list[int] = []
    if arguments.lengths is not None:
        columns = np.loadtxt(arguments.lengths, delimiter=",", skiprows=1, usecols=(1, 2), ndmin=2)
        lengths = np.clip(columns.sum(1), 2, arguments.max_length).astype(int).tolist()
    report: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(arguments).items()}}
    datasets: list[tuple[str, int, float]] = []
    if arguments.rows > 0:
        datasets.append(("GSM8K", arguments.rows, 0.0))
    if lengths:
        datasets.append(("long tail", arguments.long_rows, arguments.long_share))
    for name, num_rows, long_share in datasets:
        total = num_rows + arguments.validation_rows
        rows = mixture(texts, lengths or [2], total, long_share, random)
        task = Task(
            name=name,
            train=rows[:num_rows],
            validation=rows[num_rows:],
            max_tokens=arguments.max_tokens,
            microbatches_per_step=arguments.microbatches,
            learning_rate=arguments.learning_rate,
            device=arguments.device,
            seed=arguments.seed,
        )
        sizes = np.array([len(row) for row in task.train])
        print(
            f"\n{name}: {num_rows} rows, mean {sizes.mean():.0f}, coefficient of variation"
            f" {sizes.std() / sizes.mean():.2f}, longest {sizes.max()} tokens; fixed batches of"
            f" {task.rows_per_microbatch} rows x {task.fixed_accumulation}; validation loss before"
            f" {mean_loss(initial, task.validation):.3f}",
            flush=True,
        )
        warm_up(initial, task)
        runs: list[Run] = []
        for round_index in range(arguments.rounds):
            for variant in VARIANTS if round_index % 2 == 0 else reversed(VARIANTS):
                runs.append(run(variant, task, initial, tokenizer))
        records = summarize(runs)
        print_table(records)
        report[name] = {
            "lengths": sizes.tolist(),
            "variants": records,
            "runs": [asdict(one) for one in runs],
        }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of a model and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines: question, answer")
    parser.add_argument("--lengths", type=Path, help="CSV: time, tokens of context, of answer")
    parser.add_argument("--layers", type=int, help="keep this many layers of the model")
    parser.add_argument("--rows", type=int, default=160, help="training rows of GSM8K")
    parser.add_argument("--long-rows", type=int, default=64, help="long rows of the mixture")
    parser.add_argument("--long-share", type=float, default=0.25)
    parser.add_argument("--max-length", type=int, default=2048, help="longer rows are cut")
    parser.add_argument("--validation-rows", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=4096, help="positions of a microbatch")
    parser.add_argument("--microbatches", type=int, default=1, help="per step and token budget")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
