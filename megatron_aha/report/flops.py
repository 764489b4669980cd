"""Floating-point operations of a training step, by arithmetic.

Convention:

- a multiply and an add are two operations; only matrix products count, not norms, softmax or rotary angles;
- of causal attention only the visible pairs of a query and a key count (about half of the square);
- the backward pass costs twice the forward pass (once for the inputs, once for the weights); with the model
frozen
  its weights need no gradient, so its linear layers' backward pass costs one forward pass;
- work that activation recompute repeats does not count: these are the operations that the model needs;
- *done* counts attention as the routes ask for it: a token-head that chose *here* sees its window only. The
exact
  router gradient needs the output of both choices for every token-head, so its forward pass sees every
  pair; the sampled one sees them for its share of the token-heads. The backward pass follows the routes
  alone. What a backend computes beyond that (the ``torch`` one does) is overhead, not work done.
- *dense equivalent* is the same step with full attention everywhere and no router; layers with a static window
  keep it in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig


@dataclass
class FlopCount:
    """Operations of one training step, forward and backward, over all ranks that share its tokens.

    Args:
        done: with attention as the routes ask for it.
        dense_equivalent: with full attention everywhere.
    """

    done: float
    dense_equivalent: float


def causal_pairs(length: int) -> int:
    """Returns the pairs of query and key that full causal attention sees in ``length`` tokens."""
    return length * (length + 1) // 2


def window_pairs(length: int, window: int, num_sink_tokens: int = 0) -> int:
    """Returns the pairs that *here* sees: ``window`` keys with the token itself, and the sinks."""
    near = causal_pairs(min(length, window)) + max(length - window, 0) * window
    # Token t (from 0) has t - window + 1 keys before its window, of which the first ones are the sinks.
    beyond = max(length - window, 0)
    sinks = causal_pairs(min(beyond, num_sink_tokens)) + max(beyond - num_sink_tokens, 0) * num_sink_tokens
    return near + sinks


def linear_flops_per_token(model: ModelConfig) -> int:
    """Returns the forward operations of one token in all linear layers but the routers."""
    attention = (
        model.hidden_size * model.head_dim * (2 * model.num_attention_heads + 2 * model.num_query_groups)
    )
    mlp = 3 * model.hidden_size * model.ffn_hidden_size
    return 2 * (model.num_layers * (attention + mlp) + model.hidden_size * model.vocab_size)


def router_flops_per_token(model: ModelConfig, aha: AHAConfig) -> int:
    """Returns the forward operations of all routers for one token."""
    if not aha.enabled:
        return 0
    routers = model.num_attention_heads if aha.granularity == "head" else model.num_query_groups
    return 2 * len(model.routed_layers) * model.hidden_size * routers


def step_flops(
    model: ModelConfig,
    aha: AHAConfig,
    document_lengths: Iterable[int],
    usage_beyond_window: float = 1.0,
    frozen: bool = False,
) -> FlopCount:
    """Returns the operations of one training step over the given documents; see the convention above.

    Args:
        model: sizes.
        aha: the attention variant; a dense model has done what is dense equivalent.
        document_lengths: tokens of every document of the step, since attention never leaves its document:
            ``cu_seqlens.diff()`` of its micro-batches.
        usage_beyond_window: share of full attention among token-heads that have a key beyond their window,
            0 to 1.
        frozen: only routers are trained.
    """
    tokens = all_pairs = here_pairs = static_pairs = 0
    for length in document_lengths:
        tokens += length
        all_pairs += causal_pairs(length)
        here_pairs += window_pairs(length, aha.window, aha.num_sink_tokens)
        static_pairs += window_pairs(length, model.static_window) if model.static_window else 0
    # query x key, then weight x value
    per_pair_and_layer = 4 * model.head_dim * model.num_attention_heads
    per_pair = per_pair_and_layer * len(model.routed_layers)
    linear_passes = 2 if frozen else 3
    fixed = linear_passes * tokens * linear_flops_per_token(model)
    fixed += 3 * per_pair_and_layer * len(model.windowed_layers) * static_pairs
    dense = fixed + 3 * per_pair * all_pairs
    if not aha.enabled:
        return FlopCount(dense, dense)
    routed = here_pairs + usage_beyond_window * (all_pairs - here_pairs)
    both = _share_with_both_outputs(aha.router_grad)
    forward = routed + both * (all_pairs - routed)
    routers = 3 * tokens * router_flops_per_token(model, aha)
    return FlopCount(fixed + routers + per_pair * (forward + 2 * routed), dense)


def _share_with_both_outputs(router_grad: str) -> float:
    """Returns the share of *here* token-heads whose full attention is computed for the router's gradient."""
    kind, _, rate = router_grad.partition(":")
    return {"exact": 1.0, "none": 0.0}[kind] if kind != "sampled" else float(rate)
