"""Keeps transformers quiet."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
