"""SFTTrainer of TRL: python examples/library/trl_sft.py MODEL ROWS.jsonl OUTPUT [--resume].

`# changed` marks what a token budget needs. torchrun starts it on several ranks.
"""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from nemo_like.torch_data.hf_trainer import OnlineBatchesMixin


class TokenBudgetSFTTrainer(OnlineBatchesMixin, SFTTrainer):  # changed
    """An SFTTrainer whose microbatches have a number of tokens, not of rows."""


model_path, rows, output = sys.argv[1:4]
arguments = SFTConfig(
    output, gradient_accumulation_steps=2, save_steps=2, logging_steps=1, report_to=[], bf16=False
)
trainer = TokenBudgetSFTTrainer(  # changed
    model_path,
    arguments,
    train_dataset=load_dataset("json", data_files=rows, split="train"),
    max_tokens=256,  # changed
)
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
