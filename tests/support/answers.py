"""Draws that are not random."""

import numpy as np
import pytest


def same_number(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """Let every draw get the same random number, so that it is a function of the record."""
    monkeypatch.setattr(
        "mdpext_dask.runtime.integer_sampling.system_words", lambda n: np.full(n, word, np.uint64)
    )
