"""All-or-Here Attention (arXiv 2512.22562) for Megatron-core and DeepSpeed."""

__version__ = "0.1.0"
