"""One optimizer step over all rows with each library, for the tests of its adapter (imported by the
processes of a group).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainer, Trainer, TrainingArguments

from nemo_like.policy.inputs import attention
from nemo_like.torch_data import PackingCollator, stream_spec
from nemo_like.torch_data.hf_trainer import OnlineBatchesMixin
from tests.data.tiny_tokenizer import CHATML, tiny_tokenizer

VOCAB = 17
PER_STEP = 30
"""Microbatches of a step; enough for all rows."""


class TokenBudgetTrainer(OnlineBatchesMixin, Trainer):
    """The Trainer of transformers."""


class FactoryTrainer(OnlineBatchesMixin, Seq2SeqTrainer):
    """As the SFT trainer of LLaMA-Factory: a Seq2SeqTrainer that overrides these methods."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return super().create_optimizer(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


def rows() -> list[dict[str, Any]]:
    """Rows with masked labels."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(23):
        length = 2 + number * 5 % 19
        input_ids = torch.randint(VOCAB, (length,), generator=generator)
        is_masked = torch.rand(length, generator=generator) < 0.4
        labels = input_ids.masked_fill(is_masked, -100)
        made.append({"input_ids": input_ids.tolist(), "labels": labels.tolist()})
    return made


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad on the right."""
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = []
    for sample in samples:
        missing = length - len(sample["input_ids"])
        batch.append(
            {
                "input_ids": sample["input_ids"] + [0] * missing,
                "labels": sample["labels"] + [-100] * missing,
                "attention_mask": [1] * (length - missing) + [0] * missing,
            }
        )
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}


def model() -> LlamaForCausalLM:
    """A model without dropout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def save_model(path: Path, num_layers: int = 1) -> None:
    """Write a model with a tokenizer to a directory."""
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def weights(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def expected() -> Tensor:
    """Weights after one step of SGD on one padded batch of all rows."""
    net = model()
    batch = collate(rows())
    num_items = int((batch["labels"][:, 1:] != -100).sum())
    net(**batch, num_items_in_batch=num_items).loss.backward()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    return weights(net)


def _arguments(kind: type[TrainingArguments] = TrainingArguments, **more: Any) -> Any:
    return kind(
        tempfile.mkdtemp(),
        max_steps=1,
        gradient_accumulation_steps=PER_STEP,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )


def _trained(trainer: Any) -> Tensor:
    trainer.train()
    return weights(trainer.accelerator.unwrap_model(trainer.model))


def hf_trainer() -> Tensor:
    return _trained(
        TokenBudgetTrainer(
            model(), _arguments(), train_dataset=rows(), data_collator=collate, max_tokens=48
        )
    )


def hf_trainer_packed(implementation: str = "sdpa") -> Tensor:
    """Rows of a microbatch share one sequence; attention separates them."""
    attention.register()
    net = model()
    net.set_attn_implementation(implementation)
    return _trained(
        TokenBudgetTrainer(
            net, _arguments(), train_dataset=rows(), data_collator=PackingCollator(), max_tokens=48
        )
    )


def llama_factory() -> Tensor:
    from transformers import Seq2SeqTrainingArguments

    arguments = _arguments(Seq2SeqTrainingArguments)
    return _trained(
        FactoryTrainer(
            model(), arguments, train_dataset=rows(), data_collator=collate, max_tokens=48
        )
    )


def trl() -> Tensor:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    class TokenBudgetSFTTrainer(OnlineBatchesMixin, SFTTrainer):
        """The SFT trainer of TRL."""

    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    return _trained(
        TokenBudgetSFTTrainer(
            model(),
            _arguments(SFTConfig, bf16=False, gradient_checkpointing=False),
            train_dataset=Dataset.from_list(rows()),
            data_collator=collate,
            processing_class=tokenizer,
            max_tokens=48,
        )
    )


def accelerate() -> Tensor:
    from accelerate import Accelerator

    from nemo_like.torch_data.accelerate import prepare

    accelerator = Accelerator(gradient_accumulation_steps=PER_STEP, cpu=True)
    net = model()
    prepared = accelerator.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    loader = DataLoader(rows(), batch_size=4, shuffle=True, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    for batch in prepare(accelerator, loader, stream_spec(48, microbatches_per_step=PER_STEP)):
        with accelerator.accumulate(prepared):
            loss = prepared(**batch, num_items_in_batch=batch.num_items).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
    return weights(net)


def lightning() -> Tensor:
    return lightning_run(PER_STEP, max_epochs=1, enable_checkpointing=False)


def lightning_run(
    per_step: int,
    checkpoint: Path | None = None,
    seen: dict[int, list[int]] | None = None,
    **options: Any,
) -> Tensor:
    """Train with SGD; return the weights at the end. Adds the rows of each epoch to `seen`."""
    from lightning import LightningModule, Trainer

    from nemo_like.torch_data.lightning import train_batches

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model().train()

        def train_dataloader(self) -> Any:
            loader = DataLoader(rows(), shuffle=True, collate_fn=collate)  # pyright: ignore[reportArgumentType]
            return train_batches(self.trainer, loader, 48)

        def training_step(self, batch: Any, index: int) -> Tensor:
            if seen is not None:
                seen.setdefault(self.current_epoch, []).extend(batch.rows)
            return self.model(**batch, num_items_in_batch=batch.num_items).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp" if num_ranks > 1 else "auto",
        devices=num_ranks,
        accumulate_grad_batches=per_step,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        **options,
    )
    module = Module()
    trainer.fit(module, ckpt_path=checkpoint)
    return weights(module.model)


LIBRARIES: dict[str, Callable[[], Tensor]] = {
    "transformers": hf_trainer,
    "transformers, packed": hf_trainer_packed,
    "transformers, varlen_attention": lambda: hf_trainer_packed(attention.IMPLEMENTATION),
    "LLaMA-Factory": llama_factory,
    "TRL": trl,
    "accelerate": accelerate,
    "Lightning": lightning,
}


def run_rank(rank: int, num_ranks: int, port: int) -> dict[str, Tensor]:
    """Return the weights after a step with each library, in a process of a group."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    return {name: run() for name, run in LIBRARIES.items()}
