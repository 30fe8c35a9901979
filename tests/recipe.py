"""Configs of tiny runs on the demo's task: in this process, in seconds.

The check that compares the model with transformers is off; tests/training/test_parity_check.py has
it.
"""

from __future__ import annotations

from pathlib import Path

from nemo_like.algorithms.distillation.config import DistillRunConfig
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.preferences.config import DpoRunConfig, RewardModelRunConfig
from nemo_like.algorithms.registry import load_config
from nemo_like.algorithms.sft.config import SftRunConfig


class Recipe:
    """Writes a YAML and loads it, with any overrides."""

    def __init__(self, demo: Path, folder: Path) -> None:
        self.demo = demo
        self.folder = folder

    def common(self) -> str:
        return f"""
output_dir: {self.folder}
policy:
  model_name: {self.demo}/model
  train_global_batch_size: 16
  max_total_sequence_length: 96
  sequence_packing: {{enabled: true, train_mb_tokens: 256, logprob_mb_tokens: 512}}
  optimizer: {{lr: 1.0e-3}}
  scheduler: {{kind: cosine, warmup_steps: 2}}
  generation: {{max_new_tokens: 24}}
  parity_check: false
cluster: {{backend: local}}
checkpointing: {{save_period: 2}}
"""

    def sft(self, *overrides: str) -> SftRunConfig:
        """Four steps of SFT."""
        text = f"""
run_name: sft
sft: {{max_num_steps: 4, val_period: 2, val_at_start: true}}
data:
  train_path: {self.demo}/sft_train.jsonl
  validation_path: {self.demo}/validation.jsonl
  max_validation_rows: 20
"""
        return load_config(SftRunConfig, self._write("sft.yaml", text), list(overrides))

    def grpo(self, *overrides: str) -> GrpoRunConfig:
        """Three steps of GRPO, two updates each, with a KL and a reward that is never flat."""
        text = f"""
run_name: grpo
grpo: {{max_num_steps: 4, num_prompts_per_step: 8, num_generations_per_prompt: 4, val_period: 2}}
loss_fn: {{reference_policy_kl_penalty: 0.01}}
data:
  train_path: {self.demo}/grpo_train.jsonl
  validation_path: {self.demo}/validation.jsonl
  max_validation_rows: 8
reward:
  functions:
    digits: {{path: tests.algorithms.rewards.digit_share}}
"""
        return load_config(GrpoRunConfig, self._write("grpo.yaml", text), list(overrides))

    def dpo(self, *overrides: str) -> DpoRunConfig:
        """Four steps of DPO with eight pairs each."""
        text = f"""
run_name: dpo
dpo: {{max_num_steps: 4, val_period: 2, val_at_start: true}}
data:
  train_path: {self.demo}/dpo_train.jsonl
  validation_path: {self.demo}/dpo_validation.jsonl
  max_validation_rows: 12
"""
        options = ["policy.train_global_batch_size=8", *overrides]
        return load_config(DpoRunConfig, self._write("dpo.yaml", text), options)

    def distill(self, *overrides: str) -> DistillRunConfig:
        """Four steps of distillation; a teacher must be given."""
        text = f"""
run_name: distill
distill: {{max_num_steps: 4, val_period: 2, val_at_start: true}}
data:
  train_path: {self.demo}/sft_train.jsonl
  validation_path: {self.demo}/validation.jsonl
  max_validation_rows: 20
"""
        return load_config(DistillRunConfig, self._write("distill.yaml", text), list(overrides))

    def rm(self, *overrides: str) -> RewardModelRunConfig:
        """Four steps of a reward model with eight pairs each."""
        text = f"""
run_name: rm
rm: {{max_num_steps: 4, val_period: 2, val_at_start: true, center_coefficient: 0.01}}
data:
  train_path: {self.demo}/dpo_train.jsonl
  validation_path: {self.demo}/dpo_validation.jsonl
  max_validation_rows: 12
"""
        options = ["policy.train_global_batch_size=8", *overrides]
        return load_config(RewardModelRunConfig, self._write("rm.yaml", text), options)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(self.common() + text)
        return path
