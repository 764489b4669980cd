"""A cache for heads that never look beyond their window: what their key/value groups cannot see again is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_STATES = ("keys", "values", "near_keys", "near_values")


class SplitLayer(DynamicLayer):
    """Keys and values of a layer: everything of its routed groups, the last window of its static groups.

    Args:
        static: groups all of whose heads are frozen.
        groups: key/value groups of the layer.
        window: keys that a frozen head sees, in tokens, the token itself included.
    """

    def __init__(self, static: list[int], groups: int, window: int) -> None:
        super().__init__()
        self.static = static
        self.routed = [group for group in range(groups) if group not in static]
        self.window = window
        self.seen = 0
        self.near_keys: Any = None
        self.near_values: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Takes type and device of the first keys; nothing is stored yet."""
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, self.routed, :0], value_states[:, self.routed, :0]
        self.near_keys, self.near_values = key_states[:, self.static, :0], value_states[:, self.static, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stores new states ``[batch, groups, tokens, head_dim]`` and returns what the new tokens may see.

        Returns:
            Keys and values, of each the routed groups' and the static groups', ``[batch, groups, keys, head_dim]``.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        self.keys = torch.cat([self.keys, key_states[:, self.routed]], dim=-2)
        self.values = torch.cat([self.values, value_states[:, self.routed]], dim=-2)
        near_keys = torch.cat([self.near_keys, key_states[:, self.static]], dim=-2)
        near_values = torch.cat([self.near_values, value_states[:, self.static]], dim=-2)
        # a slice alone would keep the whole in memory
        first = max(near_keys.shape[-2] - self.window + 1, 0)
        self.near_keys, self.near_values = near_keys[:, :, first:].clone(), near_values[:, :, first:].clone()
        return (self.keys, near_keys), (self.values, near_values)

    def get_seq_length(self, *args: Any) -> int:
        """Returns the tokens seen, dropped ones included."""
        return self.seen

    def crop(self, *args: Any) -> None:
        """Refuses: what was dropped cannot come back."""
        raise ValueError("a cache that drops keys beyond the window of frozen heads cannot be cropped")

    def reset(self) -> None:
        """Forgets everything."""
        for name in _STATES:
            setattr(self, name, None)
        self.is_initialized, self.seen = False, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes rows of the batch in another order, as beam search does."""
        self._change(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        self._change(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows of the batch."""
        self._change(lambda states: states[indices, ...])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            for name in _STATES:
                setattr(self, name, change(getattr(self, name)))


def split_cache(cache: Any, config: Any) -> None:
    """Makes an empty dynamic cache drop what static groups cannot see again; other caches keep everything.

    Sinks would have to be kept as well: with them nothing is dropped.
    """
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or config.aha_num_sink_tokens:
        return
    if cache.get_seq_length() > 0:
        return
    while len(cache.layers) < config.num_hidden_layers:
        cache.layers.append(DynamicLayer())
    for index in range(config.num_hidden_layers):
        static = config.static_groups(index)
        if static:
            cache.layers[index] = SplitLayer(static, config.num_key_value_heads, config.aha_window)
