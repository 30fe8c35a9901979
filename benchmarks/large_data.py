"""A data set of 1e6 rows in a real run: memory of the driver, time to the first step, and resume.

    python benchmarks/large_data.py                          # SFT on a .jsonl file, with a resume
    python benchmarks/large_data.py --format parquet --steps 2
    python benchmarks/large_data.py --job grpo --steps 2
    python benchmarks/large_data.py --options data.shuffle=false
    python benchmarks/large_data.py --mixture --rows 12000 --batch 500 --resume-at 9000

Each run is a process of its own: a random Llama with one layer of 16, in the driver's process
(`cluster.backend=local`). `memory` is the maximum of the resident set above that after the imports,
which includes model, optimizer and batches. `first step` counts from the call of the job to the
first line of metrics.jsonl, so it includes reading the file; its CPU time is the driver's
since its start, imports included. After the checkpoint of `--resume-at` rows the run continues to
`--steps` steps; then the checkpoints after it are removed, and a resumed run must log the same
metrics and row lengths. With `--mixture` three files are mixed by 0.5, 0.3 and 0.2, and the rows
of each after every step are compared with its share. Other load lengthens the times only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.registry import load_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.demo.task import build_tokenizer

SHARES = {"train": 0.5, "a": 0.3, "b": 0.2}
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow")
_ROWS_PER_PART = 10_000
_SAMPLE_S = 0.05
_CLOCKS = ("timing/", "performance/", "weight_sync/", "policy/rank_time", "unix_time_s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=("sft", "grpo"), default="sft")
    parser.add_argument("--format", choices=FORMATS, default="jsonl")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=10_000, help="rows of a step")
    parser.add_argument("--steps", type=int, help="default: two after --resume-at")
    parser.add_argument("--resume-at", type=int, default=700_000, help="rows before the resume")
    parser.add_argument("--mixture", action="store_true", help="three files by weight")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--options", nargs="*", default=[], help="further KEY=VALUE of the config")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        run_child(arguments.child, arguments.job, arguments.options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        measure(arguments, arguments.folder or Path(temporary))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Write the data, run, resume where the job does, and print what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_data(folder / "train", arguments.format, arguments.rows)
    write_model(folder / "model")
    batch = arguments.batch if arguments.job == "sft" else 8
    step = arguments.resume_at // batch
    steps = arguments.steps or step + 2
    config = folder / "config.yaml"
    text = config_text(arguments.job, folder, path, batch, steps, step)
    if arguments.mixture:
        others = [write_data(folder / name, arguments.format, arguments.rows) for name in "ab"]
        sets = f"train_sets: {{a: {others[0]}, b: {others[1]}}}, train_weights: {SHARES}"
        text = text.replace(f"train_path: {path}", f"train_path: {path}, {sets}")
    config.write_text(text)
    first = child(arguments, config)
    show(f"{arguments.job}, {arguments.rows:,} rows as {path.name}", first)
    run = folder / "runs" / "large"
    if arguments.mixture:
        check_shares(run)
    if steps <= step:
        return
    expected = logged(run)
    for checkpoint in (run / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    (run / "latest").unlink()
    resumed = child(arguments, config, "resume=true")
    show(f"resumed at row {step * batch + 1:,}", resumed)
    if logged(run) != expected:
        raise SystemExit("the resumed run logged other metrics or rows than the uninterrupted one")
    print(f"steps {step + 1} to {steps}: the same rows and metrics as without the interruption")


def check_shares(run: Path) -> None:
    """Compare the rows of each source after every step with its share."""
    counts = dict.fromkeys(SHARES, 0.0)
    largest = total = 0.0
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in counts:
            counts[name] += values[f"data/source_{name}/num_rows"]
        total = sum(counts.values())
        for name, share in SHARES.items():
            largest = max(largest, abs(counts[name] - share * total))
    print(
        f"after every step of {total:,.0f} rows a source is at most {largest:.2f} rows from its"
        " share"
    )
    if largest >= 1:
        raise SystemExit(f"the rows of the sources are {counts}, the shares {SHARES}")


def show(title: str, result: dict[str, float]) -> None:
    print(
        f"{title}: {result['memory_mib']:.0f} MiB above {result['startup_mib']:.0f} MiB at startup,"
        f" first step after {result['first_step_s']:.1f} s (CPU"
        f" {result['first_step_cpu_s']:.1f} s), complete after {result['total_s']:.1f} s",
        flush=True,
    )


def logged(run: Path) -> list[Any]:
    """Return the metrics without times, and the row lengths of every step."""
    records: list[Any] = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        records.append({name: values[name] for name in values if not name.startswith(_CLOCKS)})
    records += map(json.loads, (run / "plan" / "lengths.jsonl").read_bytes().splitlines())
    return records


def rows(count: int) -> Iterator[dict[str, str]]:
    """Yield rows of about 160 bytes; the answer has 1 to 9 characters."""
    hint = "of the large file " * 6
    for number in range(count):
        answer = "#" * (number % 7) + str(number * 7 % 97)
        yield {"prompt": str(number), "completion": answer, "answer": answer, "hint": hint}


def write_data(folder: Path, kind: str, count: int) -> Path:
    """Write the rows in a format; return the file or directory."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rows.{kind}"
    if kind in ("parquet", "arrow"):
        return write_table(path, count)
    compression = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}.get(kind)
    with pyarrow.output_stream(str(path), compression=compression) as stream:
        for row in rows(count):
            stream.write(json.dumps(row).encode() + b"\n")
    return path


