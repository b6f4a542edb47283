"""What tests of draws share: the document of a command, and draws that are not random."""

import json
from typing import Any

import numpy as np
import pytest

from mdpext_dask.cli.main import main


def call(capfd: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with ``--json`` in this process, check its exit code, and return its document."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    assert (stop.value.code or 0) == code, err
    document: dict[str, Any] = json.loads(out)
    return document


def same_number(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """Let every draw get the same random number, so that it is a function of the record."""
    monkeypatch.setattr(
        "mdpext_dask.runtime.integer_sampling.system_words", lambda n: np.full(n, word, np.uint64)
    )
