"""What audits cost on real cities, on one worker and on two.

    python workflows/benchmarks/audits.py --roads FOLDER [--epsilon 0.5 1 1.5] [--budget half certified]
    [--repeats 3]

FOLDER holds the networks of Rome and London, as folders of CSV files; Manhattan's is in the package. Each
city is built once for every ε and budget; then, on workers that have started and have done each of them once:

- *read*: every block is read, with the row after it, and nothing else is done;
- *certificate*: all pairs, in one pass;
- *exhaustive*: every triple, bounds used where they decide;
- *sampled*: a million pairs, by distance.

The least of all repeats counts. Before that, the dense kernel, on one core, on tiles of random numbers.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mdpext_dask.auditors.methods import Sampling, certify, compare_all, sample_pairs
from mdpext_dask.auditors.pairs.compare import largest_of
from mdpext_dask.auditors.pairs.tiles import TILE
from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.auditors.subject import Subject, store_subject
from mdpext_dask.compute.executor import Executor, open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.events import silent
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import load_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.store.mechanism_store import MechanismStore

HERE = Path(__file__).resolve().parents[1]
# Source cells of the published experiments.
LONDON_CELL_KM = 6.78
PAIRS = 1_000_000


def read_block(url: str, index: int) -> None:
    """Read one block and the row after it."""
    store = MechanismStore.open(url)
    block = store.plan[index]
    store.read("probability", block.closed_x, block.closed_y)


def cities(roads: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield names, job files and what to set in them."""
    yield "Rome", HERE / "rome.toml", [f"domain.roads={roads / 'rome'}"]
    london = [f"domain.roads={roads / 'london'}", f"domain.cell_km={LONDON_CELL_KM}"]
    yield "London", HERE / "rome.toml", london
    yield "Manhattan", HERE / "manhattan-published.toml", []


def kernel_rate(outputs: int, repeats: int) -> float:
    """Return how many triples one core compares in a second in the dense kernel."""
    rng = np.random.default_rng(0)
    logs, logs_prime = rng.normal(size=(2, outputs, TILE))
    out, scratch, every = np.empty((TILE, TILE)), np.empty((TILE, TILE)), np.arange(outputs)

    def many() -> None:
        for _ in range(50):
            largest_of(logs, logs_prime, every, out, scratch)

    return 50 * outputs * TILE**2 / least(many, repeats)


def least(work: Callable[[], object], repeats: int) -> float:
    """Return the least time that something takes, in seconds, after it has been done once."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def timings(subject: Subject, executor: Executor, repeats: int) -> dict[str, tuple[float, Any]]:
    """Return seconds, and the last report, of everything that is measured."""
    stages = Stages(silent)
    store = subject.store
    assert store is not None
    blocks = [(store.url, index) for index in range(store.plan.blocks)]
    reports: dict[str, AuditReport | None] = {"read": None}

    def read() -> None:
        for _ in executor.map("read", read_block, blocks):
            pass

    def certificate() -> None:
        reports["certificate"] = certify(subject, executor, stages)

    def exhaustive() -> None:
        reports["exhaustive"] = compare_all(subject, executor, stages)

    def sampled() -> None:
        reports["sampled"] = sample_pairs(subject, Sampling(pairs=PAIRS, random_seed=0), executor, stages)

    found = {}
    for work in (read, certificate, exhaustive, sampled):
        seconds = least(work, repeats)
        found[work.__name__] = seconds, reports[work.__name__]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--roads", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    parser.add_argument("--budget", nargs="+", default=["half", "certified"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for outputs in (20, 64):
        rate = kernel_rate(outputs, 5) / 1e6
        print(f"dense kernel, {outputs} outputs: {rate:.0f} million triples/s on a core")
    print(
        "\n| city | records x outputs | ε | budget | certified | audited | read | certificate | "
        "over a read | exhaustive | of all triples | sampled |\n" + "|---" * 12 + "|"
    )
    for name, job, overrides in cities(options.roads):
        for epsilon in options.epsilon:
            for budget in options.budget:
                sets = [*overrides, f"privacy.epsilon_per_km={epsilon}", f"privacy.budget={budget}"]
                with tempfile.TemporaryDirectory() as folder:
                    url = f"{folder}/s.zarr"
                    build(load_job(job, sets), url)
                    subject = store_subject(MechanismStore.open(url))
                    found = {}
                    for workers in (1, 2):
                        with open_executor(ClusterSection(kind="local", workers=workers)) as executor:
                            found[workers] = timings(subject, executor, options.repeats)
                print(row(name, epsilon, budget, found), flush=True)


def row(name: str, epsilon: float, budget: str, found: dict[int, dict[str, tuple[float, Any]]]) -> str:
    """Return a row of the table; seconds on one worker → two."""
    certificate, exhaustive = found[2]["certificate"][1], found[2]["exhaustive"][1]

    def seconds(work: str) -> str:
        return f"{found[1][work][0]:.2f} → {found[2][work][0]:.2f} s"

    over = f"{found[2]['certificate'][0] / found[2]['read'][0]:.2f}"
    share = f"{exhaustive.details['triples_compared'] / exhaustive.triples_checked:.2%}"
    cells = (
        name, f"{exhaustive.records:,} x {exhaustive.outputs}", f"{epsilon:g}", f"`{budget}`",
        f"{certificate.epsilon:.4f}", f"{exhaustive.epsilon:.4f}", seconds("read"), seconds("certificate"),
        over, seconds("exhaustive"), share, seconds("sampled"),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
