"""The format of the authors' released model, ``model_type: faolmo``: OLMo-2 with the routers inside ``q_proj``.

A layer's ``q_proj.weight`` has ``heads * head_dim`` rows of the query projection and then ``heads`` rows of the
routers, which have no bias; ``local_window_size`` is the window, the token itself included. Everything else is
OLMo-2's. The routes are ``sigmoid(router rows times what q_proj receives) > 0.5``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.checkpoint.tensor_file import Deferred
from megatron_aha.config.aha import AHAConfig
from megatron_aha.errors import UserError
from megatron_aha.hf.code import model_class
from megatron_aha.hf.configuration import read_config, write_config
from megatron_aha.hf.families import FAMILIES
from megatron_aha.hf.rules import joined
from megatron_aha.hf.source import FolderSource, open_shard

MODEL_TYPE = "faolmo"
WINDOW = "local_window_size"

_FAMILY = "olmo2"
_QUERY, _ROUTER = ".self_attn.q_proj.weight", ".self_attn.router.weight"


class FaolmoSource(FolderSource):
    """A folder in the authors' format, seen as OLMo-2 with routers of their own.

    Raises:
        UserError: as ``FolderSource``; or the window is missing.
    """

    def _read_config(self, config: dict[str, Any]) -> None:
        if not isinstance(config.get(WINDOW), int):
            raise UserError(f"the source's config.json gives no {WINDOW}, found {config.get(WINDOW)!r}")
        # the format does not name the loss coefficient: AHAConfig's is the paper's
        router = {
            "aha_window": config[WINDOW],
            "aha_num_sink_tokens": 0,
            "aha_granularity": "head",
            "aha_bias": False,
            "aha_loss_coefficient": AHAConfig().loss_coefficient,
        }
        self.config = {**config, **router, "architectures": [FAMILIES[_FAMILY].aha]}
        self.model, self.aha = read_config(self.config)

    def _locate(self) -> dict[str, str]:
        files = super()._locate()
        rows = self._query_rows + self.model.num_attention_heads
        for name in (name for name in files if name.endswith(_QUERY)):
            with open_shard(self.folder / files[name]) as handle:
                found = handle.get_slice(name).get_shape()[0]
            if found != rows:
                raise UserError(
                    f"the source's '{name}' has {found} rows, {MODEL_TYPE} has {rows}: those of the queries and one "
                    f"for each of {self.model.num_attention_heads} heads"
                )
        return files

    @property
    def _query_rows(self) -> int:
        return self.model.num_attention_heads * self.model.head_dim

    def names(self) -> Sequence[str]:
        stored = super().names()
        return [*stored, *(name.replace(_QUERY, _ROUTER) for name in stored if name.endswith(_QUERY))]

    def outline(self, name: str) -> Tensor:
        return self._rows(name, super().outline(name.replace(_ROUTER, _QUERY)))

    def read(self, name: str) -> Tensor:
        return self._rows(name, super().read(name.replace(_ROUTER, _QUERY)))

    def _rows(self, name: str, stored: Tensor) -> Tensor:
        """Returns what belongs to a name of the stored weight."""
        if name.endswith(_ROUTER):
            return stored[self._query_rows :].clone()
        return stored[: self._query_rows].clone() if name.endswith(_QUERY) else stored

    def reference(self) -> Any:
        kind = model_class(_FAMILY)
        values = write_config(self.model, self.aha, "float32", self.config)
        del values["auto_map"]
        model = kind(kind.config_class(**values, attn_implementation="sdpa")).eval()
        model.load_state_dict({name: self.read(name).float() for name in self.names()})
        return model


def check_faolmo(reader: CheckpointReader) -> None:
    """Raises UserError when the checkpoint's model has something that the format cannot hold."""
    aha = reader.aha
    if reader.model.family != _FAMILY or aha is None or not aha.enabled:
        kind = "dense" if aha is None or not aha.enabled else "with routers"
        raise UserError(
            f"--format {MODEL_TYPE} is for {_FAMILY} models with routers, this is a {reader.model.family} model, "
            f"{kind}; leave --format out"
        )
    if aha.granularity != "head" or aha.num_sink_tokens:
        raise UserError(
            f"--format {MODEL_TYPE} has a router for each head and no sink tokens, this model has granularity "
            f"{aha.granularity} and {aha.num_sink_tokens} sink tokens; leave --format out"
        )
    for layer in range(reader.model.num_layers if aha.bias else 0):
        name = f"decoder.layers.{layer}.self_attention.router.bias"
        largest = float(reader.read(name).float().abs().max())
        if largest > 0:
            raise UserError(
                f"--format {MODEL_TYPE} has no router bias, but '{name}' is not zero (up to {largest:.3g}); train "
                "with --aha.bias false, or leave --format out"
            )


def faolmo_config(reader: CheckpointReader, dtype: str, source: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of ``config.json``; the class's name is left to the authors' code."""
    assert reader.aha is not None
    config = write_config(reader.model, None, dtype, source)
    del config["architectures"]
    return {**config, "model_type": MODEL_TYPE, WINDOW: reader.aha.window}


def fused(named: Iterable[tuple[str, Deferred]]) -> Iterator[tuple[str, Deferred]]:
    """Yields names and weights with each router's rows below the query projection's, and no biases."""
    queries: dict[str, Deferred] = {}
    for name, weight in named:
        if name.endswith(_QUERY):
            queries[name] = weight
        elif name.endswith(_ROUTER):
            query = name.replace(_ROUTER, _QUERY)
            yield query, _below(queries.pop(query), weight)
        elif not name.endswith(".router.bias"):
            yield name, weight


def _below(upper: Deferred, lower: Deferred) -> Deferred:
    return Deferred(joined((upper.outline, lower.outline)), lambda: joined((upper.read(), lower.read())))
