read -r -d '' training_commands <<END
openrlhf.cli.train_sft \
   --data.dataset data/chats.jsonl \
   --data.input_key question --data.output_key response \
   --data.max_len 2048 --train.batch_size 256 --train.micro_batch_size 2 \
   --model.model_name_or_path models/small --adam.lr 5e-6 \
   --ds.packing_samples --model.gradient_checkpointing_enable
END
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
