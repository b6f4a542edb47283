"""Commands run within this process: ten times as fast as in one of their own."""

import json
from typing import Any, NamedTuple

import pytest

from mdpext_dask.cli.main import main

Capture = pytest.CaptureFixture[str]


class Outcome(NamedTuple):
    returncode: int
    stdout: str
    stderr: str

    def document(self, code: int = 0) -> dict[str, Any]:
        """Return the one JSON document of a command that must end with an exit code."""
        assert self.returncode == code, self.stderr
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def mdpext(*arguments: object) -> int:
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def run_inside(capture: Capture, *arguments: object) -> Outcome:
    """Run a command, and return its exit code and what it has printed."""
    return Outcome(mdpext(*arguments), *capture.readouterr())


def call(capture: Capture, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with ``--json``, check its exit code, and return its document."""
    return run_inside(capture, *arguments, "--json").document(code)
