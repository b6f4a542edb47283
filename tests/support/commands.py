"""Command lines, which are only parsed."""

import shlex
from collections.abc import Sequence
from typing import Any

import typer
from distributed.cli.dask_scheduler import main as dask_scheduler
from distributed.cli.dask_worker import main as dask_worker

from mdpext_dask.cli.main import app


def parse(command: str | Sequence[str]) -> dict[str, Any]:
    """Return the options of a command of ours or Dask's; an unknown option or a missing argument raises."""
    program, name, *arguments = shlex.split(command) if isinstance(command, str) else list(command)
    if program == "dask":
        parser: Any = {"scheduler": dask_scheduler, "worker": dask_worker}[name]
    elif program == "mdpext":
        parser = typer.main.get_command(app).commands[name]
    else:
        raise ValueError(f"{program}: not ours")
    with parser.make_context(name, arguments) as context:
        return dict(context.params)
