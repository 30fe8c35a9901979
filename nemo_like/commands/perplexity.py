"""`nemo-like eval --perplexity`: loss, perplexity and token accuracy on SFT rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nemo_like.algorithms.sft.loop import evaluate_batches
from nemo_like.commands.answer_config import AnswerRunConfig, answer_config, described_settings
from nemo_like.commands.eval_results import Results, SetResults
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig, SequencePackingConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import SFT_ROWS
from nemo_like.data.rows import Rows, load_rows
from nemo_like.metrics import Metrics, metric_values
from nemo_like.rollout.intervals import Estimate
from nemo_like.run.progress import Progress
from nemo_like.training.encoding import encode_conversation
from nemo_like.training.model_files import open_encoder, open_model_spec
from nemo_like.training.workers import local_policy

_BATCH_ROWS = 64
_MIN_MICROBATCH_TOKENS = 4096


def measure_perplexity(
    arguments: argparse.Namespace, files: Mapping[str, str], base: RunConfig | None
) -> Results:
    """Return the results of every file, computed by one process. Raises ConfigError."""
    if arguments.replicas > 1 or arguments.tensor_parallel > 1:
        raise ConfigError(
            "--perplexity runs in one process; set --replicas and --tensor-parallel to 1"
        )
    config = _packed(answer_config(arguments, files=files, base=base))
    encoder = open_encoder(config, open_model_spec(config).vocab_size)
    encoded: dict[str, list[EncodedRow]] = {}
    sizes: dict[str, int] = {}
    for name, path in files.items():
        key = f"--data {name}" if name else "--data"
        rows = load_rows(
            path,
            SFT_ROWS,
            max_rows=config.data.max_validation_rows,
            key=key,
            columns=config.data.columns,
        )
        sizes[name] = len(rows)
        encoded[name] = list(_encoded(rows, encoder, config))
        if not encoded[name]:
            raise ConfigError(f"{key}: no row of {path} is short enough for the model")
    progress = Progress(sys.stderr)
    sets = {}
    with local_policy(config, needs_reference=False) as policy:
        for name, own in encoded.items():
            batches = []
            for start in range(0, len(own), _BATCH_ROWS):
                batches.append(own[start : start + _BATCH_ROWS])
            with progress.phase("computing the loss"):
                metrics = evaluate_batches(policy, batches)
            sets[name] = SetResults(
                num_prompts=len(own),
                num_left_out=sizes[name] - len(own),
                metrics=_estimates(metrics),
            )
    return Results(sets=sets, settings=described_settings(config))


def _packed(config: AnswerRunConfig) -> AnswerRunConfig:
    """Return the config with packed microbatches that fit the longest row."""
    num_tokens = max(config.policy.max_total_sequence_length, _MIN_MICROBATCH_TOKENS)
    packing = SequencePackingConfig(
        enabled=True, train_mb_tokens=num_tokens, logprob_mb_tokens=num_tokens
    )
    return replace(config, policy=replace(config.policy, sequence_packing=packing))


def _encoded(rows: Rows, encoder: ChatEncoder, config: AnswerRunConfig) -> Iterator[EncodedRow]:
    """Yield the rows that are short enough. Raises ConfigError that names a bad row."""
    for index, row in enumerate(rows):
        try:
            encoded = encode_conversation(encoder, config, row)
        except ConfigError as error:
            raise ConfigError(f"{rows.location(index)}: {error}") from error
        if encoded is not None:
            yield encoded


def _estimates(metrics: Metrics) -> dict[str, Estimate]:
    """Return the metrics without intervals."""
    found = {}
    for name, value in metric_values(metrics).items():
        found[name] = Estimate(value=value, low=None, high=None, method="none")
    return found