def write_table(path: Path, count: int) -> Path:
    """Write one parquet file, or the Arrow stream of `datasets.save_to_disk`."""
    schema = pyarrow.schema(dict.fromkeys(next(rows(1)), pyarrow.string()))
    if path.suffix == ".parquet":
        # One row group, the largest unit that a reader may load.
        table = pyarrow.Table.from_pylist(list(rows(count)), schema)
        pyarrow.parquet.write_table(table, path, row_group_size=count)
        return path
    path.mkdir(exist_ok=True)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    source = rows(count)
    with pyarrow.ipc.new_stream(str(path / "data.arrow"), schema) as writer:
        for start in range(0, count, _ROWS_PER_PART):
            part = [next(source) for _ in range(min(_ROWS_PER_PART, count - start))]
            writer.write_batch(pyarrow.RecordBatch.from_pylist(part, schema))
    return path


def write_model(folder: Path) -> None:
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def config_text(
    job: str, folder: Path, path: Path, batch: int, steps: int, save_period: int
) -> str:
    """Return the YAML of a run."""
    text = f"""
output_dir: {folder}/runs
run_name: large
policy:
  model_name: {folder}/model
  max_total_sequence_length: 64
  train_global_batch_size: {batch}
  sequence_packing: {{enabled: true, train_mb_tokens: 16384, logprob_mb_tokens: 16384}}
  generation: {{max_new_tokens: 4}}
  scheduler: {{kind: constant}}
  parity_check: false
data: {{train_path: {path}}}
cluster: {{backend: local}}
logger: {{tensorboard: false, num_samples_shown: 0, save_rollouts: false}}
checkpointing: {{save_period: {save_period}, export_hf: false, async_save: false}}
"""
    if job == "sft":
        return text + f"sft: {{max_num_steps: {steps}}}\n"
    return text + (
        f"grpo: {{max_num_steps: {steps}, num_prompts_per_step: {batch},"
        " num_generations_per_prompt: 2}\n"
        "reward: {functions: {answer: {path: nemo_like.environments.math.answer_reward}}}\n"
    )


def child(arguments: argparse.Namespace, config: Path, *options: str) -> dict[str, float]:
    """Run the job in a new process; return what it measured."""
    command = [sys.executable, __file__, "--child", str(config), "--job", arguments.job]
    options = (*arguments.options, *options)
    if options:
        command += ["--options", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_child(path: Path, job: str, options: Sequence[str]) -> None:
    """Run the job of a config and print what was measured as the last line."""
    startup = resident_bytes()
    largest = [startup]
    first_step: list[float] = []
    is_done = threading.Event()
    metrics = path.parent / "runs" / "large" / "metrics.jsonl"
    num_before = metrics.stat().st_size if metrics.exists() else 0
    began = time.perf_counter()

    def watch() -> None:
        last_size = num_before
        while not is_done.wait(_SAMPLE_S):
            largest.append(max(largest.pop(), resident_bytes()))
            size = metrics.stat().st_size if metrics.exists() else 0
            # A resume first shortens the file.
            if not first_step and size > last_size:
                first_step.extend((time.perf_counter() - began, time.process_time()))
            last_size = size

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if job == "sft":
            run_sft(load_config(SftRunConfig, path, list(options)))
        else:
            run_grpo(load_config(GrpoRunConfig, path, list(options)))
    finally:
        is_done.set()
        watcher.join()
    total = time.perf_counter() - began
    result = {
        "startup_mib": startup / 2**20,
        "memory_mib": (largest[0] - startup) / 2**20,
        "first_step_s": first_step[0],
        "first_step_cpu_s": first_step[1],
        "total_s": total,
    }
    print(json.dumps(result))


def resident_bytes() -> int:
    """Return the resident set of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
