"""What `plan` shows to people says the same as its JSON."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from mdpext_dask.cli.plan_table import plan_table
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.plan import plan_job

Job = Callable[..., dict[str, dict[str, Any]]]


def shown(planned: dict[str, Any]) -> dict[str, list[str]]:
    """Return the words of each row by its first word; all rows fit a narrow terminal."""
    file = io.StringIO()
    Console(file=file, width=80).print(plan_table(planned))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    return {line.split()[0]: line.split()[1:] for line in lines if line}


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        ({"privacy": {"budget": "certified"}}, "24 programs, one by one"),
        ({"privacy": {"budget": "half"}}, "5 programs, one worker each"),
        ({"privacy": {"budget": "bound"}, "cluster": {"kind": "local"}}, "1 program, one worker each"),
    ],
)
def test_every_stage_has_a_row_with_its_seconds(
    small_job: Job, sections: dict[str, dict[str, Any]], limit: str
) -> None:
    planned = plan_job(parse_job(small_job(**sections, store={"block_cells": [1, 1]})))
    # Seconds that are told apart, by stage and workers.
    for turn, (workers, seconds) in enumerate(planned["seconds_by_workers"].items()):
        planned["seconds_by_workers"][workers] = {
            stage: 2.0 * (number + 1) - turn / 10 for number, stage in enumerate(seconds) if stage != "total"
        }
        planned["seconds_by_workers"][workers]["total"] = 58.0
    rows = shown(planned)
    assert rows["stage"] == ["1", "2", "8", "32", "limited", "by"]
    assert rows["loss"][:8] == ["4.0", "s", "3.9", "s", "3.7", "s", "3.5", "s"]
    assert " ".join(rows["loss"][8:]) == "short work items (5 workers)"
    assert rows["seed"][:8] == ["6.0", "s", "5.9", "s", "5.7", "s", "5.5", "s"]
    assert " ".join(rows["seed"][8:]) == limit
    # 2 + ... + 14 less a tenth a turn for each of seven stages; the rest is the start of workers.
    assert rows["start"][:8] == ["2.0", "s", "2.7", "s", "4.1", "s", "5.5", "s"]
    assert rows["total"] == 4 * ["58", "s"]
    assert {"domain", "extend", "boundary", "audit", "evaluate"} <= set(rows)
    assert "cells" not in rows


def test_sizes_and_memory_by_hand(small_job: Job) -> None:
    """13 x 29 records in 3 x 7 cells of 4 x 4, and 8 outputs."""
    planned = plan_job(parse_job(small_job(store={"block_cells": [1, 1]})))
    rows = shown({**planned, "store_bytes": 25_400_000, "peak_bytes_per_task": 5_800})
    assert rows["records"] == ["377"]
    assert rows["outputs"] == ["8"]
    assert rows["seeds"] == ["32", *["corners", "of", "3", "x", "7", "source", "cells"]]
    assert rows["blocks"] == ["21", *["of", "1", "x", "1", "source", "cells"]]
    assert rows["store"] == ["25.4", "MB", "before", "compression"]
    assert rows["a"] == ["work", "item", "5.8", "kB", *["one", "at", "a", "time", "on", "each", "worker"]]
    # What a job does not have is left out; what it has is said.
    assert "beside" not in rows
    part = {"records_inside": 300, "source_cells_kept": 17, "blocks_skipped": 4, "work_bytes": 7000}
    rows = shown({**planned, **part})
    assert rows["records"][1:] == ["300", "of", "them", "in", "the", "region"]
    assert rows["seeds"][-6:] == ["17", "of", "them", "in", "the", "region"]
    assert rows["blocks"][-4:] == ["4", "without", "stored", "rows"]
    assert rows["beside"][:3] == ["it", "7.0", "kB"]
