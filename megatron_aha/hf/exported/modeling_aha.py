"""All-or-Here Attention (arXiv 2512.22562) for transformers 4.57 to 5: what the families' modelling files share.

Each head has a router that chooses per token between *all* (causal attention) and *here* (a sliding window).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward
from transformers.utils import can_return_tuple

from .cache_aha import split_cache
from .kernels_aha import KERNELS, Span, attend_by_routes, span_of
from .masks_aha import here_mask, real_tokens

# What differs between the supported versions of transformers is here and nowhere else: the name of the cache
# in outputs, and the arguments of the mask's function (4.57: past_key_values and cache_position; 5: cache).
CACHE_FIELD = (
    "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
)
_MASK_ARGUMENTS = frozenset(inspect.signature(create_causal_mask).parameters)

# Other bases bring transformers' models, which type checkers do not see here.
_Mixin: Any = object

# Kinds of layers, by the names of transformers' configurations, and their masks.
FULL, WINDOWED = "full_attention", "sliding_attention"
_MASKS = {FULL: create_causal_mask, WINDOWED: create_sliding_window_causal_mask}


def layer_kinds(config: Any) -> list[str]:
    """Returns the kind of each layer; without ``layer_types`` all have full attention."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return kinds[: config.num_hidden_layers]


def causal_mask(
    make: Callable[..., Tensor | None],
    config: Any,
    embeddings: Tensor,
    attention_mask: Tensor | None,
    cache: Any,
    query_index: Tensor,
    position_ids: Tensor,
) -> Tensor | None:
    """Returns transformers' own causal mask, in the form that the attention implementation takes.

    That is bool ``[batch or 1, 1, queries, keys]`` or None for sdpa, additive of the same shape for eager.

    Args:
        make: transformers' function for full attention, or the one for layers with a static window.
    """
    given = {
        "config": config,
        "inputs_embeds": embeddings,
        "input_embeds": embeddings,
        "attention_mask": attention_mask,
        "cache": cache,
        "past_key_values": cache,
        "cache_position": query_index,
        "position_ids": position_ids,
    }
    return make(**{name: value for name, value in given.items() if name in _MASK_ARGUMENTS})


@dataclass
class AHAModelOutput(BaseModelOutputWithPast):
    """Hidden states and what the routers saw.

    Args:
        router_logits: per layer with a router, fp32 ``[batch, tokens, routers]``.
        token_mask: which tokens are real, not padding, bool ``[batch, tokens]``.
        beyond_window: which tokens see a key beyond their window, bool ``[batch, tokens]``; only with
            ``output_router_stats=True``.
    """

    router_logits: tuple[Tensor, ...] | None = None
    token_mask: Tensor | None = None
    beyond_window: Tensor | None = None


@dataclass
class AHACausalLMOutput(CausalLMOutputWithPast):
    """Logits and, with ``output_router_stats=True``, the routers' statistics; padding never counts.

    Args:
        router_loss: mean sigmoid(logit) over the tokens that carry loss; with ``labels`` only.
        routes: per layer with a router, bool ``[batch, tokens, routers]``: True is *all*.
        router_usage: share of tokens that used *all*, ``[layers with routers, routers]``.
        router_usage_beyond_window: the same among tokens that have a key beyond their window.
    """

    router_loss: Tensor | None = None
    routes: tuple[Tensor, ...] | None = None
    router_usage: Tensor | None = None
    router_usage_beyond_window: Tensor | None = None


