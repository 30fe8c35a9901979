"""Migration of configs as users have them: reduced, with the values that each tool gives them.

The expected values are computed by hand from the documentation of the tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nemo_like.algorithms.registry import RUN_CONFIGS
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.config.migrate import Migration, migrate

ROWS = "policy.train_global_batch_size"
LENGTH = "policy.max_total_sequence_length"
NEW = "policy.generation.max_new_tokens"
LR = "policy.optimizer.lr"
KIND = "policy.scheduler.kind"
WARMUP = "policy.scheduler.warmup_steps"
MIN = "policy.scheduler.min_ratio"
DECAY = "policy.scheduler.decay_steps"
PRECISION = "policy.precision"
PROMPTS = "grpo.num_prompts_per_step"
GROUP = "grpo.num_generations_per_prompt"
STEPS = "grpo.max_num_steps"
LOW = "loss_fn.ratio_clip_min"
HIGH = "loss_fn.ratio_clip_max"
KL = "loss_fn.reference_policy_kl_penalty"
KL_IN = "loss_fn.reference_policy_kl_in"
KL_TYPE = "loss_fn.reference_policy_kl_type"
BASELINE = "grpo.advantage.baseline"
NORMALIZE = "grpo.advantage.normalize"


@dataclass(frozen=True)
class Case:
    """Files of a user, of which the first one is migrated, and the training that they describe."""

    tool: str
    job: str
    files: Mapping[str, str]
    expected: Mapping[str, Any]
    """Key here -> its value; None for one that must keep its default."""
    undecided: tuple[str, ...] = ()
    """Keys that only the user knows, because the tool counts otherwise."""
    num_processes: int | None = None
    missing_files: list[str] = field(default_factory=list)


OPEN_R1 = """
model_name_or_path: m
dataset_name: a/math
dataset_config: default
dataset_prompt_column: problem
system_prompt: Think first.
bf16: true
use_vllm: true
gradient_accumulation_steps: 4
learning_rate: 2.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_prompt_length: 512
max_completion_length: 1024
max_steps: -1
num_generations: 16
num_train_epochs: 1
per_device_train_batch_size: 16
reward_funcs: [accuracy, format]
warmup_ratio: 0.1
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 8\n"
DAPO = """
#!/usr/bin/env bash
# Paths of the cluster \\
HOME_DIR=/data
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
actor_ppo_max_token_len=$((max_prompt_length + max_response_length))
loss_agg_mode="token-mean"
train_prompt_bsz=512
train_prompt_mini_bsz=32
n_resp_per_prompt=16
case "$1" in
  --train_batch_size) train_prompt_bsz="$2"; shift ;;
esac
ray job submit --no-wait -- python3 -m verl.trainer.main_ppo \\
    data.train_files="${HOME_DIR}/a.parquet" \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=${max_response_length} \\
    data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \\
    algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    actor_rollout_ref.model.path=m \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \\
    actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode} \\
    trainer.total_training_steps=400 \\
"""
NEMO_RL = """
defaults: [{base}, lab.yaml]
grpo: {{num_prompts_per_step: 64, num_generations_per_prompt: 16, max_num_steps: 300,
  normalize_rewards: true, use_leave_one_out_baseline: true}}
policy: {{model_name: m, train_global_batch_size: 512}}
"""
NEMO_RL_LAB = """
loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, ratio_clip_min: 0.2,
  ratio_clip_max: 0.28}
policy:
  max_total_sequence_length: 4096
  generation: {max_new_tokens: '${policy.max_total_sequence_length}'}
"""
MEGATRON = """
policy:
  precision: bfloat16
  megatron_cfg:
    enabled: true
    optimizer: {lr: 2.0e-6, min_lr: 2.0e-7}
    scheduler: {lr_decay_style: cosine, lr_warmup_iters: 10, lr_decay_iters: 300}
"""
COSINE = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 1000000,
  max_num_epochs: 2, normalize_rewards: true, use_leave_one_out_baseline: false}
