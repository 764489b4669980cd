"""All-or-Here attention: hard-routed full or sliding-window attention, forward, backward and decode."""

from __future__ import annotations

from aha_kernels.attention import aha_attention
from aha_kernels.decode import aha_decode
from aha_kernels.errors import InputError

__all__ = ["InputError", "aha_attention", "aha_decode"]
