"""`nemo-like check parity --model TYPE`: what a model type of transformers can be trained with.

A tiny random model of the type is trained in several layouts and compared with transformers as in
`check_parity`. With `--table` the results are added to a file, of which the documentation is made.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from nemo_like.commands import check_parity
from nemo_like.commands.check_parity import (
    ISOLATION,
    LIMIT,
    Trained,
    check_mode,
    contexts,
    in_mode,
    random_batch,
    saved_tensors,
    tiny_run,
    train_rank,
    train_with_transformers,
    transformers_loss,
    worst,
)
from nemo_like.commands.model_table import EQUAL, REFUSED, WRONG, Results, update_table
from nemo_like.commands.train import FAILED
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import (
    AdapterConfig,
    ClusterConfig,
    DataConfig,
    ParallelConfig,
    PolicyConfig,
    RunConfig,
)
from nemo_like.console import say
from nemo_like.models.adapters import can_have_adapter
from nemo_like.models.spec import ModelSpec
from nemo_like.models.tiny import save_tiny_copy, type_config
from nemo_like.parallel_layout import LayoutError
from nemo_like.policy.dtensor.model import decoder_layers
from nemo_like.policy.isolation import IsolationError
from nemo_like.training.workers import policy_worker_class

_TENSOR = ParallelConfig(tensor=2)
LAYOUTS: dict[str, tuple[ParallelConfig, str]] = {
    "packed": (ParallelConfig(), "packed"),
    "padded": (ParallelConfig(), "dynamic"),
    "tp 2": (_TENSOR, "packed"),
    "tp 2, sequence": (replace(_TENSOR, sequence=True), "packed"),
    "cp 2": (ParallelConfig(context=2), "packed"),
    "ep 2": (ParallelConfig(expert=2), "packed"),
}
"""Column of the table -> layout of the ranks, and of the rows."""
COLUMNS = (*LAYOUTS, "export", "LoRA")
_ONLY_EXPERTS = "ep 2"
"""A column of models with experts."""
_RANK = 4
_LIBRARIES = ("transformers", "torch")


def run(arguments: argparse.Namespace) -> int:
    """Check the types of `--model`, or the layout of a config; return the exit code.

    It is 1 for a difference and for an unclear error. Raises ConfigError.
    """
    if not arguments.model:
        if arguments.config is None:
            raise ConfigError("check parity needs --config FILE, or --model TYPE such as llama")
        return check_parity.run(arguments)
    for model_type in arguments.model:
        type_config(model_type)
    results: Results = {}
    with opened_pool() as pool:
        for model_type in arguments.model:
            say(model_type)
            results[model_type] = check_type(model_type, pool, report=say)
            if arguments.table is not None:
                versions = {name: version(name).partition("+")[0] for name in _LIBRARIES}
                update_table(arguments.table, results, versions)
    texts = [text for cells in results.values() for text in cells.values()]
    return FAILED if any(text.startswith(WRONG) for text in texts) else 0


class TypeCheck:
    """The tiny model of a type, and what transformers computes with it."""

    def __init__(self, model_type: str, directory: Path, pool: ProcessPoolExecutor) -> None:
        self._model_type = model_type
        self._pool = pool
        self._directory = directory
        self._model_dir = directory / "model"
        # The sizes divide by the ranks of every layout.
        model = save_tiny_copy(type_config(model_type), _TENSOR, self._model_dir)
        self.has_experts = ModelSpec.from_config(model.config).moe is not None
        words = {f"w{index}": index for index in range(model.config.vocab_size)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="w0", eos_token="w1"
        ).save_pretrained(self._model_dir)
        self._batch = random_batch(model.config.vocab_size)
        self._expected: Trained = train_with_transformers(
            model, self._batch, self._config(ParallelConfig())
        )

    def run(self, column: str) -> str:
        """Return the result of a column as in `model_table.Results`."""
        check = {"export": self._check_export, "LoRA": self._check_lora}.get(column)
        try:
            difference = self._check_layout(column) if check is None else check()
        except (ConfigError, LayoutError, IsolationError) as error:
            return REFUSED + str(error).replace(str(self._model_dir), self._model_type)
        # Whatever a model raises that nobody has tried is a result as well.
        except Exception as error:  # noqa: BLE001
            return f"{WRONG}{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return EQUAL if not difference else WRONG + difference

    def _config(self, parallel: ParallelConfig) -> RunConfig:
        config = RunConfig(
            run_name="parity",
            policy=PolicyConfig(model_name="", shared_prefix="false"),
            data=DataConfig(train_path="random"),
            parallel=parallel,
            cluster=ClusterConfig(
                workers_per_node=parallel.tensor * parallel.context * parallel.expert
            ),
        )
        return tiny_run(config, self._model_dir)

    def _check_layout(self, column: str) -> str:
        """Return the first difference, or ""."""
        parallel, mode = LAYOUTS[column]
        # torch does not decode the URL of a rendezvous, so its path has letters only.
        folder = self._directory / f"layout{list(LAYOUTS).index(column)}"
        folder.mkdir()
        found = check_mode(
            self._config(parallel), mode, self._batch, self._expected, folder, self._pool
        )
        different = [each for each in found if not each.is_equal]
        if not different:
            return ""
        first = different[0]
        if first.what == ISOLATION:
            # A run refuses the type when it starts.
            raise IsolationError(first.detail)
        return f"{first.what} differs by {first.difference:.1e} {first.detail}".strip()

    def _check_export(self) -> str:
        """Compare the logits of a loaded export with those of the model to the bit."""
        config = self._config(ParallelConfig())
        (context,) = contexts(1, self._directory / "export.rendezvous")
        worker = policy_worker_class(config)(context, config=config.policy)  # type: ignore[call-arg]
        worker.export_hf(self._directory / "hf")
        ids = torch.arange(16)[None]
        with torch.no_grad():
            found, expected = (
                _load(path)(input_ids=ids, use_cache=False).logits
                for path in (self._directory / "hf", self._model_dir)
            )
        return "" if torch.equal(found, expected) else "the logits of the export differ"

    def _check_lora(self) -> str:
        """Compare the gradients of adapters on all linear layers with PEFT's."""
        if find_spec("peft") is None:
            raise ConfigError("peft is not installed, with which LoRA is compared")
        from peft import LoraConfig, get_peft_model

        model = _load(self._model_dir)
        targets = _adapted_layers(model)
        options = LoraConfig(
            r=_RANK, lora_alpha=2 * _RANK, target_modules=targets, init_lora_weights=False
        )
        adapted: Any = get_peft_model(model, options)
        adapted.save_pretrained(self._directory / "adapter")
        loss = transformers_loss(adapted, self._batch)
        loss.backward()
        expected = {
            name.removeprefix("base_model.model.").replace(".default.", "."): weight.grad
            for name, weight in adapted.named_parameters()
            if weight.requires_grad
        }
        config = in_mode(self._config(ParallelConfig()), "packed")
        adapter = AdapterConfig(
            enabled=True,
            rank=_RANK,
            alpha=2 * _RANK,
            target_modules=tuple(targets),
            adapter_path=str(self._directory / "adapter"),
        )
        config = replace(config, policy=replace(config.policy, lora=adapter))
        (context,) = contexts(1, self._directory / "lora.rendezvous")
        folder = self._directory / "lora"
        self._pool.submit(train_rank, context, config, self._batch, folder).result()
        difference, name = worst(saved_tensors(folder / "first", "exp_avg"), expected)
        return "" if difference <= LIMIT else f"gradient differs by {difference:.1e} at {name}"


