"""The Trainer of transformers: examples/library/hf_trainer.py MODEL ROWS.jsonl OUTPUT [--resume].

`# changed` marks what a token budget needs. torchrun starts it on several ranks.
"""

import sys

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)

from nemo_like.torch_data.hf_trainer import OnlineBatchesMixin


class TokenBudgetTrainer(OnlineBatchesMixin, Trainer):  # changed
    """A Trainer whose microbatches have a number of tokens, not of rows."""


model_path, rows, output = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(model_path)
dataset = load_dataset("json", data_files=rows, split="train").map(
    lambda row: (ids := tokenizer(row["text"]).input_ids) and {"input_ids": ids, "labels": ids},
    remove_columns=["text"],
)
arguments = TrainingArguments(
    output, gradient_accumulation_steps=2, save_steps=2, logging_steps=1, report_to=[]
)
trainer = TokenBudgetTrainer(  # changed
    AutoModelForCausalLM.from_pretrained(model_path),
    arguments,
    train_dataset=dataset,
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    max_tokens=256,  # changed
)
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
