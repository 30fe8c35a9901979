"""`nemo-like check parity --model TYPE`: what a model type of transformers can be trained with.

A tiny random model of the type is trained in several layouts and compared with transformers, see
`training.parity`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from nemo_like.commands import check_parity
from nemo_like.commands.train import FAILED
from nemo_like.config.errors import ConfigError
from nemo_like.config.needs import BatchNeeds, RunNeeds
from nemo_like.config.schema import (
    ActivationCheckpointing,
    AdapterConfig,
    ParallelConfig,
    PolicyConfig,
)
from nemo_like.console import say
from nemo_like.distributed.errors import WorkerError
from nemo_like.models.adapters import can_have_adapter
from nemo_like.models.output_head import auto_class
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec
from nemo_like.models.tiny import save_tiny_copy, type_config
from nemo_like.models.vision import VISION_TYPES
from nemo_like.parallel_layout import EngineName, LayoutError
from nemo_like.policy.dtensor.model import decoder_layers
from nemo_like.policy.isolation import IsolationError
from nemo_like.training.images import check_trains_images
from nemo_like.training.parity import (
    ISOLATION,
    LIMIT,
    Comparison,
    Reference,
    TinyRun,
    check_mode,
    contexts,
    in_mode,
    random_batch,
    saved_tensors,
    tiny_run,
    train_rank,
    transformers_loss,
    worst,
)
from nemo_like.training.policy_backends import policy_backend


class Layout(NamedTuple):
    """The layout of a column, in which a type is trained."""

    parallel: ParallelConfig = ParallelConfig()
    mode: str = "packed"
    """Layout of the rows, see `parity.in_mode`."""
    engine: EngineName = "dtensor"
    experts: ParallelConfig | None = None
    """Types with experts are trained in this layout as well."""
    activation_checkpointing: ActivationCheckpointing = "none"


_TENSOR = ParallelConfig(tensor=2)
LAYOUTS = {
    "packed": Layout(),
    "padded": Layout(mode="dynamic"),
    "tp 2": Layout(_TENSOR),
    "tp 2, sequence": Layout(replace(_TENSOR, sequence=True)),
    "cp 2": Layout(ParallelConfig(context=2)),
    "ep 2": Layout(ParallelConfig(expert=2)),
    "Megatron": Layout(
        ParallelConfig(pipeline=2), engine="megatron", experts=ParallelConfig(expert=2)
    ),
}
"""By column of the table."""
COLUMNS = (*LAYOUTS, "export", "LoRA")
_ONLY_EXPERTS = "ep 2"
"""A column of models with experts."""
_RANK = 4
EQUAL = "yes"
"""Result of a column without a difference; a remark may follow."""
REFUSED = "no: "
"""Beginning of the result of a type that a run refuses, with the reason."""
WRONG = "WRONG: "
"""Beginning of the result of a type that differs from transformers, with the difference."""


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
    for column in arguments.column:
        if column not in COLUMNS:
            raise ConfigError(f"--column {column}: the columns are {', '.join(COLUMNS)}")
    texts: list[str] = []
    with opened_pool() as pool:
        for model_type in arguments.model:
            say(model_type)
            columns = arguments.column or COLUMNS
            texts += check_type(model_type, pool, columns, report=say).values()
    return FAILED if any(text.startswith(WRONG) for text in texts) else 0


class TypeCheck:
    """The tiny model of a type, and what transformers computes with it."""

    def __init__(self, model_type: str, directory: Path, pool: ProcessPoolExecutor) -> None:
        self.model_type = model_type
        self._pool = pool
        self.directory = directory
        self._model_dir = directory / "model"
        # The sizes divide by the ranks of every layout.
        self._model = save_tiny_copy(type_config(model_type), _TENSOR, self._model_dir)
        self.has_experts = ModelSpec.from_config(self._model.config).moe is not None
        vocab_size = self._model.config.get_text_config().vocab_size
        words = {f"w{index}": index for index in range(vocab_size)}
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
            unk_token="w0",
            eos_token="w1",
        )
        self.tokenizer.save_pretrained(self._model_dir)
        self._batch = random_batch(self._model.config)

    @cached_property
    def _expected(self) -> Reference:
        return Reference(self._model, self._batch, self.tiny_run(Layout()))

    def checks(self) -> dict[str, Callable[[], str]]:
        """Return column -> function that returns a difference, or ""."""
        layouts = {name: partial(self._check_layout, name) for name in LAYOUTS}
        return {**layouts, "export": self._check_export, "LoRA": self._check_lora}

    def run(self, column: str) -> str:
        """Return the result of a column: `EQUAL`, or `REFUSED` or `WRONG` with the reason."""
        try:
            difference = self.checks()[column]()
        # Whatever a model raises that nobody has tried is a result as well.
        except Exception as error:  # noqa: BLE001
            cause = error.cause if isinstance(error, WorkerError) else error
            text = " ".join(str(cause).split())
            text = re.sub(rf"{re.escape(str(self.directory))}/\w+", self.model_type, text)
            if isinstance(cause, ConfigError | LayoutError | IsolationError):
                return REFUSED + text
            return f"{WRONG}{type(cause).__name__}: {text[:300]}"
        if difference.startswith(EQUAL):
            return difference
        return EQUAL if not difference else WRONG + difference

    def tiny_run(self, layout: Layout) -> TinyRun:
        """Return the run of the tiny model in a layout."""
        policy = PolicyConfig(
            model_name="",
            shared_prefix=False,
            engine=layout.engine,
            activation_checkpointing=layout.activation_checkpointing,
        )
        return tiny_run(policy, layout.parallel, layout.parallel.expert, self._model_dir)

    def _check_layout(self, column: str) -> str:
        """Return the first difference, or "", or that there is one of rounding only."""
        layouts = [LAYOUTS[column]]
        if self.has_experts and layouts[0].experts is not None:
            layouts.append(layouts[0]._replace(parallel=layouts[0].experts))
        found: list[Comparison] = []
        for position, layout in enumerate(layouts):
            self._check_images(layout)
            # torch does not decode the URL of a rendezvous, so its path has letters only.
            folder = self.directory / f"layout{list(LAYOUTS).index(column)}x{position}"
            folder.mkdir()
            found += check_mode(
                self.tiny_run(layout), layout.mode, self._batch, self._expected, folder, self._pool
            )
        different = [each for each in found if not each.is_equal]
        if not different:
            rounded = [each for each in found if each.is_rounding]
            return f"{EQUAL}: rounding of {_described(rounded[0])}" if rounded else ""
        first = different[0]
        if first.what == ISOLATION:
            # A run refuses the type when it starts.
            raise IsolationError(first.detail)
        return f"difference of {_described(first)}"

    def _check_images(self, layout: Layout) -> None:
        """Raise ConfigError where a run refuses a model with a vision tower."""
        if self._model.config.model_type in VISION_TYPES:
            run = self.tiny_run(layout)
            policy = in_mode(run.policy, layout.mode)
            needs = RunNeeds(job="sft", batch=BatchNeeds.of_one_step(1), trains_images=True)
            check_trains_images(policy, run.layout, needs, self.model_type)

    def _check_export(self) -> str:
        """Compare the logits of a loaded export with those of the model to the bit."""
        policy = self.tiny_run(Layout()).policy
        (context,) = contexts(1, self.directory / "export.rendezvous")
        worker = policy_backend(policy).worker()(context, config=policy)
        worker.export_hf(self.directory / "hf")
        ids = torch.arange(16)[None]
        with torch.no_grad():
            found, expected = (
                _load(path)(input_ids=ids, use_cache=False).logits
                for path in (self.directory / "hf", self._model_dir)
            )
        return "" if torch.equal(found, expected) else "the logits of the export differ"

    def _check_lora(self) -> str:
        """Compare the gradients of adapters on all linear layers with PEFT's."""
        if find_spec("peft") is None:
            raise ConfigError("peft is not installed, with which LoRA is compared")
        from peft import LoraConfig, get_peft_model

        model = _load(self._model_dir)
        targets = _adapted_layers(model)
        if not targets:
            raise ConfigError("none of its linear layers can have an adapter")
        options = LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules=targets,
            exclude_modules=r".*visual\..*",
            init_lora_weights=False,
        )
        adapted: Any = get_peft_model(model, options)
        adapted.save_pretrained(self.directory / "adapter")
        loss = transformers_loss(adapted, self._batch)
        loss.backward()
        expected = {
            name.removeprefix("base_model.model.").replace(".default.", "."): weight.grad
            for name, weight in adapted.named_parameters()
            if weight.requires_grad
        }
        run = self.tiny_run(Layout())
        adapter = AdapterConfig(
            enabled=True,
            rank=_RANK,
            alpha=2 * _RANK,
            target_modules=tuple(targets),
            adapter_path=str(self.directory / "adapter"),
        )
        policy = replace(in_mode(run.policy, "packed"), lora=adapter)
        (context,) = contexts(1, self.directory / "lora.rendezvous")
        folder = self.directory / "lora"
        run = replace(run, policy=policy)
        *_, leak = self._pool.submit(train_rank, context, run, self._batch, folder).result()
        if leak:
            raise IsolationError(leak)
        difference, name = worst(saved_tensors(folder / "first", "exp_avg"), expected)
        return "" if difference <= LIMIT else f"gradient differs by {difference:.1e} at {name}"


def _described(comparison: Comparison) -> str:
    text = f"{comparison.what}: {comparison.difference:.1e}, {comparison.detail}"
    return text.removesuffix(", ")


def _load(directory: Path) -> PreTrainedModel:
    """Load a model in float32 with eager attention."""
    model_config = load_model_config(str(directory))
    return (
        auto_class(model_config)
        .from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


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
    # Forked from this process, a rank would inherit the threads of torch in an undefined state.
    method = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=method) as pool:
        yield pool


def check_type(
    model_type: str,
    pool: ProcessPoolExecutor,
    columns: Sequence[str] = COLUMNS,
    report: Callable[[str], None] = lambda line: None,
    check_class: type[TypeCheck] = TypeCheck,
) -> dict[str, str]:
    """Return the results of a type by column. Raises ConfigError for an unknown type."""
    with tempfile.TemporaryDirectory(prefix="nemo_like_parity_") as folder:
        check = check_class(model_type, Path(folder), pool)
        results = {}
        for column in columns:
            if column == _ONLY_EXPERTS and not check.has_experts:
                continue
            results[column] = check.run(column)
            report(f"  {column:<15} {results[column]}")
        return results
