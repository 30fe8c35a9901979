"""Token budgets in the trainers of other libraries: gradients, resume and the example programs."""

from __future__ import annotations

import json
import multiprocessing
import random
import runpy
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.torch_data import stream_spec
from nemo_like.torch_data.accelerate import prepare
from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer
from tests.torch_data.adapter_ranks import (
    LIBRARIES,
    TokenBudgetTrainer,
    collate,
    expected,
    lightning_run,
    rows,
    run_rank,
)

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# Gradients


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_rank_computes_the_gradient_of_all_rows(library: str) -> None:
    torch.testing.assert_close(LIBRARIES[library](), expected(), rtol=1e-5, atol=1e-6)


def test_two_ranks_compute_the_gradient_of_all_rows() -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        futures = [pool.submit(run_rank, rank, 2, port) for rank in range(2)]
        ranks = [future.result(timeout=600) for future in futures]
    for found in ranks:
        assert found.keys() == LIBRARIES.keys()
        for name, weights in found.items():
            torch.testing.assert_close(weights, expected(), rtol=1e-5, atol=1e-6, msg=name)


# Example programs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and rows of text."""
    path = tmp_path_factory.mktemp("inputs")
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    generator = random.Random(0)
    texts = ["the quick brown fox " * generator.randint(1, 6) for _ in range(24)]
    (path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class StopAt(StringIO):
    """Standard output that interrupts the program after a line."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def write(self, text: str) -> int:
        if self._text in text:
            raise KeyboardInterrupt
        return super().write(text)


@contextmanager
def arguments(*values: str) -> Iterator[None]:
    before = sys.argv
    sys.argv = list(values)
    try:
        yield
    finally:
        sys.argv = before


def run_example(name: str, inputs: Path, output: Path, *more: str, stop_at: str = "\0") -> None:
    program = str(ROOT / "examples/library" / f"{name}.py")
    model, texts = str(inputs / "model"), str(inputs / "rows.jsonl")
    output.mkdir(exist_ok=True)
    torch.manual_seed(0)
    with arguments(program, model, texts, str(output), *more), redirect_stdout(StopAt(stop_at)):
        runpy.run_path(program, run_name="__main__")


@pytest.mark.parametrize("name", ["torch_loop", "accelerate_loop"])
def test_a_loop_that_is_interrupted_continues_exactly(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    def state(output: Path) -> dict[str, torch.Tensor]:
        if name == "torch_loop":
            return torch.load(output / "model.pt", weights_only=True)
        return load_file(output / "model.safetensors")

    run_example(name, inputs, tmp_path / "full")
    with pytest.raises(KeyboardInterrupt):
        run_example(name, inputs, tmp_path / "resumed", stop_at="step 2 ")
    run_example(name, inputs, tmp_path / "resumed", "--resume")
    full, resumed = state(tmp_path / "full"), state(tmp_path / "resumed")
    assert full.keys() == resumed.keys()
    for key, value in full.items():
        assert torch.equal(value, resumed[key]), key


@pytest.mark.parametrize("name", ["hf_trainer", "trl_sft"])
def test_a_trainer_continues_exactly_from_each_checkpoint(
    name: str, inputs: Path, tmp_path: Path
) -> None:
    def steps(output: Path) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*"))

    run_example(name, inputs, tmp_path / "full")
    last = steps(tmp_path / "full")[-1]
    for step in (2, steps(tmp_path / "full")[-3]):
        output = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "full" / f"checkpoint-{step}", output / f"checkpoint-{step}")
        run_example(name, inputs, output, "--resume")
        assert steps(output)[-1] == last
        model = f"checkpoint-{last}/model.safetensors"
        full, resumed = load_file(tmp_path / "full" / model), load_file(output / model)
        for key, value in full.items():
            assert torch.equal(value, resumed[key]), (step, key)


def test_lightning_continues_exactly_from_each_checkpoint(inputs: Path, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    every_step = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1)
    full = lightning_run(2, max_epochs=2, callbacks=[every_step])
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) > 6
    for checkpoint in checkpoints:
        assert torch.equal(lightning_run(2, checkpoint, max_epochs=2), full), checkpoint
    output = tmp_path / "example"
    run_example("lightning_module", inputs, output)
    run_example("lightning_module", inputs, output, "--resume")
    assert (output / "last.ckpt").is_file()


# Messages


def test_a_model_without_a_divisor_of_its_loss_is_refused(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Embedding(17, 17)

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> Any:
            logits = self.layer(input_ids)
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    from transformers import TrainingArguments

    trainer = TokenBudgetTrainer(
        Mean(),
        TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=1),
        train_dataset=rows(),
        data_collator=collate,
        max_tokens=48,
    )
    with pytest.raises(ValueError, match="compute_loss_func"):
        trainer.train()


def test_the_number_of_microbatches_is_that_of_the_library() -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    loader = DataLoader(rows(), collate_fn=collate)  # pyright: ignore[reportArgumentType]
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3"):
        prepare(accelerator, loader, stream_spec(48, microbatches_per_step=2))
