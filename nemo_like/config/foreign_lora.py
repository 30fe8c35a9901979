"""Keys of TRL, verl, NeMo RL and Cosmos-RL for LoRA adapters."""

from __future__ import annotations

from nemo_like.config.foreign_entries import Entry, obsolete, to, unsupported

_LORA = "policy.lora"
_SWITCH = "together with policy.lora.enabled: true"
_ON = {"true": "true", "false": None}
_ALL_LINEAR = {"all-linear": "[all-linear]", "*": "*"}

_NO_DROPOUT = "adapters have no dropout: the log-probs of one policy must agree between two passes"
_NO_DORA = "adapters are those of LoRA, not of DoRA"
_ONLY_NF4 = (
    "frozen weights are stored in policy.precision, or as nf4: 4 bits per value, with a float32"
    " scale per 64 values"
)
_ADAPTERS_ONLY = (
    "only adapters of linear layers are trained, and no weights beside them but the score head of a"
    " reward model"
)
_SCORE_HEAD = ("['score']",)
_NAMED_LAYERS = "name the layers in policy.lora.target_modules"
_INITIAL = "A is uniform in +-1/sqrt(inputs) and B is 0, as in PEFT, or both are read from a file"
_FUSED = (
    "policy.lora.target_modules has the names of Hugging Face layers: q_proj, k_proj and v_proj for"
    " linear_qkv, o_proj for linear_proj, gate_proj and up_proj for linear_fc1, down_proj for"
    " linear_fc2"
)

TRL_LORA: dict[str, Entry] = {
    "use_peft": to(f"{_LORA}.enabled", values=_ON),
    "lora_r": to(f"{_LORA}.rank", switch="use_peft"),
    "lora_alpha": to(f"{_LORA}.alpha", switch="use_peft"),
    "lora_target_modules": to(f"{_LORA}.target_modules", values=_ALL_LINEAR, switch="use_peft"),
    "use_rslora": to(f"{_LORA}.use_rslora", switch="use_peft"),
    "peft_config.r": to(f"{_LORA}.rank", note=_SWITCH),
    "peft_config.lora_alpha": to(f"{_LORA}.alpha"),
    "peft_config.target_modules": to(f"{_LORA}.target_modules", values=_ALL_LINEAR),
    "peft_config.use_rslora": to(f"{_LORA}.use_rslora"),
    **unsupported(_NO_DROPOUT, "lora_dropout", "peft_config.lora_dropout", off=("0",)),
    **unsupported(_NO_DORA, "use_dora", "peft_config.use_dora"),
    "load_in_4bit": to(
        f"{_LORA}.quantization", values={"true": "nf4", "false": None}, switch="use_peft"
    ),
    **unsupported(_ONLY_NF4, "load_in_8bit", "use_bnb_nested_quant"),
    # Without `load_in_4bit` it has no effect, and NF4 is its default.
    **unsupported(_ONLY_NF4, "bnb_4bit_quant_type", off=("nf4",)),
    **unsupported(
        _ADAPTERS_ONLY, "lora_modules_to_save", "peft_config.modules_to_save", off=_SCORE_HEAD
    ),
    **unsupported(_ADAPTERS_ONLY, "lora_target_parameters", "peft_config.target_parameters"),
    **unsupported(_ADAPTERS_ONLY, "peft_config.bias", off=("none",)),
    **unsupported(_INITIAL, "peft_config.init_lora_weights", off=("true",)),
    **unsupported("LoRA is the only kind of adapter", "peft_config.peft_type", off=("lora",)),
    # Dtypes of storage and products, which follow from policy.precision.
    **obsolete(
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
        "lora_task_type",
        "peft_config.inference_mode",
        "peft_config.task_type",
    ),
    **unsupported("this setting of the adapters has no counterpart", "peft_config"),
}

