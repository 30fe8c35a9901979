"""Lightning. `# changed` marks what a token budget needs. Arguments: MODEL ROWS.jsonl OUTPUT."""

import sys

import lightning.pytorch as pl
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from nemo_like.torch_data.lightning import train_batches

model_path, rows, output = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(model_path)
dataset = load_dataset("json", data_files=rows, split="train").map(
    lambda row: (ids := tokenizer(row["text"]).input_ids) and {"input_ids": ids, "labels": ids},
    remove_columns=["text"],
)


class Module(pl.LightningModule):
    """A causal language model."""

    def configure_model(self):
        self.model = AutoModelForCausalLM.from_pretrained(model_path).train()

    def train_dataloader(self):
        loader = DataLoader(dataset, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))
        return train_batches(self.trainer, loader, 256)  # changed

    def training_step(self, batch, index):
        return self.model(**batch, num_items_in_batch=batch.num_items).loss  # changed

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


save = pl.callbacks.ModelCheckpoint(output, save_last=True, every_n_train_steps=2)
trainer = pl.Trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[save], logger=False)
trainer.fit(Module(), ckpt_path="last" if "--resume" in sys.argv else None)
