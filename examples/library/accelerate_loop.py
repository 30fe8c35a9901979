"""A loop with accelerate: examples/library/accelerate_loop.py MODEL ROWS.jsonl OUTPUT [--resume].

`# changed` marks what a token budget needs. `accelerate launch` starts it on several ranks.
"""

import sys

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from nemo_like.torch_data.accelerate import prepare

model_path, rows, output = sys.argv[1:4]
accelerator = Accelerator(gradient_accumulation_steps=2)
tokenizer = AutoTokenizer.from_pretrained(model_path)
dataset = load_dataset("json", data_files=rows, split="train").map(
    lambda row: (ids := tokenizer(row["text"]).input_ids) and {"input_ids": ids, "labels": ids},
    remove_columns=["text"],
)
model = AutoModelForCausalLM.from_pretrained(model_path)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))
model, optimizer = accelerator.prepare(model, optimizer)
batches = prepare(accelerator, loader, 256)  # changed
if "--resume" in sys.argv:
    accelerator.load_state(output)
for batch in batches:  # changed
    with accelerator.accumulate(model):
        loss = model(**batch, num_items_in_batch=batch.num_items).loss  # changed
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if batch.is_last:
        accelerator.save_state(output)
        accelerator.print(f"step {batch.step.step} of {batch.step.num_rows} rows")
