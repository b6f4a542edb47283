"""What a job will take, as tables for people."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from mdpext_dask.cli.eta import readable_seconds
from mdpext_dask.errors import printable
from mdpext_dask.events import TOTAL

_WORKERS = "1", "2", "8", "32"
# Seconds below this are all the same; and nothing.
_MOMENT, _NOTHING = 0.05, 0.01


def plan_table(planned: Mapping[str, Any]) -> RenderableType:
    """Return a plan, as :func:`mdpext_dask.pipeline.plan.plan_job` makes it, as three tables."""
    return Group(_sizes(planned), Text(), _memory(planned), Text(), _seconds(planned), Text(_said(planned)))


def _sizes(planned: Mapping[str, Any]) -> Table:
    inside, kept = planned["records_inside"], planned["source_cells_kept"]
    of_records = "" if inside == planned["records"] else f"{inside:,} of them in the region"
    of_cells = f"corners of {' x '.join(map(str, planned['cells']))} source cells"
    if kept < planned["source_cells"]:
        of_cells += f", {kept:,} of them in the region"
    work = planned["seed_work"]
    trials = f" and in {work['trials']} trials" if work["trials"] else ""
    programs = work["programs"] + work["rounds"]
    has_seeds = planned["seeds"] > 0  # noise has none
    of_items = f"blocks in 4 stages{trials}"
    if has_seeds:
        of_items += f"; {programs} seed program{'s' if programs > 1 else ''}"
    block, skipped = " x ".join(map(str, planned["block_cells"])), planned["blocks_skipped"]
    of_blocks = f"of {block} source cells" + (f", {skipped:,} without stored rows" if skipped else "")
    rows = [
        ("records", f"{planned['records']:,}", of_records),
        ("outputs", f"{planned['outputs']:,}", ""),
        ("seeds", f"{planned['seeds']:,}", of_cells if has_seeds else "none are needed"),
        ("blocks", f"{planned['blocks']:,}", of_blocks),
        ("work items", f"{planned['tasks']:,}", of_items),
        ("store", decimal(planned["store_bytes"]), "before compression"),
    ]
    if planned["work_bytes"]:
        rows.append(("beside it", decimal(planned["work_bytes"]), "while cell programs run"))
    return _table("Sizes", rows)


def _memory(planned: Mapping[str, Any]) -> Table:
    held = planned["scheduler"]["bytes_at_once"]["32"]
    return _table(
        "Memory",
        [
            ("a work item", decimal(planned["peak_bytes_per_task"]), "one at a time on each worker"),
            ("tables", decimal(planned["table_bytes_per_worker"]), "on each worker, of the loss"),
            (
                "seed",
                decimal(planned["seed_bytes"]),
                "of a program, on the worker that solves it; or of noise",
            ),
            ("this process", decimal(planned["client_bytes"]), "arrays over all records among it"),
            ("receipts", decimal(planned["receipt_bytes"]), "in the store"),
            ("scheduler", decimal(held), "work items that wait, with 32 workers"),
        ],
    )


def _seconds(planned: Mapping[str, Any]) -> Table:
    table = Table(title="Time by number of workers", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    for workers in _WORKERS:
        table.add_column(workers, justify="right", no_wrap=True)
    table.add_column("limited by")
    by_workers = [dict(planned["seconds_by_workers"][workers]) for workers in _WORKERS]
    for each in by_workers:
        total = each.pop(TOTAL)
        each |= {"start": max(total - sum(each.values()), 0.0), TOTAL: total}
    for stage in by_workers[0]:
        seconds = [each[stage] for each in by_workers]
        if max(seconds) >= _NOTHING:  # not every job has all stages, and starts workers
            style = "bold" if stage == TOTAL else None
            table.add_row(stage, *map(_readable, seconds), _limit(stage, planned), style=style)
    return table


def _limit(stage: str, planned: Mapping[str, Any]) -> str:
    work, most = planned["seed_work"], planned["scheduler"]["workers_at_most"].get(stage)
    programs = work["programs"] + work["rounds"]
    said = {
        "domain": "one process",
        "boundary": "one process",
        "start": "libraries that workers load",
        "cells": "levels, one after the other",
        "seed": f"{programs} programs, " + ("one by one" if work["trials"] else "one worker each")
        if planned["seeds"]
        else "one process",
        TOTAL: "",
    }
    if stage not in said:
        return f"{most:,} blocks" if most == planned["blocks"] else f"short work items ({most:,} workers)"
    return said[stage] if programs > 1 else said[stage].replace("1 programs, one", "1 program, one")


def _said(planned: Mapping[str, Any]) -> str:
    stages = {**planned["seconds_by_workers"][_WORKERS[-1]], TOTAL: 0.0}
    return (
        f"\nWith many workers, {max(stages, key=stages.__getitem__)} takes longest. Times are estimates for "
        "a machine that does nothing else."
    )


def _readable(seconds: float) -> str:
    return readable_seconds(seconds) if seconds >= _MOMENT else "< 0.1 s"


def _table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
