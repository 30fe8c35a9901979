"""A plain PyTorch loop: python examples/library/torch_loop.py MODEL ROWS.jsonl OUTPUT [--resume].

`# changed` marks what a token budget needs.
"""

import sys

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from nemo_like.torch_data import online_batches, stream_spec

model_path, rows, output = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(model_path)
dataset = load_dataset("json", data_files=rows, split="train").map(
    lambda row: (ids := tokenizer(row["text"]).input_ids) and {"input_ids": ids, "labels": ids},
    remove_columns=["text"],
)
model = AutoModelForCausalLM.from_pretrained(model_path)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))
batches = online_batches(loader, stream_spec(256, microbatches_per_step=2))  # changed
if "--resume" in sys.argv:
    model.load_state_dict(torch.load(f"{output}/model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(f"{output}/optimizer.pt", weights_only=True))
    batches.load(output)
for batch in batches:  # changed
    loss = model(**batch, num_items_in_batch=batch.num_items).loss  # changed
    loss.backward()
    if batch.is_last:  # as with gradient accumulation
        optimizer.step()
        optimizer.zero_grad()
        batches.save(output)
        torch.save(model.state_dict(), f"{output}/model.pt")
        torch.save(optimizer.state_dict(), f"{output}/optimizer.pt")
        print(f"step {batch.step.step} of {batch.step.num_rows} rows")
