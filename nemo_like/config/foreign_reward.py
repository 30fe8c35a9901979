"""Keys of reward models in the configs of NeMo RL, verl and TRL."""

from __future__ import annotations

from nemo_like.config.foreign_entries import DTYPES, Entry, obsolete, to, unsupported

_MODEL = "reward.models.model"
_NAME = "`model` is a name of your choice"
_PACKED = "conversations are packed: reward.models.NAME.mb_tokens limits the tokens of a microbatch"
_WORKERS = "reward.models.NAME.num_workers is the number of workers of a reward model"
_ENV = "env.reward_model"
_VERL = "reward_model"

NEMO_RL_REWARD: dict[str, Entry] = {
    f"{_ENV}.model_name": to(f"{_MODEL}.model_name", note=_NAME),
    f"{_ENV}.tokenizer.name": to(
        f"{_MODEL}.tokenizer_name", values={"${env.reward_model.model_name}": None, "*": "*"}
    ),
    f"{_ENV}.precision": to(f"{_MODEL}.precision", values=DTYPES),
    f"{_ENV}.max_model_len": to(f"{_MODEL}.max_length"),
    **unsupported(
        "the score head is a linear layer with one output",
        f"{_ENV}.reward_model_type",
        f"{_ENV}.reward_model_cfg.reward_model_type",
        off=("bradley_terry",),
    ),
    **obsolete(f"{_ENV}.enabled", f"{_ENV}.reward_model_cfg.enabled", f"{_ENV}.dtensor_cfg"),
    **unsupported(_PACKED, f"{_ENV}.batch_size", f"{_ENV}.logprob_batch_size"),
    **unsupported(_WORKERS, f"{_ENV}.resources"),
    **unsupported("this setting of the reward model has no counterpart", _ENV),
}

VERL_REWARD: dict[str, Entry] = {
    f"{_VERL}.model.path": to(f"{_MODEL}.model_name", note=_NAME),
    f"{_VERL}.max_length": to(f"{_MODEL}.max_length"),
    f"{_VERL}.forward_max_token_len_per_gpu": to(f"{_MODEL}.mb_tokens"),
    # The conversation is always encoded with the reward model's tokenizer.
    **obsolete(
        f"{_VERL}.enable",
        f"{_VERL}.model.input_tokenizer",
        f"{_VERL}.model.use_remove_padding",
        f"{_VERL}.strategy",
        f"{_VERL}.use_dynamic_bsz",
        f"{_VERL}.launch_reward_fn_async",
    ),
    **unsupported(_PACKED, f"{_VERL}.micro_batch_size", f"{_VERL}.micro_batch_size_per_gpu"),
    **unsupported(
        _WORKERS,
        f"{_VERL}.enable_resource_pool",
        f"{_VERL}.n_gpus_per_node",
        f"{_VERL}.nnodes",
        off=("false", "0"),
    ),
}

TRL_REWARD: dict[str, Entry] = {"reward_model_name_or_path": to(f"{_MODEL}.model_name", note=_NAME)}
