"""Quiet transformers: it logs about every tiny config, and draws bars for every model that is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers.utils import logging


@pytest.fixture(scope="module", autouse=True)
def _quiet_transformers() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)
    if had_bars:
        logging.enable_progress_bar()