NEMO_RL_LORA: dict[str, Entry] = {
    "policy.dtensor_cfg.lora_cfg.enabled": to(f"{_LORA}.enabled", values=_ON),
    "policy.dtensor_cfg.lora_cfg.dim": to(f"{_LORA}.rank"),
    "policy.dtensor_cfg.lora_cfg.alpha": to(f"{_LORA}.alpha"),
    "policy.dtensor_cfg.lora_cfg.target_modules": to(
        f"{_LORA}.target_modules",
        note="without the patterns of names",
        # Then the list has no effect.
        unless="policy.dtensor_cfg.lora_cfg.match_all_linear",
    ),
    # All linear layers are the default.
    **unsupported(_NAMED_LAYERS, "policy.dtensor_cfg.lora_cfg.match_all_linear", off=("true",)),
    **unsupported(_NO_DORA, "policy.dtensor_cfg.lora_cfg.use_dora"),
    "policy.megatron_cfg.peft.enabled": to(f"{_LORA}.enabled", values=_ON),
    "policy.megatron_cfg.peft.dim": to(f"{_LORA}.rank"),
    "policy.megatron_cfg.peft.alpha": to(f"{_LORA}.alpha"),
    **unsupported(_FUSED, "policy.megatron_cfg.peft.target_modules"),
}
for _section in ("policy.dtensor_cfg.lora_cfg", "policy.megatron_cfg.peft"):
    NEMO_RL_LORA |= {
        **unsupported(_NAMED_LAYERS, f"{_section}.exclude_modules"),
        **unsupported(_NO_DROPOUT, f"{_section}.dropout", off=("0",)),
        **unsupported("adapters are trained in float32", f"{_section}.lora_dtype"),
        # Without dropout and with the products of torch they have no effect.
        **obsolete(
            f"{_section}.a2a_experimental", f"{_section}.dropout_position", f"{_section}.use_triton"
        ),
        **unsupported(
            _INITIAL,
            f"{_section}.lora_A_init",
            f"{_section}.lora_A_init_method",
            f"{_section}.lora_B_init_method",
            off=("xavier", "uniform", "zero"),
        ),
        **unsupported("this setting of the adapters has no counterpart", _section),
    }

COSMOS_RL_LORA: dict[str, Entry] = {
    "policy.lora.r": to(f"{_LORA}.rank", note=_SWITCH),
    "policy.lora.lora_alpha": to(f"{_LORA}.alpha"),
    **unsupported(_NO_DROPOUT, "policy.lora.lora_dropout", off=("0",)),
    **unsupported(_ADAPTERS_ONLY, "policy.lora.modules_to_save"),
    **unsupported(_INITIAL, "policy.lora.init_lora_weights", off=("true",)),
}


def verl_lora(prefix: str) -> dict[str, Entry]:
    """Return the entries of the LoRA keys of verl's section `prefix` of the model."""
    switch = f"{prefix}.lora_rank"
    section = f"{prefix}.lora"
    return {
        switch: to(f"{_LORA}.rank", values={"0": None, "*": "*"}, note=_SWITCH),
        f"{prefix}.lora_alpha": to(f"{_LORA}.alpha", switch=switch),
        f"{prefix}.target_modules": to(
            f"{_LORA}.target_modules", values=_ALL_LINEAR, switch=switch
        ),
        f"{prefix}.lora_adapter_path": to(f"{_LORA}.adapter_path"),
        **unsupported(_NAMED_LAYERS, f"{prefix}.exclude_modules"),
        **unsupported(_ADAPTERS_ONLY, f"{prefix}.target_parameters"),
        f"{section}.rank": to(f"{_LORA}.rank", values={"0": None, "*": "*"}, note=_SWITCH),
        f"{section}.alpha": to(f"{_LORA}.alpha", switch=f"{section}.rank"),
        f"{section}.adapter_path": to(f"{_LORA}.adapter_path"),
        **unsupported(_NO_DORA, f"{section}.type", off=("lora",)),
        **unsupported(_FUSED, f"{section}.target_modules"),
        **unsupported(_NAMED_LAYERS, f"{section}.exclude_modules"),
        **unsupported(_NO_DROPOUT, f"{section}.dropout", off=("0",)),
        f"{section}.merge": to(
            f"{_LORA}.weight_sync",
            values={"true": "merged", "false": "adapter"},
            switch=f"{section}.rank",
        ),
        **obsolete(f"{section}.dropout_position"),
        **unsupported("this setting of the adapters has no counterpart", section),
    }
