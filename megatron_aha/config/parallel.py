"""How the model and the batch are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """Parallel layout. The data-parallel size is what remains: world size / (tensor x pipeline x context).

    Args:
        tensor_model_parallel_size: ranks that share every layer's heads and FFN.
        pipeline_model_parallel_size: ranks that share the layers.
        virtual_pipeline_stages: chunks of layers that each pipeline rank holds in turn (interleaved schedule): smaller
            bubbles, more messages. 1 is the plain 1F1B schedule.
        context_parallel_size: ranks that share each sequence.
        sequence_parallel: split the tokens of norms and dropout over the tensor-parallel ranks.
        nodes: nodes the run must have; the launcher's own count is checked against it. None: do not check.
        ranks_per_node: ranks each node must have. None: do not check.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_stages: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    nodes: int | None = None
    ranks_per_node: int | None = None
