# A command of TRL.
accelerate launch --config_file zero3.yaml --num_processes 8 \
    trl/scripts/sft.py \
    --model_name_or_path models/small \
    --dataset_name room/chats \
    --packing --use_peft --lora_r 32 --lora_alpha 16 \
    --lora_target_modules "q_proj", "v_proj" \
    --eos_token '<|im_end|>' \
    --max_steps=-1 \
    --eval_strategy steps --eval_steps 100 \
    --output_dir small-sft > log.txt
