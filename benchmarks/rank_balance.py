"""How much longer the slowest rank works than the mean, before and after balancing, on the real
training loop.

    python benchmarks/rank_balance.py --lengths traces/conv.csv --columns
    ContextTokens,GeneratedTokens

Each line is one `nemo-like sft` run of two data-parallel workers on Ray over the same rows in the
same order; only the packing keys differ. `worst/mean` is `policy/rank_time_worst_over_mean` of the
run's metrics (on a CPU the CPU time of forward and backward, which does not pass while a rank
waits), its mean over the steps after the first; `step s` is wall time.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from packing_references import lengths_of, read_lengths
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from nemo_like.algorithms.registry import load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.demo.task import build_tokenizer

MODES = {
    "first fit, round-robin": ("first_fit_decreasing", "none"),
    "first fit, assigned by work": ("first_fit_decreasing", "flops"),
    "balanced by tokens": ("balanced", "tokens"),
    "balanced by FLOPs (default)": ("balanced", "flops"),
}
_CONFIG = """
run_name: {name}
output_dir: {folder}/runs
policy:
  model_name: {folder}/model
  max_total_sequence_length: {longest}
  train_global_batch_size: {batch_size}
  sequence_packing:
    enabled: true
    train_mb_tokens: {budget}
    algorithm: {algorithm}
    balance: {balance}
  parity_check: false
data: {{train_path: {folder}/rows.jsonl}}
sft: {{max_num_steps: {steps}}}
cluster: {{workers_per_node: {ranks}}}
checkpointing: {{enabled: false, export_hf: false}}
logger: {{tensorboard: false, num_samples_shown: 0}}
"""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    lengths = _lengths(arguments)
    print(
        f"{len(lengths)} rows, {arguments.batch_size} a step: mean {lengths.mean():.0f}, median"
        f" {np.median(lengths):.0f},"
        f" longest {lengths.max()} tokens; budget {arguments.budget}; {arguments.ranks} ranks"
    )
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), lengths, arguments)
        results = {
            name: _run(Path(folder), index, name, lengths, arguments)
            for index, name in enumerate(MODES)
        }
    print(
        f"{'packing':<30}{'worst/mean':>12}{'worst step':>12}{'planned':>10}{'step s':>9}"
        f"{'microbatches':>14}"
    )
    for name, records in results.items():
        column = {key: np.array([record[key] for record in records]) for key in records[0]}
        measured = column["policy/rank_time_worst_over_mean"]
        planned = column["packing/rank_imbalance_flops"].mean()
        step_s = np.median(column["timing/train_s"])
        num_microbatches = column["packing/num_microbatches"].mean()
        print(
            f"{name:<30}{measured.mean():>12.3f}{measured.max():>12.3f}{planned:>10.3f}"
            f"{step_s:>9.2f}{num_microbatches:>14.1f}"
        )


def _run(
    folder: Path, index: int, name: str, lengths: np.ndarray, arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """The metrics of every step but the first, which pays for warming up."""
    algorithm, balance = MODES[name]
    path = folder / f"mode_{index}.yaml"
    text = _CONFIG.format(
        name=f"mode_{index}",
        folder=folder,
        longest=arguments.budget,
        algorithm=algorithm,
        balance=balance,
        **vars(arguments),
    )
    path.write_text(text)
    config = load_config("sft", path, [])
    assert isinstance(config, SftRunConfig)
    with redirect_stdout(io.StringIO()):
        run = run_sft(config).directory
    records = [json.loads(line) for line in run.metrics.read_bytes().splitlines()]
    return [record for record in records if "policy/rank_time_worst_over_mean" in record][1:]


def _lengths(arguments: argparse.Namespace) -> np.ndarray:
    """int64: tokens of every row, the longest of the trace scaled to the budget."""
    trace = (
        None if arguments.lengths is None else read_lengths(arguments.lengths, arguments.columns)
    )
    rows = arguments.batch_size * arguments.steps
    lengths = lengths_of("trace", rows, 8192, arguments.seed, trace)
    return np.maximum(lengths * arguments.budget // lengths.max(), 8)


def _write(folder: Path, lengths: np.ndarray, arguments: argparse.Namespace) -> None:
    """A random Llama and rows of exactly these lengths: 4 tokens are the template's and the
    prompt's, one ends the row.
    """
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=arguments.budget,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": "1", "completion": "7" * int(length - 5)}) for length in lengths]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=Path, help="CSV, JSONL or a list of integers; default: a stand-in"
    )
    parser.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        default=[],
        help="columns to add up, by comma",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="rows per step")
    parser.add_argument(
        "--budget",
        type=int,
        default=1024,
        help="most tokens of a microbatch, and of the longest row",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
