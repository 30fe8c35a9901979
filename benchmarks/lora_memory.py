r"""Peak memory of a GRPO-like step with a reference: LoRA and QLoRA against full fine-tuning.

    python benchmarks/lora_memory.py --model models/SmolLM2-135M-Instruct
    python benchmarks/lora_memory.py --model DIR --tokens 512,2048 --precisions bfloat16 \
        --activation-checkpointing full

Every case is a fresh process on the CPU: it loads the policy and its reference and takes two steps
on the same random rows, each with a log-prob pass of policy and reference and one packed microbatch
of so many tokens. `live` is the peak of the bytes of all tensors, weights and optimizer state
included, at any operation of the steps; the memory of a GPU is compared by it. `RSS` is the peak
resident memory of the process above what it had before the model was loaded; it includes buffers
of libraries and what the allocator keeps. `plan` is the prediction of `nemo-like plan`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.config.schema import (
    AdapterConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.losses import rollout_loss
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.dtensor.worker import DTensorPolicyWorker
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.prediction.memory import MemoryModel
from nemo_like.prediction.placement import Placement

_CASES = ("full", "lora", "nf4")
"""All weights, adapters, and adapters beside frozen weights in 4 bits; the first is compared with.
"""
_NUM_STEPS = 2
"""The moments of AdamW are allocated in the first step, so the second has the peak."""


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that exist, and the most at the end of any operation in the block.

    FSDP changes the sizes of storages, so sizes are read anew at every operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor [...] from now on."""
        if isinstance(tensor, DTensor):
            # The storage of the wrapper has a size and no memory.
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self._storages.pop, key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, count the tensors that it returns and update the peak."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.add(leaf)
        self.peak = max(self.peak, self.current())
        return result

    def current(self) -> int:
        """Return the bytes of all tensors now."""
        total = 0
        for reference in list(self._storages.values()):
            storage = reference()
            if storage is not None:
                total += storage.nbytes()
        return total


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every case in a process of its own and print the table."""
    arguments = _parser().parse_args(argv)
    if arguments.case is not None:
        print(json.dumps(measure(arguments, arguments.case)))
        return
    print(f"{'precision':<10}{'tokens':>7}  {'case':<5}{'live MB':>9}{'state MB':>9}", end="")
    print(f"{'RSS MB':>9}{'plan MB':>9}{'of full: live':>15}{'RSS':>7}{'plan':>7}")
    for precision in arguments.precisions.split(","):
        for tokens in arguments.tokens.split(","):
            full: dict[str, float] = {}
            for case in _CASES:
                row = _measure_apart(arguments, precision, tokens, case)
                full = full or row
                line = f"{precision:<10}{tokens:>7}  {case:<5}{row['live']:>9.0f}"
                line += f"{row['state']:>9.0f}{row['rss']:>9.0f}{row['plan']:>9.0f}"
                if case != "full":
                    shares = [row[name] / full[name] for name in ("live", "rss", "plan")]
                    line += f"{shares[0]:>15.3f}{shares[1]:>7.3f}{shares[2]:>7.3f}"
                print(line, flush=True)


def _measure_apart(
    arguments: argparse.Namespace, precision: str, tokens: str, case: str
) -> dict[str, float]:
    """Run one case in a fresh process; return its measurements in MB."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        f"--model={arguments.model}",
        f"--case={case}",
        f"--precisions={precision}",
        f"--tokens={tokens}",
        f"--rank={arguments.rank}",
        f"--activation-checkpointing={arguments.activation_checkpointing}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace, case: str) -> dict[str, float]:
    """Take the steps of one case in this process; return its peaks in MB."""
    num_tokens = int(arguments.tokens)
    is_lora = case != "full"
    lora = AdapterConfig(
        enabled=is_lora, rank=arguments.rank, quantization="nf4" if case == "nf4" else "none"
    )
    config = PolicyConfig(
        model_name=str(arguments.model),
        precision=arguments.precisions,
        train_global_batch_size=4,
        max_total_sequence_length=num_tokens,
        activation_checkpointing=arguments.activation_checkpointing,
        sequence_packing=SequencePackingConfig(
            enabled=True, train_mb_tokens=num_tokens, logprob_mb_tokens=num_tokens
        ),
        optimizer=OptimizerConfig(lr=1e-5),
        lora=lora,
    )
    model_config = load_model_config(str(arguments.model))
    spec = ModelSpec.from_config(model_config, str(arguments.model))
    batch = _batch(num_tokens, spec.vocab_size)
    rss_before = _peak_rss()
    live = LiveBytes()
    with live:
        kwargs = {"config": config, "start": PolicyStart(needs_reference=True)}
        group = LocalGroup(DTensorPolicyWorker, kwargs, local_context())
        policy = Policy(group, config, spec)
        # What loading needed for a moment does not count.
        live.peak = 0
        loss = rollout_loss(PolicyGradientLossConfig(reference_policy_kl_penalty=0.01), num_tokens)
        for _ in range(_NUM_STEPS):
            sharded = policy.shard(batch, policy.plan(batch["length"]))
            logprobs = policy.compute_logprobs(sharded)
            (metrics,) = policy.train(sharded, None, loss, logprobs)
            assert np.isfinite(metrics["policy/loss"].value)
        state = live.current()
    placement = Placement(
        precision=config.precision,
        activation_checkpointing=config.checkpointing,
        chunk_size=config.chunk_size("cpu"),
        has_reference=not is_lora,
        adapter=config.adapter,
    )
    measured = {
        "live": live.peak,
        "state": state,
        "rss": _peak_rss() - rss_before,
        "plan": MemoryModel(spec, placement).peak(num_tokens),
    }
    policy.shutdown()
    return {name: value / 1e6 for name, value in measured.items()}


def _batch(num_tokens: int, vocab_size: int) -> BatchedDataDict:
    """Return four rows of random tokens that fill a microbatch; the second half is trained."""
    rng = np.random.default_rng(0)
    lengths = np.full(4, num_tokens // 4, dtype=np.int64)
    size = int(lengths.sum())

    def jagged(values: np.ndarray) -> Jagged:
        return Jagged.from_lengths(values, lengths)

    is_completion = np.tile(np.arange(num_tokens // 4) >= num_tokens // 8, 4)
    return BatchedDataDict(
        input_ids=jagged(rng.integers(0, vocab_size, size).astype(np.int32)),
        token_mask=jagged(is_completion.astype(np.uint8)),
        generation_logprobs=jagged(rng.normal(-4.0, 0.3, size).astype(np.float32)),
        advantages=rng.normal(size=4).astype(np.float32),
        length=lengths,
        row_mask=np.ones(4, dtype=bool),
    )


def _peak_rss() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--tokens", default="512,2048", help="tokens of a microbatch, by commas")
    parser.add_argument("--precisions", default="float32,bfloat16")
    parser.add_argument("--rank", type=int, default=16, help="policy.lora.rank")
    parser.add_argument(
        "--activation-checkpointing", choices=("none", "selective", "full"), default="none"
    )
    parser.add_argument("--case", choices=_CASES, help="measure one case in this process")
    return parser


if __name__ == "__main__":
    main()