policy:
  model_name: m
  precision: bfloat16
  train_global_batch_size: 512
  max_total_sequence_length: 2048
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 3.0e-6}}
  scheduler:
  - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}
  - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 950, eta_min: 3.0e-7}}
  - milestones: [50]
  megatron_cfg: {enabled: false, optimizer: {lr: 1.0, min_lr: 0.5}}
  generation: {max_new_tokens: 1024}
"""
PRIME_TRAINER = """
max_steps = 20
[model]
name = "m"
seq_len = 2048
[optim]
lr = 3e-6
"""
PRIME_ORCHESTRATOR = """
max_steps = 20
seq_len = 2048
batch_size = 128
{group} = 16
[model]
name = "m"
{sampling}
"""
LLAMA_FACTORY = """
model_name_or_path: m
stage: dpo
finetuning_type: lora
lora_target: all
pref_beta: 0.1
dataset: pairs
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
fp16: true
"""
QLORA = """
base_model: m
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 0.0002
warmup_steps: 10
debug:
"""

CASES: dict[str, Case] = {
    "open-r1 GRPO, launched": Case(
        "TRL",
        "grpo",
        {
            "run.sh": "ACCELERATE_LOG_LEVEL=info accelerate launch --config_file configs/zero3.yaml"
            " \\\n    src/grpo.py --config configs/demo.yaml --learning-rate 1e-6\n",
            "configs/zero3.yaml": ACCELERATE,
            "configs/demo.yaml": OPEN_R1,
        },
        # 16 rows x 4 x 8 processes, in groups of 16.
        {ROWS: 512, PROMPTS: 32, GROUP: 16, LR: 1e-6, KIND: "cosine", MIN: 0.1, NEW: 1024}
        | {LENGTH: 1536, PRECISION: "bfloat16", LOW: 0.2, HIGH: 0.2, KL: None}
        | {"data.train_path": "hf://a/math?config=default&split=train"}
        | {"data.columns.prompt": "problem", "data.system_prompt": "Think first."},
        (STEPS, WARMUP),
    ),
    "open-r1 GRPO, without its command": Case(
        "TRL",
        "grpo",
        {"demo.yaml": OPEN_R1},
        {GROUP: 16, LR: 2e-5, KIND: "cosine", MIN: 0.1, NEW: 1024, LENGTH: 1536},
        (ROWS, PROMPTS, STEPS, WARMUP),
    ),
    "open-r1 SFT": Case(
        "TRL",
        "sft",
        {
            "sft.yaml": "model_name_or_path: m\ndataset_name: a/code\ntorch_dtype: bfloat16\n"
            "use_liger_kernel: true\nreport_to: [wandb]\neval_strategy: 'no'\n"
            "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nmax_length: 32768\n"
            "learning_rate: 4.0e-05\nlr_scheduler_type: cosine_with_min_lr\n"
            "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nnum_train_epochs: 10\nwarmup_ratio: 0.03\n"
        },
        {ROWS: 128, LENGTH: 32768, LR: 4e-5, KIND: "cosine", MIN: 0.1, "sft.max_num_epochs": 10}
        | {"sft.max_num_steps": None, PRECISION: "bfloat16"},
        (WARMUP,),
        num_processes=16,
    ),
    "TRL DPO with steps": Case(
        "TRL",
        "dpo",
        {
            "run.sh": "torchrun --nproc_per_node 2 --nnodes=2 trl/scripts/dpo.py --beta 0.05"
            " --dataset_name a/pairs --use_peft --per_device_train_batch_size 2"
            " --gradient_accumulation_steps 8 --max_steps 200 --warmup_ratio 0.1 --max_length 2048"
        },
        # The epochs, 3 by default, do not end the run.
        {ROWS: 64, "dpo.max_num_steps": 200, "dpo.max_num_epochs": 200, WARMUP: 20, LR: 1e-6}
        | {KIND: "linear", "loss_fn.beta": 0.05, LENGTH: 2048, PRECISION: "bfloat16"},
    ),
    "TRL SFT of packed sequences": Case(
        "TRL",
        "sft",
        {
            "run.sh": "trl sft --config sft.yaml",
            "sft.yaml": "model_name_or_path: m\ndataset_name: a/b\nuse_peft: false\npacking: true\n"
            "num_processes: 4\nnum_train_epochs: 0.5\nmax_length: 4096\n"
            "lr_scheduler_type: inverse_sqrt\n",
        },
        {LR: 2e-5, LENGTH: 4096, "sft.max_num_epochs": None},
        (ROWS, "sft.max_num_steps", KIND),
    ),
    "TRL GRPO of several updates": Case(
        "TRL",
        "grpo",
        {
            "run.sh": "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 train_grpo.py"
            " --reward_funcs x --num_generations 8 --generation_batch_size 64 --num_iterations 2"
            " --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_steps 100"
            " --beta 0.04 --fp16 true --lr_scheduler_type warmup_stable_decay"
            " --max_prompt_length 256 --epsilon_high 0.28"
        },
        # 100 updates of 32 rows; 64 rows in two passes are 4 updates of a step.
        {ROWS: 32, PROMPTS: 8, GROUP: 8, STEPS: 25, "grpo.num_epochs_per_rollout": 2, KL: 0.04}
        | {PRECISION: "bfloat16", KIND: "wsd", "policy.scheduler.wsd_decay_shape": "cosine"}
        | {LENGTH: 768, NEW: 512, LOW: 0.2, HIGH: 0.28},
    ),
    "TRL reward model on one device": Case(
        "TRL",
        "rm",
        {
            "run.sh": "CUDA_VISIBLE_DEVICES=0 python trl/scripts/reward.py --dataset_name a/b"
            " --use_peft --bf16 False"
        },
        {ROWS: 8, LR: 1e-4, "rm.max_num_epochs": 3, KIND: "linear", LENGTH: 1024, PRECISION: None},
    ),
    "verl DAPO": Case(
        "verl",
        "grpo",
        {"run.sh": DAPO},
        # verl counts prompts, and schedules in rollouts, of which each has 16 updates.
        {ROWS: 512, PROMPTS: 512, GROUP: 16, STEPS: 400, LENGTH: 22528, NEW: 20480, WARMUP: 160}
        | {LR: 1e-6, LOW: 0.2, HIGH: 0.28, "loss_fn.ratio_clip_c": 10.0, KL: None, KIND: None}
        | {"loss_fn.normalization": "token", PRECISION: "bfloat16"}
        | {"policy.sequence_packing.train_mb_tokens": 22528},
    ),
    "verl simpleRL": Case(
        "verl",
        "grpo",
        {
            "run.sh": "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
            " data.train_batch_size=1024 actor_rollout_ref.rollout.n=8 trainer.total_epochs=20"
            " data.max_response_length=8192 data.max_prompt_length=1024"
            " actor_rollout_ref.actor.optim.lr=5e-7 actor_rollout_ref.actor.use_kl_loss=True"
            " actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.model.path=m"
        },
        {ROWS: 2048, PROMPTS: 1024, GROUP: 8, LENGTH: 9216, NEW: 8192, LR: 5e-7, KL: 0.001}
        | {KL_TYPE: "k3", LOW: 0.2, HIGH: 0.2, BASELINE: "group_mean", NORMALIZE: None},
        (STEPS,),
    ),
    "verl RLOO, with a last line that is continued": Case(
        "verl",
        "grpo",
        {
            "run.sh": "python3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=rloo \\\n"
            "  algorithm.norm_adv_by_std_in_grpo=True data.train_batch_size=256 \\\n"
            "  actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\\n"
            "  actor_rollout_ref.model.path=m trainer.total_epochs=1 \\\n"
        },
        {ROWS: 256, PROMPTS: 256, BASELINE: "leave_one_out", NORMALIZE: "none", LENGTH: 1024},
        (STEPS,),
    ),
    "verl with lists, loops and files of tools": Case(
        "verl",
        "grpo",
        {
            "run.sh": "for x in 1 2; do echo $x; done\nN=2\nN=4\nROLLOUT=(\n"
            "  actor_rollout_ref.rollout.n=$N\n  actor_rollout_ref.model.path=m)\nP=(\n"
            "  trainer.total_training_steps=5\n)\nB=64\n"
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo ${P[@]}"
            " actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
            ' data.train_batch_size=$B "${ROLLOUT[@]}"'
            " actor_rollout_ref.actor.ppo_mini_batch_size=$B"
        },
        {ROWS: 256, PROMPTS: 64, GROUP: 4, STEPS: 5, LR: 1e-6, LENGTH: 1024},
    ),
    "TRL by a launcher of torch": Case(
        "TRL",
        "sft",
        {
            "run.sh": "python -m torch.distributed.launch --nproc_per_node=4 trl/scripts/sft.py"
            " --dataset_name a/b --use_peft --per_device_train_batch_size 2"
        },
        {ROWS: 8, "sft.max_num_epochs": 3},
    ),
    "TRL without a launcher": Case(
        "TRL",
        "sft",
        {"run.sh": "python trl/scripts/sft.py --dataset_name a/b --use_peft --max_length 512"},
        {LENGTH: 512, "sft.max_num_epochs": 3},
        # Every device of the machine has a batch.
        (ROWS,),
    ),
    "Cosmos-RL": Case(
        "Cosmos-RL",
        "grpo",
        {
            "run.toml": "[train]\ntrain_batch_per_replica = 64\n[train.train_policy]\n"
            'type = "grpo"\n[policy]\nmodel_name_or_path = "m"\n[rollout]\nn_generation = 8\n'
        },
        {GROUP: 8, LENGTH: 4096, NEW: 2048, LR: 1e-6, WARMUP: 20},
        # Each replica has a batch.
        (STEPS, PROMPTS, ROWS),
    ),
    "Cosmos-RL on four replicas": Case(
        "Cosmos-RL",
        "grpo",
        {
            "run.toml": "[train]\ntrain_batch_per_replica = 64\n[train.train_policy]\n"
            'type = "grpo"\n[policy]\nmodel_name_or_path = "m"\n[rollout]\nn_generation = 8\n'
        },
        {PROMPTS: 32, ROWS: 256, GROUP: 8, LENGTH: 4096, NEW: 2048, LR: 1e-6, WARMUP: 20},
        (STEPS,),
        num_processes=4,
    ),
    "verl GSPO with a condition": Case(
        "verl",
        "grpo",
        {
            "run.sh": 'LR=1e-6\nif [ "$1" = small ]; then\n  LR=5e-6\nfi\nLEN=$((1024 * $2))\n'
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=reinforce_plus_plus_baseline"
            " actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
            " actor_rollout_ref.actor.optim.lr=$LR data.max_response_length=$LEN"
            " actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.rollout.n=8"
            " actor_rollout_ref.actor.clip_ratio_high=4e-4 actor_rollout_ref.model.path=m"
            " actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
        },
        {"loss_fn.surrogate": "gspo", LOW: 3e-4, HIGH: 4e-4, "loss_fn.normalization": "sequence"}
        | {BASELINE: "group_mean", NORMALIZE: "none", "grpo.advantage.whiten": "tokens"},
        (LR, NEW, LENGTH, STEPS),
    ),
    "verl PPO": Case(
        "verl",
        "grpo",
        {
            "run.sh": "python3 -m verl.trainer.main_ppo data.train_batch_size=64"
            " actor_rollout_ref.model.path=m critic.model.path=m trainer.total_training_steps=9"
            " actor_rollout_ref.actor.ppo_mini_batch_size=64"
        },
        {ROWS: 64, GROUP: 1, STEPS: 9},
        (BASELINE,),
    ),
    "verl SFT": Case(
        "verl",
        "sft",
        {
            "run.sh": "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer"
            " data.train_files=a.parquet data.max_length=2048 optim.lr=1e-4 trainer.total_epochs=2"
            " model.partial_pretrain=m"
        },
        {ROWS: 256, LENGTH: 2048, LR: 1e-4, KIND: "cosine", "sft.max_num_epochs": 2},
        (WARMUP,),
    ),
    "NeMo RL with Megatron": Case(
        "NeMo RL",
        "grpo",
        {
            "run.yaml": NEMO_RL.format(base="base.yaml"),
            "base.yaml": MEGATRON,
            "lab.yaml": NEMO_RL_LAB,
        },
        # Two updates of a step, and a schedule that counts steps.
        {ROWS: 512, PROMPTS: 64, GROUP: 16, STEPS: 300, LR: 2e-6, KIND: "cosine", MIN: 0.1}
        | {WARMUP: 20, DECAY: 600, BASELINE: "leave_one_out", NORMALIZE: "leave_one_out_std"}
        | {LENGTH: 4096, NEW: 4095, KL: 0.01, KL_TYPE: "k3", LOW: 0.2, HIGH: 0.28},
    ),
    "NeMo RL with a base that is not there": Case(
        "NeMo RL",
        "grpo",
        {"run.yaml": NEMO_RL.format(base="gone.yaml"), "lab.yaml": NEMO_RL_LAB},
        {ROWS: 512, PROMPTS: 64, GROUP: 16, STEPS: 300, LENGTH: 4096, KL: 0.01, HIGH: 0.28},
        (LR, PRECISION, KIND),
        missing_files=["gone.yaml"],
    ),
    "NeMo RL with parts of a schedule": Case(
        "NeMo RL",
        "grpo",
        {"run.yaml": COSINE},
        {ROWS: 512, LR: 3e-6, KIND: "cosine", WARMUP: 50, DECAY: 1000, MIN: 0.1, NEW: 1024}
        | {NORMALIZE: "group_std", PRECISION: "bfloat16"},
        (STEPS,),
    ),
    "axolotl QLoRA": Case(
        "axolotl",
        "sft",
        {"qlora.yml": QLORA},
        {LENGTH: 2048, LR: 2e-4, KIND: "cosine", WARMUP: 10, "sft.max_num_epochs": 3}
        | {PRECISION: "bfloat16", "policy.lora.rank": 32, "policy.lora.quantization": "nf4"},
        (ROWS,),
    ),
    "axolotl, launched": Case(
        "axolotl",
        "sft",
        {
            "run.sh": "accelerate launch --num_processes 8 -m axolotl.cli.train full.yml",
            "full.yml": "base_model: m\nlearning_rate: 1.0e-5\nlr_scheduler: constant_with_warmup\n"
            "micro_batch_size: 1\ngradient_accumulation_steps: 8\nmax_steps: 500\nnum_epochs: 3\n"
            "context_parallel_size: 2\ndatasets:\n- {path: a/b, split: train_sft, name: x}\n",
        },
        # 8 processes are 4 pairs; 3 % of the steps are warm-up by default.
        {ROWS: 32, LENGTH: 512, LR: 1e-5, KIND: "constant", WARMUP: 15, "sft.max_num_steps": 500}
        | {"sft.max_num_epochs": 500, PRECISION: "bfloat16"}
        | {"data.train_path": "hf://a/b?config=x&split=train_sft"},
    ),
    "LLaMA-Factory DPO": Case(
        "LLaMA-Factory",
        "dpo",
        {
            "run.sh": "FORCE_TORCHRUN=1 NNODES=1 NPROC_PER_NODE=4 llamafactory-cli train dpo.yaml",
            "dpo.yaml": LLAMA_FACTORY,
        },
        {ROWS: 32, LENGTH: 2048, LR: 5e-6, KIND: "cosine", "dpo.max_num_epochs": 3}
        | {PRECISION: "bfloat16", "loss_fn.beta": 0.1, "policy.lora.rank": 8},
        (WARMUP,),
    ),
    "LLaMA-Factory SFT by flags": Case(
        "LLaMA-Factory",
        "sft",
        {
            "run.sh": "llamafactory-cli train --stage sft --finetuning_type full \\\n"
            "  --template qwen --model_name_or_path m --cutoff_len 4096 --max_steps 500 \\\n"
            "  --warmup_ratio 0.1 --lr_scheduler_type cosine --learning_rate 1e-5"
        },
        {LENGTH: 4096, LR: 1e-5, KIND: "cosine", WARMUP: 50, "sft.max_num_steps": 500}
        | {"sft.max_num_epochs": 500, PRECISION: "bfloat16"},
        (ROWS,),
    ),
    "OpenRLHF REINFORCE++ of earlier names": Case(
        "OpenRLHF",
        "grpo",
        {
            "run.sh": "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data a/b \\\n"
            "  --train_batch_size 128 --rollout_batch_size 64 --n_samples_per_prompt 8 \\\n"
            "  --prompt_max_len 1024 --generate_max_len 7168 --init_kl_coef 0.0 \\\n"
            "  --num_episodes 2 --advantage_estimator reinforce_baseline --bf16 \\\n"
            "  --actor_learning_rate 5e-7"
        },
        {ROWS: 128, PROMPTS: 64, GROUP: 8, LENGTH: 8192, NEW: 7168, LR: 5e-7, KIND: "cosine"}
        | {MIN: 0.1, KL_IN: None, KL_TYPE: None, LOW: 0.2, HIGH: 0.2, BASELINE: "group_mean"}
        | {NORMALIZE: "none", "grpo.advantage.whiten": "tokens", PRECISION: "bfloat16"},
        (STEPS, WARMUP),
    ),
    "OpenRLHF Dr. GRPO": Case(
        "OpenRLHF",
        "grpo",
        {
            "run.sh": "read -r -d '' COMMAND <<EOF\nopenrlhf.cli.train_ppo_ray \\\n"
            "  --actor.model_name_or_path m --data.prompt_dataset a/b --data.max_len 8192 \\\n"
            "  --rollout.n_samples_per_prompt 4 --algo.advantage.estimator dr_grpo \\\n"
            "  --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3\nEOF\n"
            "# it's started here\npython3 -m $COMMAND\n"
        },
        {ROWS: 128, PROMPTS: 1024, LENGTH: 8192, NEW: 8191, KL: 1e-3, KL_IN: "loss", KL_TYPE: "k3"}
        | {BASELINE: "group_mean", NORMALIZE: "none", LR: 1e-6},
        (STEPS, WARMUP),
    ),
    "prime-rl RL of two files": Case(
        "prime-rl",
        "grpo",
        {
            "run.sh": "uv run rl --trainer @ train.toml --orchestrator @ orch.toml",
            "train.toml": PRIME_TRAINER,
            "orch.toml": PRIME_ORCHESTRATOR.format(
                group="group_size", sampling="[train.sampling]\nmax_completion_tokens = 128"
            ),
        },
        {ROWS: 128, PROMPTS: 8, GROUP: 16, STEPS: 20, LENGTH: 2048, NEW: 128, LR: 3e-6}
        | {PRECISION: "bfloat16", KIND: None},
    ),
    "prime-rl orchestrator": Case(
        "prime-rl",
        "grpo",
        {
            "orch.toml": PRIME_ORCHESTRATOR.format(
                group="rollouts_per_example",
                sampling="[sampling]\nmax_tokens = 64\n[[env]]\nid='x'",
            )
        },
        {ROWS: 128, PROMPTS: 8, GROUP: 16, STEPS: 20, LENGTH: 2048, NEW: 64},
        (LR, KIND, PRECISION),
        missing_files=["the file of the trainer of prime-rl"],
    ),
    "prime-rl trainer": Case(
        "prime-rl",
        "grpo",
        {"train.toml": PRIME_TRAINER},
        {STEPS: 20, LENGTH: 2048, LR: 3e-6},
        (ROWS, PROMPTS, GROUP, NEW, KIND, PRECISION),
        missing_files=["the file of the orchestrator of prime-rl"],
    ),
    "prime-rl SFT": Case(
        "prime-rl",
        "sft",
        {
            "sft.toml": '[model]\nname = "m"\n[data]\nname = "a/b"\nseq_len = 4096\n'
            "batch_size = 32\n[optim]\nlr = 2e-5\n"
        },
        {LENGTH: 4096, LR: 2e-5, PRECISION: "bfloat16"},
        (ROWS, "sft.max_num_steps"),
    ),
}


def migrated(files: Mapping[str, str], folder: Path, num_processes: int | None = None) -> Migration:
    """The result for the first of the files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return migrate(RUN_CONFIGS, folder / next(iter(files)), num_processes=num_processes)


