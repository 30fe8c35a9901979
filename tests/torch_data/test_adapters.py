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
from transformers import BertConfig, BertForMaskedLM, default_data_collator

from nemo_like.torch_data import PackingCollator, stream_spec
from nemo_like.torch_data.accelerate import prepare
from tests.torch_data.adapter_ranks import (
    LIBRARIES,
    TokenBudgetTrainer,
    collate,
    expected,
    lightning_run,
    model,
    rows,
    run_rank,
    save_model,
    weights,
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
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        futures = [pool.submit(run_rank, rank, 2, port) for rank in range(2)]
        ranks = [future.result(timeout=600) for future in futures]
    for found in ranks:
        assert found.keys() == LIBRARIES.keys()
        for name, trained in found.items():
            torch.testing.assert_close(trained, expected(), rtol=1e-5, atol=1e-6, msg=name)


# Example programs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and rows of text."""
    path = tmp_path_factory.mktemp("inputs")
    save_model(path / "model")
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

    every_step: dict[str, Any] = {"every_n_train_steps": 1}
    every_epoch: dict[str, Any] = {"every_n_epochs": 1}
    limited: dict[str, Any] = {"limit_train_batches": 4}
    unlimited: dict[str, Any] = {}
    for number, (save, options) in enumerate(
        [
            (every_step, unlimited),
            (every_step, limited),
            (every_epoch, unlimited),
            (every_epoch, limited),
        ]
    ):
        path = tmp_path / str(number)
        callback = ModelCheckpoint(path, save_top_k=-1, **save)
        full = lightning_run(2, max_epochs=3, callbacks=[callback], **options)
        checkpoints = sorted(path.glob("*.ckpt"))
        assert len(checkpoints) >= 3
        for checkpoint in checkpoints:
            resumed = lightning_run(2, checkpoint, max_epochs=3, **options)
            assert torch.equal(resumed, full), checkpoint
    output = tmp_path / "example"
    run_example("lightning_module", inputs, output)
    run_example("lightning_module", inputs, output, "--resume")
    assert (output / "last.ckpt").is_file()


# Trainers: arguments, columns and lengths


class RecordingTrainer(TokenBudgetTrainer):
    """Records the rows of each microbatch."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(inputs.rows)
        return super().training_step(model, inputs, *args, **kwargs)


def trainer(
    path: Path, dataset: Any, collator: Any = collate, net: Any = None, **options: Any
) -> Any:
    from transformers import TrainingArguments

    values = {"gradient_accumulation_steps": 2, "max_steps": 3, "save_strategy": "no", **options}
    return RecordingTrainer(
        model() if net is None else net,
        TrainingArguments(str(path), report_to=[], use_cpu=True, disable_tqdm=True, **values),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=collator,
        max_tokens=48,
    )


@pytest.mark.parametrize("collator", [PackingCollator(), collate])
def test_the_number_of_steps_is_that_of_rows_without_their_padding(
    collator: Any, tmp_path: Path
) -> None:
    from datasets import Dataset

    names = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    padded = [
        {name: row[name] + [value] * (40 - len(row[name])) for name, value in names.items()}
        for row in ({**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows())
    ]
    # With indices, as of a split, and in several chunks.
    dataset = Dataset.from_list([*padded[:9], *padded, *padded[9:]]).select(range(9, 32))
    if collator is collate:
        collator = default_data_collator
    run = trainer(tmp_path, dataset, collator, max_steps=-1, num_train_epochs=2)
    run.train()
    # The Trainer takes the longest epoch for all of them.
    assert 0 <= run.state.max_steps - run.state.global_step <= 1
    assert sorted(row for rows in run.seen for row in rows) == sorted([*range(23)] * 2)


def test_columns_that_the_model_does_not_take_do_not_reach_the_collator(tmp_path: Path) -> None:
    def strict(samples: list[dict[str, Any]]) -> Any:
        assert all(sample.keys() == {"input_ids", "labels"} for sample in samples)
        return collate(samples)

    run = trainer(tmp_path, [{**row, "id": str(n)} for n, row in enumerate(rows())], strict)
    run.train()
    assert run.state.global_step == 3


def test_the_seed_of_the_data_may_be_zero(tmp_path: Path) -> None:
    orders = []
    for seed in (0, 0, 42):
        run = trainer(tmp_path, rows(), data_seed=seed)
        run.train()
        orders.append(run.seen)
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("per_step", [1, 2])
def test_a_resume_continues_the_random_numbers_of_the_collator(
    per_step: int, tmp_path: Path
) -> None:
    def masked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(samples)
        is_masked = torch.rand(batch["labels"].shape) < 0.5
        return {**batch, "labels": batch["labels"].masked_fill(is_masked, -100)}

    def run(path: Path, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 8}
        net = model()
        net.config.attention_dropout = 0.3
        made = trainer(path, rows(), masked, net, gradient_accumulation_steps=per_step, **options)
        torch.manual_seed(1 if checkpoint is None else 2)
        made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return made.model.state_dict()

    full = run(tmp_path / "full")
    for step in range(1, 8):
        found = run(tmp_path / "resumed", tmp_path / "full" / f"checkpoint-{step}")
        for name, value in full.items():
            assert torch.equal(value, found[name]), (step, name)


@pytest.mark.parametrize("limit", [{"num_train_epochs": 2, "max_steps": -1}, {"max_steps": 10}])
def test_a_resume_continues_the_count_of_epochs(limit: dict[str, Any], tmp_path: Path) -> None:
    from datasets import Dataset

    def epochs(path: Path, checkpoint: Path | None = None) -> list[float]:
        options = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, **limit}
        made = trainer(path, Dataset.from_list(rows()), **options)
        made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return [entry["epoch"] for entry in made.state.log_history if "loss" in entry]

    full = epochs(tmp_path / "full")
    assert len(full) > 6
    for step in (2, len(full) - 2):
        resumed = epochs(tmp_path / "resumed", tmp_path / "full" / f"checkpoint-{step}")
        assert resumed == pytest.approx(full)


@pytest.mark.parametrize("collator", [PackingCollator(), collate])
def test_lora_adapters_are_trained_and_the_best_ones_are_kept(
    collator: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    def lora() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return get_peft_model(model(), config)

    def loss_of(net: Any) -> torch.Tensor:
        batch = collate(rows())
        num_items = int((batch["labels"][:, 1:] != -100).sum())
        return net(**batch, num_items_in_batch=num_items).loss

    def run(steps: int, per_step: int, **options: Any) -> Any:
        made = trainer(
            tmp_path,
            rows(),
            collator,
            lora(),
            max_steps=steps,
            gradient_accumulation_steps=per_step,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            optim="sgd",
            **options,
        )
        made.train()
        return made

    expected = lora()
    loss_of(expected).backward()
    torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=1.0).step()
    found = run(1, 30, learning_rate=1.0).model
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-5, atol=1e-6)

    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
    best = {"eval_steps": 1, "load_best_model_at_end": True, "per_device_eval_batch_size": 23}
    made = run(4, 2, learning_rate=20.0, **every_step, **best)
    losses = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(losses) == 4
    with torch.no_grad():
        assert loss_of(made.model.eval()).item() == pytest.approx(min(losses), rel=1e-5)


def test_a_limit_of_lightning_takes_other_rows_in_each_epoch() -> None:
    def epochs(**options: Any) -> list[list[int]]:
        seen: dict[int, list[int]] = {}
        lightning_run(2, seen=seen, max_epochs=3, enable_checkpointing=False, **options)
        return list(seen.values())

    first, second, third = epochs(limit_train_batches=2)
    assert first != second != third != first
    with pytest.raises(ValueError, match="multiple of accumulate_grad_batches=2"):
        epochs(limit_train_batches=3)
    # Lightning creates a new dataloader for each epoch.
    made = epochs(reload_dataloaders_every_n_epochs=1)
    assert all(sorted(epoch) == list(range(23)) for epoch in made)
    assert made[0] != made[1] != made[2]
    overfitted = epochs(overfit_batches=2)
    assert overfitted[0] == overfitted[1] == overfitted[2]


def test_several_dataloaders_of_accelerate_have_positions_of_their_own(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    def make() -> tuple[Accelerator, list[Any]]:
        accelerator = Accelerator(cpu=True)
        loaders = [DataLoader(rows(), shuffle=True, collate_fn=collate) for _ in range(2)]  # pyright: ignore[reportArgumentType]
        return accelerator, [prepare(accelerator, loader, 48) for loader in loaders]

    accelerator, batches = make()
    iterators = [iter(each) for each in batches]
    for iterator, num_done in zip(iterators, (1, 3), strict=True):
        for _ in range(num_done):
            next(iterator)
    accelerator.save_state(str(tmp_path))
    expected = [[batch.rows for batch in iterator] for iterator in iterators]
    accelerator, batches = make()
    accelerator.load_state(str(tmp_path))
    assert [[batch.rows for batch in each] for each in batches] == expected


# Messages


def test_a_model_whose_loss_is_a_mean_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(ValueError, match="does not use num_items_in_batch"):
        trainer(tmp_path, rows(), net=BertForMaskedLM(config)).train()

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        logits = outputs.logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / (
            num_items_in_batch
        )

    run = trainer(tmp_path, rows(), net=BertForMaskedLM(config))
    run.compute_loss_func = compute_loss
    assert run.train().global_step == 3


def test_arguments_with_which_rows_or_labels_would_be_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reduce max_tokens"):
        trainer(tmp_path, rows(), auto_find_batch_size=True).train()
    with pytest.raises(ValueError, match="batch_rebalance"):
        trainer(tmp_path, rows(), train_sampling_strategy="batch_rebalance").train()
    shifting = PackingCollator(shift_labels=True)
    with pytest.raises(ValueError, match="shift_labels=False"):
        trainer(tmp_path, rows(), shifting, label_smoothing_factor=0.1).train()


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
