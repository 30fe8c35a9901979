r"""Weight updates of LoRA runs, merged or adapters alone: bytes, seconds, and the log-probs after.

    python benchmarks/lora_weight_sync.py --model models/SmolLM2-135M-Instruct
    python benchmarks/lora_weight_sync.py --model DIR --backend vllm --precision float32

Policy and generator are in one process on the CPU, a fresh one for each kind of update. A is as at
the start of training and B is random, with a standard deviation of about that many optimizer steps:
AdamW changes a value by up to the learning rate in each. After every update the generator samples
64 tokens after each of 8 prompts. Differences are means over these tokens, in nats:

    change       policy and base model: what the adapters changed
    gap          policy and generator
    tok/s        of the generator; the first rollout of each process includes its warm-up
    changed      share of the adapted weights that differ from those of the base model

The seconds are the median of five updates, without the check of log-probs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from nemo_like.config.generation import VLLMGenerationConfig
from nemo_like.config.lora import LoraConfig
from nemo_like.config.schema import OptimizerConfig, PolicyConfig
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.generation.generator import Generator
from nemo_like.generation.sampling_params import SamplingParams
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.policy import Policy
from nemo_like.weight_sync.sync import WeightSync

_SUBJECTS = ("rain", "a bridge", "bread", "the moon", "a violin", "gold", "a river", "chess")
_NUM_TOKENS = 64
_MAX_LENGTH = 128
_NUM_UPDATES = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both kinds of updates, each in a process of its own, and print the table."""
    arguments = _parser().parse_args(argv)
    if arguments.kind is not None:
        print(json.dumps(measure(arguments)))
        return
    print(f"{'update':<9}{'std of B':>9}{'MB':>9}{'s':>8}{'tok/s':>8}", end="")
    print(f"{'changed':>9}{'change':>10}{'gap':>10}")
    for kind in ("merged", "adapter"):
        command = [sys.executable, __file__, "--kind", kind, *(argv or sys.argv[1:])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for row in json.loads(done.stdout.splitlines()[-1]):
            print(
                f"{kind:<9}{row['std']:>9.0e}{row['bytes'] / 1e6:>9.1f}{row['seconds']:>8.2f}"
                f"{row['tokens_per_s']:>8.0f}{row['changed']:>9.1%}{row['change']:>10.5f}{row['gap']:>10.5f}",
                flush=True,
            )


def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Return the measurements of one kind of update, one row per standard deviation of B."""
    lora = LoraConfig(enabled=True, rank=16, alpha=32.0, weight_sync=arguments.kind)
    config = PolicyConfig(
        model_name=arguments.model,
        optimizer=OptimizerConfig(lr=1e-4),
        precision=arguments.precision,
        lora=lora,
    )
    worker_class, options = _generation(arguments)
    if lora.sends_adapters:
        options["lora"] = lora
    generator = Generator(
        lambda index: LocalGroup(worker_class, options, local_context(num_threads=2))
    )
    group = LocalGroup(
        DTensorPolicyWorker,
        {"config": config, "needs_reference": True},
        local_context(num_threads=2),
    )
    spec = ModelSpec.from_config(load_model_config(arguments.model, local_files_only=True))
    policy = Policy(group, config, spec)
    worker: Any = group._worker
    engine = worker._policy
    base = _adapted_weights(engine)
    sync = WeightSync(group, dtype=arguments.precision)
    rows = []
    version = 0
    for std in map(float, arguments.std.split(",")):
        _set_adapters(engine, std)
        reports = []
        for _ in range(_NUM_UPDATES):
            version += 1
            reports.append(sync.push([generator.replicas[0].group], version))
        generator.set_version(generator.replicas, version)
        num_changed = 0
        for name, weight in _adapted_weights(engine).items():
            num_changed += int((weight != base[name]).sum())
        change, gap, tokens_per_s = _sample(arguments.model, policy, generator)
        rows.append(
            {
                "std": std,
                "bytes": reports[0].num_bytes,
                "seconds": statistics.median(report.total_s for report in reports),
                "changed": num_changed / sum(weight.numel() for weight in base.values()),
                "change": change,
                "gap": gap,
                "tokens_per_s": tokens_per_s,
            }
        )
    generator.shutdown()
    return rows


def _generation(arguments: argparse.Namespace) -> tuple[type, dict[str, Any]]:
    """Return the worker class of the backend and its keyword arguments."""
    options: dict[str, Any] = {"model_name": arguments.model, "precision": arguments.precision}
    if arguments.backend == "hf":
        from nemo_like.generation.hf_worker import HFGenerationWorker

        return HFGenerationWorker, options
    from nemo_like.generation.vllm_worker import VLLMGenerationWorker

    options["max_total_length"] = _MAX_LENGTH
    options["config"] = VLLMGenerationConfig(kv_cache_gib=0.25, max_num_seqs=16)
    return VLLMGenerationWorker, options


def _set_adapters(engine: Any, std: float) -> None:
    """Draw B anew; the draws of different `std` differ only in size."""
    generator = torch.Generator().manual_seed(0)
    for sharded in engine._trained:
        if ".lora_B" in sharded.name:
            matrix = sharded.parameter.data
            local = matrix.to_local() if hasattr(matrix, "to_local") else matrix
            local.copy_(std * torch.randn(local.shape, generator=generator))


def _adapted_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of the merged weights [outputs, inputs] that have an adapter, by name."""
    names = [name for name in engine.weight_shapes() if name in engine._adapters]
    return {name: weight.clone() for name, weight in engine.full_weights(names)}


def _sample(model: str, policy: Policy, generator: Generator) -> tuple[float, float, float]:
    """Return mean differences of log-probs: policy and base model, policy and generator.

    The third value is the tokens per second of the generator.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for subject in _SUBJECTS:
        prompts.append(tokenizer(f"Here are some facts about {subject}. First,").input_ids)
    start = time.perf_counter()
    completions = generator.generate(
        Jagged.from_rows(prompts, np.int32),
        np.arange(len(prompts), dtype=np.uint64),
        SamplingParams(max_new_tokens=_NUM_TOKENS),
        max_total_length=_MAX_LENGTH,
    )
    tokens_per_s = len(completions.token_ids.values) / (time.perf_counter() - start)
    texts = []
    for prompt, token_ids in zip(prompts, completions.token_ids, strict=True):
        texts.append(np.concatenate([prompt, token_ids]))
    rows = Jagged.from_rows(texts, np.int32)
    batch = BatchedDataDict(
        input_ids=rows,
        token_mask=Jagged(np.ones(len(rows.values), dtype=np.uint8), rows.offsets),
        length=rows.lengths,
        row_mask=np.ones(len(rows), dtype=bool),
    )
    sharded = policy.shard(batch, policy.plan(rows.lengths, "evaluate"))
    handle = policy.compute_logprobs(sharded, ("prev_logprobs", "reference_logprobs"))
    found = policy.fetch_logprobs(handle)
    changes = []
    gaps = []
    for row, prompt in enumerate(prompts):
        expected = found["prev_logprobs"][row][len(prompt) :]
        changes.append(np.abs(expected - found["reference_logprobs"][row][len(prompt) :]))
        gaps.append(np.abs(expected - completions.logprobs[row]))
    change = np.concatenate(changes).mean()
    gap = np.concatenate(gaps).mean()
    return float(change), float(gap), tokens_per_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--backend", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--std", default="0,1e-4,1e-3,1e-2", help="standard deviations of B")
    parser.add_argument("--kind", choices=("merged", "adapter"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
