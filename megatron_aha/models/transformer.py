"""Every family in Megatron-core's terms: RMSNorm, RoPE, GQA, a gated MLP, and what the family adds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.activations import fast_gelu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megatron_aha.config.model import ModelConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": fast_gelu}


def transformer_config(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig
) -> TransformerConfig:
    """Returns Megatron-core's configuration of a model.

    Weights are never initialised by Megatron-core: ours are the same in every layout
    (``megatron_aha.checkpoint.initial``) or come from a checkpoint.
    """
    dtype = DTYPES[training.precision]
    recompute = training.recompute
    interleaved = parallel.virtual_pipeline_stages > 1
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        layernorm_epsilon=model.rms_norm_eps,
        normalization="RMSNorm",
        # read by our norms; Megatron-core's own refuse it without Transformer Engine or Apex
        layernorm_zero_centered_gamma=model.traits.zero_centred_norms,
        add_bias_linear=False,
        add_qkv_bias=model.traits.qkv_bias,
        qk_layernorm=model.traits.qk_norm != "none",
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[model.traits.activation],
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        softmax_scale=model.softmax_scale,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_stages if interleaved else None,
        # Interleaved chunks with batched messages train silently to other numbers.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        recompute_granularity=None if recompute == "none" else recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        # Losses arrive normalised by the step's tokens; the schedules must not divide them again.
        calculate_per_token_loss=True,
        deterministic_mode=False,
    )
