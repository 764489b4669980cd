"""Megatron-core's GPT model fed with packed micro-batches, with the vocabulary padded for tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_aha.attention.packed import PackedBatch
from megatron_aha.attention.rope import inverse_frequencies
from megatron_aha.attention.spec import decoder_spec
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Returns the smallest number of rows that tensor-parallel ranks can share evenly."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


class AHAGPTModel(GPTModel):
    """A decoder of one pipeline stage, or one chunk of it under interleaved stages.

    Args:
        config: Megatron-core's configuration.
        model: sizes of the decoder.
        aha: the attention variant.
        chunk: number of the chunk under interleaved stages, else None.
    """

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, aha: AHAConfig, chunk: int | None = None
    ) -> None:
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_spec(config, model, aha, chunk),
            vocab_size=padded_vocab_size(model.vocab_size, tp_size),
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(model.rope_theta),
            vp_stage=chunk,
        )
        self.model_config = model
        self.aha_config = aha
        # Megatron-core's own llama3 scaling fixes all constants but one; ours take them from the model.
        self.rotary_pos_emb.inv_freq = inverse_frequencies(model, model.rope_scaling).to(
            self.rotary_pos_emb.inv_freq.device
        )
        _mark_parallel_parameters(self)
        if self.pre_process and model.traits.scaled_embeddings:
            self.embedding.register_forward_hook(_scale_embeddings)
        if self.pre_process and config.recompute_granularity == "full":
            self.embedding.register_forward_hook(_join_the_graph)

    def forward(self, tokens: Tensor, batch: PackedBatch, labels: Tensor | None = None) -> Tensor:
        """Returns this stage's output.

        Args:
            tokens: int64 ``[tokens]``.
            batch: the micro-batch as the layers see it.
            labels: int64 ``[tokens]``.

        Returns:
            On the last stage the loss per token, fp32 ``[tokens]``, or without labels this rank's share of the
            logits ``[tokens, padded vocab / tensor-parallel size]``; on other stages hidden states
            ``[tokens, 1, hidden]`` (a share of the tokens under sequence parallelism).
        """
        output = super().forward(
            tokens.unsqueeze(0),
            batch.position_ids.unsqueeze(0),
            None,
            labels=None if labels is None else labels.unsqueeze(0),
            packed_seq_params=batch,
        )
        return output.squeeze(0) if self.post_process else output

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Returns the cross-entropy ``[1, tokens]``; rows that only pad the vocabulary get no probability."""
        return super().compute_language_model_loss(labels, self._mask_padding(logits))

    def logits(self, tokens: Tensor, batch: PackedBatch) -> Tensor:
        """Returns the logits of every token, fp32 ``[tokens, vocab]``, gathered over the tensor-parallel ranks.

        For tools and tests; it needs the model in one pipeline stage.
        """
        with torch.no_grad():
            local = self(tokens, batch)
            return gather_from_tensor_model_parallel_region(local)[:, : self.model_config.vocab_size].float()

    def _mask_padding(self, logits: Tensor) -> Tensor:
        """Returns ``[tokens, 1, local vocab]`` with the padding columns at the lowest value."""
        columns = logits.size(-1)
        first = columns * parallel_state.get_tensor_model_parallel_rank()
        real = min(max(self.model_config.vocab_size - first, 0), columns)
        if real == columns:
            return logits
        padding: Any = torch.arange(columns, device=logits.device) >= real
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def _scale_embeddings(module: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Multiplies by the square root of the width, rounded to the type of the weights, as transformers does."""
    return output * torch.tensor(output.size(-1) ** 0.5).to(output)


def _join_the_graph(module: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Makes frozen embeddings part of the graph: a recomputed layer trains only behind an input with a gradient."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _mark_parallel_parameters(model: AHAGPTModel) -> None:
    """Says of each weight how tensor-parallel ranks share it.

    Older Megatron-core does so only when it initialises the weights itself, and none says that SwiGLU's two halves
    are split one by one; DeepSpeed's gradient norm and our checkpoints read it.
    """
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        if module.weight is not None:
            module.weight.tensor_model_parallel = True
            module.weight.partition_dim = dim
            module.weight.partition_stride = 2 if name.endswith("mlp.linear_fc1") else 1
        if dim == 0 and getattr(module, "bias", None) is not None:
            module.bias.tensor_model_parallel = True
            module.bias.partition_dim = 0
            module.bias.partition_stride = 1
