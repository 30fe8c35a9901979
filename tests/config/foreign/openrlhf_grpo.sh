# A script with the arguments of OpenRLHF.
MODEL="models/small"
WORK=$(cd "$(dirname "$0")" && pwd)
ARGS=(
   --actor.model_name_or_path ${MODEL}
   # --reward.model_name_or_path other
   --reward.remote_url rewards/answer.py
   --algo.advantage.estimator group_norm
)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   ${ARGS[@]} \
   --actor.num_gpus_per_node 8 \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 \
   --train.batch_size 128 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \
   --train.colocate_all --ds.packing_samples \
   --actor.eps_clip 0.4 --actor.eps_clip_low_high 0.2 0.27 \
   --actor.adam.lr 5e-7 --algo.kl.init_coef 1e-3 \
   --data.prompt_dataset room/prompts --data.max_len 2048 \
   --ds.zero_stage 3 --ds.lora.rank 16 --ds.lora.alpha 32
