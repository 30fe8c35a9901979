r"""GRPO passes with and without shared prefixes: CPU time, wall time and memory.

    python benchmarks/shared_prefix.py --model models/SmolLM2-135M-Instruct \
        --data gsm8k/train.jsonl --layers 6 --rounds 3

Two batches: `gsm8k` has `--prompts` questions of the file in the model's chat template, each with
`--generations` completions whose lengths are that of the reference answer times a lognormal factor;
`long` has `--long-prompts` prompts of `--long-prompt` tokens, each with `--long-generations`
completions of `--long-completion` tokens. Completions are random tokens, so that siblings have no
more in common than their prompt.

One worker in this process, with a thread per core, computes the log-probs of a batch and trains on
it (one optimizer step at learning rate 0, so that all rounds compute the same) with
`policy.shared_prefix` true and false in turn, after a log-prob pass that is not counted. Ratios are
those of the medians of CPU seconds of the process. `RSS` is the peak resident memory of the process
in a pass, with weights and, in training, gradients and optimizer state. `--layers` keeps the first
layers of the model only, which shortens a run; the head, which sharing does not change, then has a
larger share of the work.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import OptimizerConfig, PolicyConfig, SequencePackingConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import rollout_loss
from nemo_like.models.spec import load_spec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy

CASES = ("gsm8k", "long")
PASSES = ("logprobs", "train")
VARIANTS: tuple[Literal["false", "true"], ...] = ("true", "false")
"""Values of `policy.shared_prefix`. The first turn of a process is the slower one."""
TEMPLATE = '{question}\nThink step by step and end with a line "#### " and the number.'


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case and print a table; return the exit status."""
    arguments = _parser().parse_args(argv)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.layers:
            arguments.model = write_first_layers(arguments.model, Path(folder), arguments.layers)
        print("| rows | pass | tokens, without | with | CPU s, without | with | ratio", end="")
        print(" | ratio of tokens | of wall time | RSS MB, without | with |")
        print("|" + "---|" * 11)
        for case in arguments.cases.split(","):
            report[case] = measure(arguments, case)
            for kind in PASSES:
                print(_line(case, kind, report[case]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def measure(arguments: argparse.Namespace, case: str) -> dict[str, Any]:
    """Run the variants in turn; returns by variant and pass the records of all rounds."""
    batch = make_batch(arguments, case)
    policy = open_policy(arguments, batch)
    variants = {name: _with_sharing(policy, name) for name in VARIANTS}
    sharded = policy.shard(batch, variants["true"].plan_rows(batch))
    policy.compute_logprobs(sharded)
    records: dict[str, Any] = {name: {} for name in VARIANTS}
    for name, variant in variants.items():
        plan = variant.plan_rows(batch)
        plans = {"logprobs": plan.with_budget(arguments.logprob_mb_tokens), "train": plan}
        for kind, used in plans.items():
            records[name][kind] = {
                "tokens": int(used.num_tokens.sum()),
                "microbatches": used.num_microbatches,
                "rounds": [],
            }
    for _ in range(arguments.rounds):
        for name, variant in variants.items():
            for kind, values in turn(variant, batch).items():
                records[name][kind]["rounds"].append(values)
    policy.shutdown()
    return records


def turn(policy: Policy, batch: BatchedDataDict) -> dict[str, dict[str, float]]:
    """Compute log-probs and train once: CPU and wall seconds and peak memory of both, the loss.

    The plan of the batch is counted with the log-prob pass.
    """
    loss = rollout_loss(PolicyGradientLossConfig(), int(batch["length"].max()))
    with Measured() as logprob_pass:
        sharded = policy.shard(batch, policy.plan_rows(batch))
        logprobs = policy.compute_logprobs(sharded)
    with Measured() as train_pass:
        (metrics,) = policy.train(sharded, None, loss, logprobs)
    value = metrics["policy/loss"].value
    return {"logprobs": logprob_pass.values, "train": {**train_pass.values, "loss": value}}


class Measured:
    """CPU seconds of all threads, wall seconds and peak resident memory (MB) of a block."""

    def __enter__(self) -> Measured:
        gc.collect()
        # Memory that is free and that the allocator keeps would count for every later pass.
        ctypes.CDLL(None).malloc_trim(0)
        # Linux: restart the peak of this process.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._start = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        cpu, wall = self._start
        self.values = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
        status = Path("/proc/self/status").read_text(encoding="ascii")
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        self.values["peak_mb"] = int(peak) * 1024 / 1e6


def make_batch(arguments: argparse.Namespace, case: str) -> BatchedDataDict:
    """Rows of a case with the columns of a rollout: prompts, and completions of random tokens."""
    rng = np.random.default_rng(arguments.seed)
    vocab_size = load_spec(str(arguments.model)).vocab_size
    if case == "gsm8k":
        prompts, answers = _gsm8k(arguments)
        size = (len(prompts), arguments.generations)
        factors = rng.lognormal(0, 0.25, size)
        completions = np.maximum(4, answers[:, None] * factors).astype(np.int64)
    else:
        shape = (arguments.long_prompts, arguments.long_prompt)
        prompts = list(rng.integers(0, vocab_size, shape))
        size = (len(prompts), arguments.long_generations)
        completions = np.full(size, arguments.long_completion)
    rows = []
    masks = []
    for prompt, lengths in zip(prompts, completions, strict=True):
        for length in lengths:
            completion = rng.integers(0, vocab_size, length)
            rows.append(np.concatenate((prompt, completion)))
            masks.append(np.arange(len(rows[-1])) >= len(prompt))
    lengths = np.array([len(row) for row in rows])

    def jagged(values: np.ndarray) -> Jagged:
        return Jagged.from_lengths(values, lengths)

    return BatchedDataDict(
        input_ids=jagged(np.concatenate(rows).astype(np.int32)),
        token_mask=jagged(np.concatenate(masks).astype(np.uint8)),
        generation_logprobs=jagged(rng.normal(-4, 0.3, lengths.sum()).astype(np.float32)),
        advantages=rng.normal(size=len(rows)).astype(np.float32),
        length=lengths,
        row_mask=np.ones(len(rows), dtype=bool),
        group=np.repeat(np.arange(len(prompts)), size[1]),
    )


def open_policy(arguments: argparse.Namespace, batch: BatchedDataDict) -> Policy:
    """One worker in this process, without a learning rate."""
    config = PolicyConfig(
        model_name=str(arguments.model),
        train_global_batch_size=len(batch["length"]),
        max_total_sequence_length=int(batch["length"].max()),
        sequence_packing=SequencePackingConfig(
            enabled=True,
            train_mb_tokens=arguments.train_mb_tokens,
            logprob_mb_tokens=arguments.logprob_mb_tokens,
        ),
        optimizer=OptimizerConfig(lr=0.0),
    )
    kwargs = {"config": config}
    group = LocalGroup(DTensorPolicyWorker, kwargs, local_context())
    return Policy(group, config, load_spec(config.model_name))


def write_first_layers(model: Path, folder: Path, num_layers: int) -> Path:
    """Write the first layers of a model, with its embeddings and tokenizer; returns the folder."""
    config = AutoConfig.from_pretrained(model, num_hidden_layers=num_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def _gsm8k(arguments: argparse.Namespace) -> tuple[list[np.ndarray], np.ndarray]:
    """Token ids of the first prompts of the file, and int64 [n] tokens of their answers."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    encoder = ChatEncoder(tokenizer)
    with arguments.data.open(encoding="utf-8") as file:
        rows = [json.loads(line) for _, line in zip(range(arguments.prompts), file, strict=False)]
    prompts = []
    for row in rows:
        text = TEMPLATE.format(question=row["question"])
        prompts.append(encoder.encode_prompt([{"role": "user", "content": text}]))
    # The end of the answer is a token too.
    answers = np.array([len(tokenizer(row["answer"])["input_ids"]) + 1 for row in rows])
    return prompts, answers


def _with_sharing(policy: Policy, variant: Literal["false", "true"]) -> Policy:
    """The same worker; only the plans differ."""
    return Policy(
        policy.group, replace(policy.config, shared_prefix=variant == "true"), policy.model
    )


def _line(case: str, kind: str, records: dict[str, Any]) -> str:
    """One line of the table."""
    without, shared = (records[name][kind] for name in ("false", "true"))

    def median(name: str) -> tuple[float, float]:
        first, second = ([r[name] for r in record["rounds"]] for record in (without, shared))
        return statistics.median(first), statistics.median(second)

    cpu, wall, peak = median("cpu_s"), median("wall_s"), median("peak_mb")
    cells = [case, kind, f"{without['tokens']:,}", f"{shared['tokens']:,}"]
    cells += [f"{cpu[0]:.2f}", f"{cpu[1]:.2f}", f"{cpu[0] / cpu[1]:.2f}"]
    cells += [f"{without['tokens'] / shared['tokens']:.2f}", f"{wall[0] / wall[1]:.2f}"]
    cells += [f"{peak[0]:,.0f}", f"{peak[1]:,.0f}"]
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory of a Hugging Face model")
    add("--data", type=Path, required=True, help="JSONL file of questions and answers")
    add("--cases", default=",".join(CASES), help="which ones, by comma")
    add("--layers", type=int, default=0, help="keep the first so many; 0: all")
    add("--rounds", type=int, default=3, help="turns of each variant")
    add("--prompts", type=int, default=8)
    add("--generations", type=int, default=8, help="per prompt")
    add("--long-prompts", type=int, default=1)
    add("--long-prompt", type=int, default=512, help="tokens")
    add("--long-generations", type=int, default=16, help="per prompt")
    add("--long-completion", type=int, default=64, help="tokens")
    add("--train-mb-tokens", type=int, default=2048)
    add("--logprob-mb-tokens", type=int, default=4096)
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="file for the report")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
