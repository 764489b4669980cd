"""Megatron-core's parallel state in the form that DeepSpeed asks for (its ``mpu`` argument)."""

from __future__ import annotations

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


class ModelParallelUnit:
    """DeepSpeed's view of the layout.

    DeepSpeed knows two axes: *model parallel* is whatever holds different parameters (tensor and pipeline ranks),
    over which it sums squared gradient norms; *data parallel* is whatever holds copies, over which it averages
    gradients and shards optimizer states. Rank and world size of the model-parallel axis are the tensor-parallel
    ones, because DeepSpeed uses them to decide who counts a replicated parameter.
    """

    def get_model_parallel_rank(self) -> int:
        """Returns the tensor-parallel rank."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """Returns the tensor-parallel size."""
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> ProcessGroup:
        """Returns the group over tensor x pipeline ranks, over which gradient norms are summed."""
        return parallel_state.get_model_parallel_group()

    def get_tensor_model_parallel_rank(self) -> int:
        """Returns the tensor-parallel rank."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """Returns the tensor-parallel size."""
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Returns the tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_group()

    def get_pipeline_model_parallel_rank(self) -> int:
        """Returns the pipeline stage."""
        return parallel_state.get_pipeline_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Returns the number of pipeline stages."""
        return parallel_state.get_pipeline_model_parallel_world_size()

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        """Returns the pipeline group."""
        return parallel_state.get_pipeline_model_parallel_group()

    def get_data_parallel_rank(self) -> int:
        """Returns the rank among the copies of this rank's parameters."""
        return parallel_state.get_data_parallel_rank(with_context_parallel=True)

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of copies of this rank's parameters."""
        return parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def get_data_parallel_group(self) -> ProcessGroup:
        """Returns the group over the copies of this rank's parameters."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
