"""Seeded random mutations of configs and data files, and what must hold of each: accepted, or one
short ConfigError.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.config.errors import ConfigError
from nemo_like.config.load import to_yaml
from nemo_like.data.formats import PROMPT_ROWS, SFT_ROWS, conversation, question
from nemo_like.data.rows import load_rows

MAX_CPU_S = 2.0
MAX_MESSAGE_CHARACTERS = 2_000

BASE_CONFIGS = (
    """run_name: a
output_dir: runs
policy:
  model_name: m
  train_global_batch_size: 16
  sequence_packing: {enabled: true, train_mb_tokens: 4096}
  optimizer: {lr: 1.0e-3, weight_decay: 0.1}
  generation: {max_new_tokens: 24, stop_strings: ["a", "b"]}
data: {train_path: t.jsonl, prompt_template: "Q: {prompt}"}
sft: {max_num_steps: 4}
cluster: {backend: local}
""",
    """run_name: b
policy: {model_name: m, optimizer: {lr: 1e-5}}
data: {train_path: t.jsonl, validation_path: null}
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}
reward: {functions: {x: {path: a.b, weight: 1.0}}}
checkpointing: &c {save_period: 2}
""",
)

BLOCKS = (
    "seed: &s [*s]",
    "data: &d {x: *d}",
    "<<: {seed: 1}",
    "<<: [1, 2]",
    "<<: x",
    "seed: 1\nseed: 2",
    "? [a, b]\n: c",
    "? {a: b}\n: c",
    "defaults: x",
    "defaults: [nowhere]",
    "defaults: {a: b}",
    "defaults: [[a]]",
    "defaults: [config, _self_]",
    "hydra: {run: {dir: /}}",
    "run_name: ${run_name}",
    "run_name: ${oc.env:NOWHERE}",
    "run_name: ${" * 40 + "a" + "}" * 40,
    "--- 1\n--- 2",
    "%YAML 9.9\n---\na: 1",
    "%TAG ! tag:x,2000:\n---\na: !b 1",
    "\t- a",
    "*nowhere",
    "policy.optimizer.lr: 3",
    "=: 1",
    "null: 1",
    "1: 2",
    "true: 1",
    "!!python/object/apply:os.system ['true']: 1",
)
VALUES = (
    "!!int abc",
    "!!float x",
    "!!binary x",
    "!!timestamp 2024-13-45",
    "2024-13-45",
    "2024-01-15",
    "2001-12-14t21:59:43.10-99:00",
    "!!python/object/apply:os.system ['true']",
    "!!set {a}",
    "!!omap [a: 1]",
    "!!bool x",
    "!!null x",
    "!foo bar",
    "!!str 5",
    "9" * 401,
    "1e400",
    "-.inf",
    ".nan",
    "0o7",
    "1_000",
    "190:20:30",
    "-1",
    "0",
    "1e-3",
    "'1e3'",
    "~",
    "''",
    "true",
    "[]",
    "{}",
    "[[[1]]]",
    "[" * 25 + "]" * 25,
    "{a: " * 100 + "1" + "}" * 100,
    '"\\ud83d"',
    '"\\0"',
    '"\\x1b[31m"',
    '"\\u202e"',
    "${oc.env:HOME}",
    "${seed}",
    "${nowhere}",
    "${",
    "${a.b:c}",
    "$",
    "???",
    "'{prompt:>9999999999}'",
    "'{prompt!r}'",
    "'{0}'",
    "'{'",
    "'{prompt}'",
    "x" * 5000,
    "*c",
    "&z 5",
    "|\n  text\n   more",
    ">-\n  text",
    "'unclosed",
    '"unclosed',
    "[1, 2",
    "{a: 1",
    "@x",
    "`x",
    "%x",
    "- 1",
    "? x",
    ": x",
    "#",
)
OVERRIDES = (
    "policy.optimizer.lr=1e-4",
    "policy.optimizer.lr=" + "9" * 401,
    "~policy.optimizer.lr",
    "+a=1",
    "a",
    "=",
    "~",
    "",
    "policy={optimizer:{lr:1}}",
    "run_name=" + "x" * 5000,
    "run_name='\ud83d'",
    "run_name=\0",
    "seed=1,2",
    "seed=range(10)",
    "seed=choice(1,2)",
    "seed=glob(*)",
    "seed=int(x)",
    "x/y=z",
    "policy@data=z",
    "a.b." * 200 + "c=1",
    "run_name=${oc.env:X}",
    "run_name=${run_name}",
    "run_name=\\",
    'run_name="',
    "hydra.run.dir=/",
    "policy=null",
    "reward.functions.x=5",
    "reward.functions={}",
    "data.prompt_template='{prompt:>9999999999}'",
    "\u202e=1",
    "+policy.optimizer.lr=1",
    "++seed=2",
    "seed=float(1e400)",
    "seed=extend_list(1)",
)
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "1+1", "completion": "2"},
    {"prompt": "1+1", "answer": "2"},
    {"prompt": "1+1"},
    {"question": "1+1", "answer": "so\n#### 2"},
    {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
    {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [{"a": 1}]},
        ],
        "tools": [],
    },
)
JSON_VALUES = (
    "null",
    "true",
    "0",
    "-1",
    "1e999",
    "NaN",
    "9" * 5000,
    '""',
    '"\\ud83d"',
    '"a\\u0000b"',
    '"\\u202e\\u001b[31m"',
    "[]",
    "{}",
    "[[]]",
    "[" * 50_000 + "]" * 50_000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    '"' + "x" * 100_000 + '"',
    '{"role": "user"}',
    '[{"role": 5}]',
    '[{"role": "user", "content": null, "tool_calls": [1]}]',
    '[{"role": "assistant", "content": []}]',
    '[{"content": "a"}]',
    "[1]",
    "nul",
    '"unclosed',
    "\x00",
    '[{"role": "user", "content": "\\udc00"}]',
    '[{"role": "user", "content": "a", "tool_calls": "\\ud800"}]',
    '{"role":"user","role":"x"}',
    '"' + "\\n" * 500 + '"',
    "0x10",
    "--1",
    "[1,]",
    "'a'",
)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends a case that hangs, for a message that shows where; CPU time, in the main thread."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def run_case(act: Callable[[], None], counts: Counter[str]) -> str | None:
    """Run one case and count its outcome; what is wrong with the outcome, or None."""
    start = time.process_time()
    outcome, problem = "accepted", None
    try:
        with time_limit(10 * MAX_CPU_S):
            act()
    except ConfigError as error:
        outcome, message = "rejected", str(error)
        if not message.strip() or len(message) > MAX_MESSAGE_CHARACTERS:
            problem = f"message of {len(message)} characters: {message[:300]}"
    except Exception as error:  # noqa: BLE001 (what the fuzzer looks for)
        outcome, problem = "failed", f"{type(error).__name__}: {str(error)[:300]}"
    used = time.process_time() - start
    if used > MAX_CPU_S:
        outcome, problem = "slow", problem or f"took {used:.1f} s of CPU time"
    counts[outcome] += 1
    return problem


def config_case(seed: int, folder: Path) -> Callable[[], None]:
    """Write a mutated config for `seed`; the action loads it as the commands do."""
    rng = random.Random(seed)
    text = rng.choice(BASE_CONFIGS)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        text = _mutate_yaml(rng, text)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        data = _mutate_bytes(rng, data)
    path = folder / "config.yaml"
    path.write_bytes(data)
    overrides = rng.sample(OVERRIDES, rng.choice((0, 0, 0, 1, 2)))

    def act() -> None:
        config = load_config(detect_kind(path, overrides), path, overrides)
        to_yaml(config).encode()

    return act


def data_case(seed: int, folder: Path) -> Callable[[], None]:
    """Write a mutated data file or directory for `seed`; the action reads every row."""
    rng = random.Random(seed)
    suffix = rng.choice((".jsonl", ".jsonl", ".jsonl", ".json", ".parquet", "arrow"))
    lines = [
        json.dumps(rng.choice(ROWS) if rng.random() < 0.2 else row)
        for row in [rng.choice(ROWS)] * rng.randint(1, 4)
    ]
    if suffix in (".parquet", "arrow"):
        path = _write_columns(rng, folder, [json.loads(line) for line in lines], suffix)
    else:
        for _ in range(rng.choice((0, 1, 1, 2))):
            lines = _mutate_rows(rng, lines)
        text = "\n".join(lines) if suffix == ".jsonl" else "[" + ",\n".join(lines) + "]"
        path = folder / f"data{suffix}"
        path.write_bytes(_mutate_bytes(rng, text.encode("utf-8", "surrogatepass")))

    def act() -> None:
        purpose = "sft" if seed % 2 else "rl"
        for row in load_rows(path, SFT_ROWS if seed % 2 else PROMPT_ROWS):
            read = conversation(row) if purpose == "sft" else question(row).messages
            str(read).encode()

    return act


def _mutate_yaml(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines)) if lines else 0
    choice = rng.choice((0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5))
    if choice == 0 or ":" not in text:
        return text + "\n" + rng.choice(BLOCKS) + "\n"
    if choice == 1:
        return rng.choice(BLOCKS) + "\n" + text
    if choice == 2:
        lines.insert(at, lines[at])
    elif choice == 3:
        lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(VALUES)
    elif choice == 4:
        separators = [index for index, character in enumerate(text) if character == ":"]
        cut = rng.choice(separators)
        if text[cut + 1 : cut + 2] == "\n":
            return text
        end = next((index for index in range(cut, len(text)) if text[index] in ",}\n"), len(text))
        return f"{text[: cut + 1]} {rng.choice(VALUES)}{text[end:]}"
    else:
        lines[at] = rng.choice((" ", "  ", "\t", "- ", "? ", "<<: ")) + lines[at]
    return "\n".join(lines) + "\n"


def _mutate_rows(rng: random.Random, lines: list[str]) -> list[str]:
    at = rng.randrange(len(lines))
    choice = rng.randrange(4)
    value = rng.choice(JSON_VALUES)
    if choice == 0:
        lines[at] = value
    elif choice == 1:
        keys = [
            "messages",
            "prompt",
            "completion",
            "answer",
            "question",
            "tools",
            "x",
            "\\ud800",
            "y" * 3000,
        ]
        lines[at] = lines[at].replace("{", f'{{"{rng.choice(keys)}": {value}, ', 1)
    elif choice == 2:
        cut, end = lines[at].find(":"), lines[at].find(",")
        lines[at] = lines[at][: cut + 1] + value + (lines[at][end:] if end > cut else "}")
    else:
        lines[at] = (
            "{"
            + ",".join(
                f'"{name}{n}": 1' for n in range(rng.choice((1, 900))) for name in ("a", "b")
            )
            + "}"
        )
    return lines


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    choice = rng.randrange(16)
    if choice == 0:
        return data.decode("utf-8", "replace").encode(
            rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"))
        )
    if choice == 1:
        return data[: rng.randrange(len(data) + 1)]
    if choice in (2, 3):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 3, 30))):
            if changed:
                changed[rng.randrange(len(changed))] = rng.choice(
                    (0, 10, 34, 58, 123, 125, 255, rng.randrange(256))
                )
        return bytes(changed)
    if choice == 4:
        at = rng.randrange(len(data) + 1)
        return (
            data[:at]
            + rng.choice((b"\0", b"\xff\xfe", b"\xed\xa0\xbd", b"\x85", "\u2028".encode(), b"\r"))
            + data[at:]
        )
    return data


def _write_columns(
    rng: random.Random, folder: Path, rows: list[dict[str, Any]], suffix: str
) -> Path:
    import pyarrow
    import pyarrow.parquet

    odd = rng.choice((None, None, 5, b"\xff", 1.5, [1], {"a": 1}))
    if odd is not None:
        rows = [{**row, rng.choice((*row, "extra")): odd} for row in rows]
    try:
        table = pyarrow.Table.from_pylist(rows)
    except pyarrow.ArrowException:
        table = pyarrow.Table.from_pylist(rows[:1])
    if suffix == ".parquet":
        path = target = folder / "data.parquet"
        pyarrow.parquet.write_table(table, path)
    else:
        path = folder / "arrow"
        path.mkdir(exist_ok=True)
        target = path / "data-00000.arrow"
        with (
            pyarrow.OSFile(str(target), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        states = (
            '{"_data_files": [{"filename": "data-00000.arrow"}]}',
            "{}",
            "[",
            '{"_data_files": 5}',
            "[]",
        )
        state = rng.choice(
            (
                states[0],
                states[0],
                *states,
                '{"_data_files": [{"filename": "../data.json"}, 5, null]}',
            )
        )
        (path / "state.json").write_bytes(_mutate_bytes(rng, state.encode()))
    target.write_bytes(_mutate_bytes(rng, target.read_bytes()))
    return path