@pytest.mark.parametrize("name", CASES)
def test_a_config_of_a_user_keeps_its_training(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    result = migrated(case.files, tmp_path, case.num_processes)
    assert (result.tool.name, result.job.kind) == (case.tool, case.job)
    assert [one.path for one in result.unknown] == []
    for key, value in case.expected.items():
        found = result.values.get(key)
        assert found == pytest.approx(value) if isinstance(value, float) else found == value, key
    for key in case.undecided:
        assert key in result.missing and key not in result.values, key
        assert result.reasons[key], key
    # Nothing else that the tool decides is left to the user.
    assert {key for key in result.missing if key in result.reasons} == set(case.undecided)
    assert [Path(file).name for file in result.missing_files] == case.missing_files


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "run.sh",
            "swift rlhf --rlhf_type grpo --beta 0.04 --external_plugins a/reward_plugin.py --x 1",
            "config of ms-swift, which",
        ),
        ("run.yaml", "rlhf_type: grpo\ntuner_type: lora\nmodel: m\n", "config of ms-swift, which"),
        ("run.sh", "tune run lora_finetune_single_device --config llama3/8B", "torchtune, which"),
        (
            "run.yaml",
            "model: {_component_: torchtune.models.a}\ntokenizer: {_component_: b}\nepochs: 1\n",
            "config of torchtune, which",
        ),
        ("run.sh", 'python3 -m verl.trainer.main_ppo data.a="b\nc=1\n', "begins in .* has no end"),
        (
            "run.sh",
            "accelerate launch grpo.py --config recipes/gone.yaml",
            "gone.yaml, which is not",
        ),
        ("run.sh", "python tool.py --plugin a_reward.py --depth 3", "of no known tool"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        migrated({name: text}, tmp_path)


def test_the_report_names_missing_files_first_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = CASES["NeMo RL with a base that is not there"].files
    migrated(files, tmp_path)
    assert main(["migrate", str(tmp_path / "run.yaml")]) == 0
    output = capsys.readouterr()
    assert "Not found" in output.err.splitlines()[1]
    assert "gone.yaml" in output.err.splitlines()[2]
    path = tmp_path / "demo.yaml"
    path.write_text(OPEN_R1)
    assert main(["migrate", str(path), "--num-processes", "2"]) == 0
    output = capsys.readouterr()
    assert "train_global_batch_size: 128 " in output.out
    steps = "grpo.max_num_steps: num_train_epochs is 1: 1 x the rows of the data / 8"
    assert steps in output.err and steps in output.out
    assert "reward_funcs: rewards are Python functions" in output.err
    # Notes about other values and jobs.
    assert "What differs" not in output.err
