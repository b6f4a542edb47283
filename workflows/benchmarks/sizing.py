"""The table of sizes in ``deploy/README.md``, from the plans of the jobs in this folder.

python workflows/benchmarks/sizing.py
"""

from pathlib import Path
from typing import Any

from mdpext_dask.job.spec import load_job
from mdpext_dask.pipeline.plan import plan_job

FOLDER = Path(__file__).resolve().parents[1]
# Jobs that need nothing but the package, and what to set in them.
JOBS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("manhattan-published.toml", ()),
    ("scale.toml", ()),
    ("scale.toml", ("domain.cell_km=0.31", "domain.refine=[4, 5, 8]", "outputs.count=300")),
)
WORKERS = ("1", "8", "32")


def table() -> list[str]:
    """Return the lines of the table."""
    sizes = ["store", "tasks", "a task", "client"]
    head = ["job", "records x outputs", *sizes, *(f"on {n}" for n in WORKERS)]
    rows = [head, ["---"] * len(head)]
    for file, settings in JOBS:
        planned = plan_job(load_job(FOLDER / file, settings))
        rows.append(_row(" ".join((f"`{file}`", *(f"`{text}`" for text in settings))), planned))
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(name: str, planned: dict[str, Any]) -> list[str]:
    seconds = [planned["seconds_by_workers"][workers]["total"] for workers in WORKERS]
    return [
        name,
        f"{planned['records']:,} x {planned['outputs']}",
        f"{planned['store_bytes'] / 1e9:,.2f} GB",
        f"{planned['tasks']:,}",
        f"{planned['peak_bytes_per_task'] / 2**20:,.0f} MiB",
        f"{planned['client_bytes'] / 2**20:,.0f} MiB",
        *(f"{value:,.0f} s" for value in seconds),
    ]


if __name__ == "__main__":
    print(*table(), sep="\n")