def _load(directory: Path) -> PreTrainedModel:
    """Load a model in float32 with eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _adapted_layers(model: PreTrainedModel) -> list[str]:
    """Return the ends of the names of the linear layers that can have an adapter."""
    spec = ModelSpec.from_config(model.config)
    inner = {module for layer in decoder_layers(model) for module in layer.modules()}
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module in inner and can_have_adapter(name, spec):
            names.add(".".join(name.split(".")[-2:]))
    return sorted(names)


@contextmanager
def opened_pool() -> Iterator[ProcessPoolExecutor]:
    """Open the processes of the ranks, which serve any number of types and layouts."""
    transformers_logging.disable_progress_bar()
    # A forked process would inherit the threads of torch in an undefined state.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        yield pool


def check_type(
    model_type: str,
    pool: ProcessPoolExecutor,
    columns: Sequence[str] = COLUMNS,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Return the results of a type by column. Raises ConfigError for an unknown type."""
    with tempfile.TemporaryDirectory(prefix="nemo_like_parity_") as folder:
        check = TypeCheck(model_type, Path(folder), pool)
        results = {}
        for column in columns:
            if column == _ONLY_EXPERTS and not check.has_experts:
                continue
            results[column] = check.run(column)
            report(f"  {column:<15} {results[column]}")
        return results