class AHAAttention(nn.Module):
    """Multi-head attention in which each token of each head sees *all* keys or those *here*.

    A layer that the source already windows has no router; its mask says what it sees.
    """

    # What families differ in: biases on query, key and value; the norm of queries and keys, of each ``head``
    # or over the whole ``projection``.
    qkv_bias = False
    qk_norm: str | None = None
    norm_class: type[nn.Module]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        heads, groups, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        self.num_key_value_groups = heads // groups
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=self.qkv_bias)
        self.k_proj = nn.Linear(hidden, groups * self.head_dim, bias=self.qkv_bias)
        self.v_proj = nn.Linear(hidden, groups * self.head_dim, bias=self.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        if self.qk_norm is not None:
            each = 1 if self.qk_norm == "head" else heads
            self.q_norm = self.norm_class(each * self.head_dim, config.rms_norm_eps)
            each = 1 if self.qk_norm == "head" else groups
            self.k_norm = self.norm_class(each * self.head_dim, config.rms_norm_eps)
        windowed = layer_kinds(config)[layer_idx] == WINDOWED
        self.sliding_window = config.sliding_window if windowed else None
        self.router: Any = None if windowed else nn.Linear(hidden, config.num_routers, bias=config.aha_bias)
        self.frozen_routers = [] if windowed else config.frozen_routers(layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        query_index: Tensor,
        past_key_values: Any = None,
        span: Span | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns output ``[batch, queries, hidden]``, attention weights (eager only) and router logits.

        Args:
            hidden_states: what the query projection receives, ``[batch, queries, hidden]``.
            position_embeddings: cosine and sine.
            attention_mask: of *all* or of the static window, as `causal_mask` returns it.
            query_index: place of each query among the keys, ``[queries]``.
            past_key_values: the cache, or None.
            span: which keys exist, where the kernels are to be used.
            kwargs: for the attention implementation.
        """
        batch, queries, _ = hidden_states.shape
        query, key, value = self.project(hidden_states)  # [batch, heads or groups, queries, head_dim]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        # some families' angles stay in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx, {"cache_position": query_index})

        logits = None if self.router is None else self.route_logits(hidden_states)
        route = None if logits is None else self.straight_through(logits)  # [batch, queries, heads]
        given = (attention_mask, query_index, span, kwargs)
        if isinstance(key, tuple):  # a cache that drops what frozen heads cannot see
            output, weights = self.attend_split(query, key, value, route, *given)
        else:
            output, weights = self.attend(query, key, value, route, *given)
        return self.o_proj(output.reshape(batch, queries, -1)), weights, logits

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        route: Tensor | None,
        all_mask: Tensor | None,
        query_index: Tensor,
        span: Span | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns output ``[batch, queries, heads, head_dim]`` and attention weights (eager only)."""
        if key.shape[2] <= self.config.aha_window:
            route = None  # all keys are here
        if route is not None and span is not None:
            return attend_by_routes(query, key, value, route, span, self.scaling, self.config), None
        output, weights = self.attend_masked(query, key, value, all_mask, options)
        if route is not None:
            window, sinks = self.config.aha_window, self.config.aha_num_sink_tokens
            near = here_mask(all_mask, query_index, key.shape[2], window, sinks)
            here, here_weights = self.attend_masked(query, key, value, near, options)
            share = route.to(output.dtype)[..., None]  # [batch, queries, heads, 1]
            output = share * output + (1 - share) * here
            if weights is not None and here_weights is not None:
                by_head = share.transpose(1, 2)  # [batch, heads, queries, 1]
                weights = by_head * weights + (1 - by_head) * here_weights
        return output, weights

    def attend_masked(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what the configured attention implementation makes of a mask."""
        name = self.config._attn_implementation
        function = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.attention_dropout if self.training else 0.0
        return function(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **options)

    def attend_split(
        self,
        query: Tensor,
        keys: Any,
        values: Any,
        route: Any,
        all_mask: Tensor | None,
        query_index: Tensor,
        span: Span | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns as `attend`; keys and values are those of routed groups and the last ones of static groups."""
        static = set(self.config.static_groups(self.layer_idx))
        heads = range(query.shape[1])
        near_heads = [head for head in heads if head // self.num_key_value_groups in static]
        far_heads = [head for head in heads if head not in near_heads]
        total, kept = int(query_index[-1]) + 1, keys[1].shape[2]
        near = here_mask(all_mask, query_index, total, self.config.aha_window, 0)[..., total - kept :]
        here, here_weights = self.attend_masked(query[:, near_heads], keys[1], values[1], near, options)
        if not far_heads:
            return here, None if here_weights is None else F.pad(here_weights, (total - kept, 0))
        far, far_weights = self.attend(
            query[:, far_heads],
            keys[0],
            values[0],
            route[..., far_heads],
            all_mask,
            query_index,
            span,
            options,
        )
        order = torch.tensor(near_heads + far_heads, device=query.device).argsort()
        weights = None
        if here_weights is not None and far_weights is not None:
            weights = torch.cat([F.pad(here_weights, (total - kept, 0)), far_weights], dim=1)[:, order]
        return torch.cat([here, far], dim=2)[:, :, order], weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values before rotation, ``[batch, heads or groups, queries, head_dim]``."""

        def heads(states: Tensor, norm: nn.Module | None = None) -> Tensor:
            if norm is not None and self.qk_norm == "projection":
                states = norm(states)
            states = states.unflatten(-1, (-1, self.head_dim))  # [batch, queries, heads or groups, head_dim]
            if norm is not None and self.qk_norm == "head":
                states = norm(states)
            return states.transpose(1, 2)

        normed = self.qk_norm is not None
        return (
            heads(self.q_proj(hidden_states), self.q_norm if normed else None),
            heads(self.k_proj(hidden_states), self.k_norm if normed else None),
            heads(self.v_proj(hidden_states)),
        )

    def route_logits(self, hidden_states: Tensor) -> Tensor:
        """Returns the router's logits in fp32, under autocast too, ``[batch, queries, routers]``."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            bias = None if self.router.bias is None else self.router.bias.float()
            logits = F.linear(hidden_states.float(), self.router.weight.float(), bias)
        if self.frozen_routers:
            frozen = torch.tensor(self.frozen_routers, device=logits.device)
            logits = logits.index_fill(-1, frozen, float("-inf"))
        return logits

    def straight_through(self, logits: Tensor) -> Tensor:
        """Returns hard routes 0 and 1 ``[batch, queries, heads]`` whose gradient goes to sigmoid(logit)."""
        soft = logits.sigmoid()
        route = (logits > 0).to(soft.dtype) + (soft - soft.detach())
        return route.repeat_interleave(self.config.num_attention_heads // route.shape[-1], dim=-1)


class AHALayer(GradientCheckpointingLayer):
    """What decoder layers share; they return the router's logits, so that gradient checkpointing keeps them."""

    attention_class: type[AHAAttention]
    mlp_class: type[nn.Module]
    norm_class: type[nn.Module]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = self.mlp_class(config)


class PreNormLayer(AHALayer):
    """A decoder layer whose blocks read the residual stream normalised, as most families' do."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns hidden states ``[batch, queries, hidden]``, attention weights or None, router logits."""
        attended, weights, logits = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, weights, logits


class PostNormLayer(AHALayer):
    """A decoder layer whose blocks read the residual stream as it is and normalise what they add to it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns hidden states ``[batch, queries, hidden]``, attention weights or None, router logits."""
        attended, weights, logits = self.self_attn(hidden_states, **kwargs)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        hidden_states = hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))
        return hidden_states, weights, logits


class AHAPreTrained(_Mixin):
    """What both models share; we compute masks, so only implementations that take masks are allowed."""

    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_record_outputs: dict[str, Any] = {}

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers guesses it from the text of this file; each layer looks its implementation up when it is called
        return True


class AHADecoder(_Mixin):
    """The decoder without its head; comes before transformers' own among a class's bases."""

    layer_class: type[nn.Module]
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module]

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = self.make_embedding(config)
        self.layers = nn.ModuleList(
            self.layer_class(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.add_rotary_embedding()
        self.gradient_checkpointing = False
        self.post_init()

    def make_embedding(self, config: Any) -> nn.Module:
        """Returns the table of token embeddings."""
        return nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)

    def add_rotary_embedding(self) -> None:
        """Builds what `angles` needs."""
        self.rotary_emb = self.rotary_class(config=self.config)

    def angles(self, hidden_states: Tensor, position_ids: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine for a kind of layers; only some families rotate both kinds differently."""
        return self.rotary_emb(hidden_states, position_ids)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_stats: bool = False,
        **kwargs: Any,
    ) -> AHAModelOutput:
        """Returns hidden states and the router's logits; arguments are those of transformers' own.

        Args:
            input_ids: ``[batch, queries]``, or `inputs_embeds` instead.
            attention_mask: 1 for real tokens, ``[batch, keys]``, or a prepared mask of four dimensions, or one for
                each kind of layers.
            position_ids: ``[batch, queries]``.
            past_key_values: the cache under its name until transformers 5.
            inputs_embeds: ``[batch, queries, hidden]``.
            use_cache: make a cache when none is given.
            cache: the cache under its newer name.
            output_attentions: return attention weights, which only the eager implementation has.
            output_hidden_states: return the input of each layer and the final states.
            output_router_stats: find out which tokens have a key beyond their window.
            kwargs: for the attention implementation.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing:
            cache, use_cache = None, False
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        if cache is not None and self.config.aha_frozen_routers:
            split_cache(cache, self.config)
        query_index = kwargs.pop("cache_position", None)
        if query_index is None:
            seen = 0 if cache is None else cache.get_seq_length()
            query_index = torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen
        if position_ids is None:
            position_ids = query_index[None]
        kinds = layer_kinds(self.config)
        given = (self.config, hidden_states, attention_mask, cache, query_index, position_ids)
        if isinstance(attention_mask, dict):  # as `generate` prepares them for a static cache
            masks: dict[str, Any] = attention_mask
            attention_mask = masks[FULL]
        else:
            masks = {kind: causal_mask(_MASKS[kind], *given) for kind in set(kinds)}
        angles = {kind: self.angles(hidden_states, position_ids, kind) for kind in set(kinds)}
        span = None
        if self.config._attn_implementation == KERNELS and not (
            self.training and self.config.attention_dropout
        ):
            span = span_of(masks[FULL], query_index)
        kwargs.pop("return_dict", None)
        keep_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        keep_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        states, attentions, router_logits = [], [], []
        for layer, kind in zip(self.layers, kinds, strict=False):
            states.append(hidden_states)
            hidden_states, weights, logits = layer(
                hidden_states,
                position_embeddings=angles[kind],
                attention_mask=masks[kind],
                query_index=query_index,
                past_key_values=cache,
                span=span,
                **kwargs,
            )
            attentions.append(weights)
            if logits is not None:
                router_logits.append(logits)
        hidden_states = self.norm(hidden_states)
        return AHAModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=(*states, hidden_states) if keep_states else None,
            attentions=tuple(attentions) if keep_attentions else None,
            router_logits=tuple(router_logits),
            token_mask=real_tokens(attention_mask, hidden_states, query_index),
            beyond_window=self.beyond_window(masks[FULL], query_index) if output_router_stats else None,
            **{CACHE_FIELD: cache},
        )

    def beyond_window(self, all_mask: Tensor | None, query_index: Tensor) -> Tensor:
        """Returns which queries see a key beyond their window, bool ``[batch or 1, queries]``."""
        reach = self.config.aha_window + self.config.aha_num_sink_tokens
        if all_mask is None:
            return (query_index >= reach)[None]
        visible = all_mask if all_mask.dtype == torch.bool else all_mask > torch.finfo(all_mask.dtype).min / 2
        key_index = torch.arange(all_mask.shape[-1], device=all_mask.device)
        visible = visible & (key_index <= query_index[:, None])
        return visible.sum(dim=-1)[:, 0] > reach


class AHACausalLM(_Mixin):
    """The language model; comes before transformers' own among a class's bases."""

    decoder_class: type[nn.Module]

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_router_stats: bool = False,
        **kwargs: Any,
    ) -> AHACausalLMOutput:
        """Returns logits ``[batch, queries, vocab]`` and, with labels, LM loss + coefficient * router loss.

        Args:
            input_ids: ``[batch, queries]``, or `inputs_embeds` instead.
            attention_mask: 1 for real tokens, ``[batch, keys]``.
            position_ids: ``[batch, queries]``.
            past_key_values: the cache; transformers 5 calls it ``cache``.
            inputs_embeds: ``[batch, queries, hidden]``.
            labels: token ids, -100 where there is no loss, ``[batch, queries]``; shifted here.
            use_cache: make a cache when none is given.
            logits_to_keep: compute logits of the last so many tokens, or of these indices; 0 means all.
            output_router_stats: return routes and usage as well.
            kwargs: as in transformers' own.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_stats=output_router_stats,
            **{name: value for name, value in kwargs.items() if name != "num_items_in_batch"},
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = router_loss = None
        if labels is not None:
            count = kwargs.get("num_items_in_batch")
            lm_loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, num_items_in_batch=count
            )
            carries = F.pad(labels[:, 1:] != -100, (0, 1)) & outputs.token_mask.to(labels.device)
            router_loss = mean_probability(outputs.router_logits, carries, count)
            loss = lm_loss + self.config.aha_loss_coefficient * router_loss
        routes = usage = beyond = None
        if output_router_stats:
            routes = tuple(layer > 0 for layer in outputs.router_logits)
            usage = mean_route(routes, outputs.token_mask)
            beyond = mean_route(routes, outputs.token_mask & outputs.beyond_window)
        return AHACausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_loss=router_loss,
            routes=routes,
            router_usage=usage,
            router_usage_beyond_window=beyond,
            **{CACHE_FIELD: getattr(outputs, CACHE_FIELD)},
        )


def mean_probability(
    router_logits: tuple[Tensor, ...], carries: Tensor, count: Tensor | int | None
) -> Tensor:
    """Returns the router loss, mean sigmoid(logit) over the tokens that carry loss, over heads and layers.

    Args:
        router_logits: per layer, ``[batch, tokens, routers]``.
        carries: which tokens carry loss (their next label is not -100), bool ``[batch, tokens]``.
        count: tokens that carry loss in the whole optimizer step, as transformers' Trainer passes it, or None
            for those of this batch.
    """
    tokens = carries.sum().clamp(min=1) if count is None else count
    sums = [(layer.sigmoid().mean(dim=-1) * carries.to(layer.device)).sum() for layer in router_logits]
    return torch.stack([total.to(carries.device) for total in sums]).mean() / tokens


def mean_route(routes: tuple[Tensor, ...], counted: Tensor) -> Tensor:
    """Returns the share of counted tokens whose route is *all*, ``[layers, routers]``; 0 if none is."""
    counted = counted[..., None]  # [batch, tokens, 1]
    tokens = counted.sum().clamp(min=1)
    return torch.stack([(layer & counted).sum(dim=(0, 1)) / tokens for layer in routes])
