"""What every configuration with All-or-Here Attention (arXiv 2512.22562) has beside its family's."""

from __future__ import annotations

from typing import Any

from transformers import __version__ as transformers_version

ROUTER_DEFAULTS: dict[str, Any] = {
    "aha_window": 256,
    "aha_num_sink_tokens": 0,
    "aha_granularity": "head",
    "aha_bias": False,
    "aha_loss_coefficient": 3e-4,
    "aha_frozen_routers": None,
}


# Other bases bring transformers' configurations, which type checkers do not see here.
_Mixin: Any = object


class RouterConfig(_Mixin):
    """The router's settings, beside those of the family's own configuration.

    Attributes:
        aha_window: keys that a token sees when its route is *here*, in tokens, including the token itself.
        aha_num_sink_tokens: first tokens of each document that *here* sees as well.
        aha_granularity: ``head`` (a route per query head) or ``kv_group`` (a route per key/value head).
        aha_bias: whether the router has a bias.
        aha_loss_coefficient: weight of the router loss, mean sigmoid(logit), in the loss that ``labels``
            gives.
        aha_frozen_routers: for each layer the routers that are not asked, their heads are always *here*; None: none.
    """

    # Sharding q_proj by heads would need the router sharded alike.
    base_model_tp_plan = None

    def take_router_settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """Keeps the router's settings and returns the others, as the installed transformers spells them."""
        options = dict(options)
        for name, default in ROUTER_DEFAULTS.items():
            setattr(self, name, options.pop(name, default))
        if not isinstance(self.aha_window, int) or self.aha_window < 1:
            raise ValueError(
                f"aha_window must be a whole number from 1 (the token itself), not {self.aha_window}"
            )
        if self.aha_granularity not in ("head", "kv_group"):
            raise ValueError(f"aha_granularity must be 'head' or 'kv_group', not '{self.aha_granularity}'")
        frozen = self.aha_frozen_routers
        if frozen is not None and not all(isinstance(layer, list) for layer in frozen):
            raise ValueError(f"aha_frozen_routers must hold a list of routers for each layer, not {frozen}")
        if int(transformers_version.split(".")[0]) < 5 and options.get("rope_parameters"):
            # transformers 5 saves one dictionary, which 4 would ignore without a word
            rope = options.pop("rope_parameters")
            rope = dict(rope.get("full_attention", rope))
            options["rope_theta"] = rope.pop("rope_theta", 10000.0)
            options["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        return options

    @property
    def num_routers(self) -> int:
        """Routers per layer."""
        return self.num_attention_heads if self.aha_granularity == "head" else self.num_key_value_heads

    def frozen_routers(self, layer: int) -> list[int]:
        """Returns the routers of a layer that are not asked."""
        return self.aha_frozen_routers[layer] if self.aha_frozen_routers else []

    def static_groups(self, layer: int) -> list[int]:
        """Returns the key/value groups of a layer all of whose heads are frozen."""
        frozen, per_group = set(self.frozen_routers(layer)), self.num_routers // self.num_key_value_heads
        groups = [range(g * per_group, (g + 1) * per_group) for g in range(self.num_key_value_heads)]
        return [g for g, routers in enumerate(groups) if frozen.issuperset(routers)]
