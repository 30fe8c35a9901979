#!/bin/bash
# A script with the arguments of verl's GRPO.
set -x
export VLLM_USE_V1=1
DATA=data/sums
train_files="['$DATA/a.parquet', '$DATA/b.parquet']"
ROLLOUT=(
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.tensor_model_parallel_size=2  # more than one GPU
)
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=${VALIDATION:-data/val.parquet} \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=models/small \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=$NUM_NODES \
    trainer.save_freq=20 \
    trainer.total_epochs=15 \
    +trainer.new_key=1 "${ROLLOUT[@]}" $@
