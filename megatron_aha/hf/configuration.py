"""Hugging Face configurations: theirs to ours, refusing what our model does not compute, and back."""

from __future__ import annotations

from typing import Any

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.errors import UserError, nearest
from megatron_aha.hf.families import FAMILIES, HFFamily
from megatron_aha.hf.rope import read_rope, read_windowed_theta, write_rope, write_rope_parameters

_BY_ARCHITECTURE: dict[str, HFFamily] = {
    name: family for family in FAMILIES.values() for name in (family.dense, family.aha)
}

# Options of a source that would change the computation, with the values that do not.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "clip_qkv": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None, 0),
    "aha_frozen_routers": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}

# Why some well-known architectures cannot be converted, by the beginning of their names.
_MISSING_PARTS = {
    "GptOss": "it has attention sinks and a mixture of experts",
    "Mixtral": "it is a mixture of experts",
    "Qwen2Moe": "it is a mixture of experts",
    "Qwen3Moe": "it is a mixture of experts",
    "OlmoE": "it is a mixture of experts",
    "Llama4": "it is a mixture of experts with chunked attention",
    "DeepseekV2": "it has multi-head latent attention and a mixture of experts",
    "DeepseekV3": "it has multi-head latent attention and a mixture of experts",
    "MiniCPM3": "it has multi-head latent attention",
    "Gemma3ForConditionalGeneration": "it reads images; save its text model alone, which "
    "transformers.Gemma3ForCausalLM.from_pretrained loads, and import that",
    "Gemma2": "it caps attention scores and logits",
    "Gemma": "of the Gemma models only the text models of Gemma 3 are built",
    "SmolLM3": "it has layers without rotary positions",
}

# What is carried from the source's configuration to the exported one.
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp")


def read_config(config: dict[str, Any]) -> tuple[ModelConfig, AHAConfig | None]:
    """Returns the model's sizes, and its attention variant when the source has routers.

    Raises:
        UserError: the architecture or an option is not supported, or a size is missing; nothing was read yet.
    """
    architecture = check_architecture(config)
    family = _BY_ARCHITECTURE[architecture]
    config = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    for option, allowed in {**_REFUSED, **family.allowed}.items():
        if config.get(option) not in allowed:
            raise UserError(f"the source's {option} = {config[option]!r} is not supported for {architecture}")

    def size(key: str) -> int:
        if not isinstance(config.get(key), int):
            raise UserError(f"the source's config.json gives no {key}, found {config.get(key)!r}")
        return int(config[key])

    heads = size("num_attention_heads")
    theta, scaling = read_rope(config, family.windowed_base)
    window, layers = family.windows(config, size("num_hidden_layers"))
    windowed_theta = read_windowed_theta(config) if family.windowed_base and layers else theta
    model = ModelConfig(
        family=family.name,
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        ffn_hidden_size=size("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or size("hidden_size") // heads,
        vocab_size=size("vocab_size"),
        max_position_embeddings=size("max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        windowed_rope_theta=None if windowed_theta == theta else windowed_theta,
        query_pre_attn_scalar=family.score_divisor(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        init_std=float(config.get("initializer_range", 0.02)),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        static_window=window,
        windowed_layers=layers,
    )
    if architecture != family.aha:
        return model, None
    return model, AHAConfig(
        window=config["aha_window"],
        num_sink_tokens=config["aha_num_sink_tokens"],
        granularity=config["aha_granularity"],
        bias=config["aha_bias"],
        loss_coefficient=config["aha_loss_coefficient"],
    )


def check_architecture(config: dict[str, Any]) -> str:
    """Returns the source's architecture. Raises UserError when it is not one of ours, or not named."""
    named = config.get("architectures") or []
    architecture = str(named[0]) if named else ""
    if architecture not in _BY_ARCHITECTURE:
        name = architecture or str(config.get("model_type", "unknown"))
        why = next((why for start, why in _MISSING_PARTS.items() if name.startswith(start)), None)
        raise UserError(
            f"architecture '{name}' is not supported{f', because {why}' if why else ''}; "
            f"supported are {', '.join(_BY_ARCHITECTURE)}{nearest(architecture, _BY_ARCHITECTURE)}"
        )
    return architecture


def write_config(
    model: ModelConfig, aha: AHAConfig | None, dtype: str, source: dict[str, Any]
) -> dict[str, Any]:
    """Returns the content of ``config.json`` for transformers 4.57 and 5.

    Args:
        model: sizes of the decoder.
        aha: the attention variant, or None for a dense model.
        dtype: of the weights, ``bfloat16``.
        source: the configuration the model was imported from, for token ids; empty when there was none.
    """
    family = FAMILIES[model.family]
    routed = aha is not None and aha.enabled
    # transformers' own defaults for the ids would name tokens that the model may not have
    ids = {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    rope = write_rope_parameters if routed else write_rope
    windowed_theta = model.windowed_rope_theta or model.rope_theta if family.windowed_base else None
    config: dict[str, Any] = {
        **ids,
        **{key: source[key] for key in _CARRIED if key in source},
        "architectures": [family.aha if routed else family.dense],
        "model_type": f"{family.name}_aha" if routed else family.name,
        "dtype": dtype,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        **rope(model.rope_theta, model.rope_scaling, family.rope_by_layer_type, windowed_theta),
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "mlp_bias": False,
        **family.entries(model),
    }
    if routed and aha is not None:
        code = f"{family.name}_aha"
        config |= {
            "auto_map": {
                "AutoConfig": f"configuration_{code}.{family.prefix}AHAConfig",
                "AutoModel": f"modeling_{code}.{family.prefix}AHAModel",
                "AutoModelForCausalLM": f"modeling_{code}.{family.aha}",
            },
            "aha_window": aha.window,
            "aha_num_sink_tokens": aha.num_sink_tokens,
            "aha_granularity": aha.granularity,
            "aha_bias": aha.bias,
            "aha_loss_coefficient": aha.loss_coefficient,
        }
    return config
