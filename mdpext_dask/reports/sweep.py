"""One job with several ε, numbers of outputs and sizes of cells: each is built, and what it costs is kept.

What has been found is in the folder of results, by the identity of job and software: a sweep that was killed,
or is given again with more values, builds what is missing.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mdpext_dask.errors import StoreError, first_line
from mdpext_dask.events import Note, Observer, silent
from mdpext_dask.files import rendered, scratch_in, whole_file
from mdpext_dask.job.spec import JobSpec, fingerprint_of
from mdpext_dask.pipeline.run import build
from mdpext_dask.reports.compare.answers import software
from mdpext_dask.reports.compare.protocol import facts_of, prepared

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is chosen from ε, as it is where a job leaves it out.
AUTO = "auto"
PICTURE = "error.png"
_ANSWERS, _STORES = "answers", "stores"
# What a row has of the summary of its store.
_OF_SUMMARY = (
    "epsilon_certified", "method", "records", "outputs", "loss_km", "plain_loss_km",
    "plain_standard_error_km", "over_plain", "mechanism_sha256",
)  # fmt: skip
_FIGURE_INCHES = (6.0, 4.4)


@dataclass(frozen=True)
class Setting:
    """One job of a sweep.

    Parameters
    ----------
    spec
        The job.
    epsilon_per_km
        Its ε, in 1/km.
    outputs, cell_km
        What was asked for: a number, :data:`AUTO`, or None for what the job says.
    """

    spec: JobSpec
    epsilon_per_km: float
    outputs: int | str | None
    cell_km: float | str | None

    @property
    def name(self) -> str:
        """In words: ``ε = 5/km, 100 outputs``."""
        return f"ε = {self.epsilon_per_km:g}/km{''.join(f', {said}' for said in self.beside)}"

    @property
    def beside(self) -> list[str]:
        """What was asked for beside ε, in words."""
        outputs = [] if self.outputs is None else [f"{self.outputs} outputs"]
        cell = f"{self.cell_km} cells" if self.cell_km == AUTO else f"cells of {self.cell_km} km"
        return outputs + ([] if self.cell_km is None else [cell])

    @property
    def key(self) -> str:
        """SHA-256 (hex) of all that decides what it costs."""
        return fingerprint_of({"software": software(), **self.spec.identity()})


def settings_of(
    spec: JobSpec,
    epsilons: Sequence[float],
    outputs: Sequence[int | str] = (),
    cells_km: Sequence[float | str] = (),
) -> list[Setting]:
    """Return the jobs of a sweep: all combinations, those that are the same job once.

    Parameters
    ----------
    spec
        The job that they are made from.
    epsilons
        Values of ``privacy.epsilon_per_km``.
    outputs
        Numbers of outputs, chosen as in a job with `count` (else: road nodes, drawn), or :data:`AUTO`;
        default: as the job says.
    cells_km
        Values of ``domain.cell_km``, or :data:`AUTO`, which leaves out `refine` as well; default: as the job
        says.

    Raises
    ------
    SpecError
        If a combination is no job.
    """
    found: dict[str, Setting] = {}
    for epsilon, count, cell_km in itertools.product(epsilons, outputs or (None,), cells_km or (None,)):
        changes: dict[str, dict[str, Any]] = {"privacy": {"epsilon_per_km": epsilon}}
        if count is not None:
            choose = spec.outputs.choose if spec.outputs.count is not None else "road-nodes"
            drawn = {"choose": choose, "count": count}
            changes["outputs"] = {"choose": AUTO} if count == AUTO else drawn
        if cell_km is not None:
            changes["domain"] = {"cell_km": None, "refine": None} if cell_km == AUTO else {"cell_km": cell_km}
        setting = Setting(spec.replace(**changes), epsilon, count, cell_km)
        found.setdefault(setting.spec.fingerprint(), setting)
    return list(found.values())


def sweep(
    settings: Sequence[Setting],
    folder: Path,
    *,
    keep_stores: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Build every job, and return one row for each.

    Parameters
    ----------
    settings
        The jobs, from :func:`settings_of`.
    folder
        Where results are kept; what is there already is not built again.
    keep_stores
        Whether stores are kept, in the folder; else each is deleted once its row is known.
    overwrite
        Whether the folder may hold something else than an earlier sweep.
    workers
        Number of local processes; default: the job's.
    observer
        Is told of progress.

    Returns
    -------
    ``rows``, plain JSON values in the order of `settings`, and ``files``, what was written.

    Raises
    ------
    SpecError, DataError
        If a job cannot be done; before any is built.
    StoreError
        If the folder holds something else, or cannot be written.
    GuaranteeViolation
        If a store does not keep its ε.
    """
    for setting in settings:
        facts_of(setting.name, setting.spec)
    answers = prepared(folder, overwrite, "sweep") / _ANSWERS
    rows = []
    for number, setting in enumerate(settings, 1):
        answer = answers / f"{setting.key}.json"
        kept = folder / _STORES / f"{setting.key[:16]}.zarr"
        found = None if keep_stores and not kept.exists() else _read(answer)
        if found is None:
            observer(Note(f"{number} of {len(settings)}: {setting.name}"))
            with scratch_in(folder.absolute()) as scratch:
                place = kept if keep_stores else scratch / "mechanism.zarr"
                summary = build(setting.spec, place, workers=workers, observer=observer)
            found = {name: summary[name] for name in _OF_SUMMARY}
            found["seconds"] = summary["seconds"]["total"]
            with whole_file(answer) as file:
                file.write(json.dumps(found, allow_nan=False).encode())
        asked = {"epsilon_per_km": setting.epsilon_per_km, "asked": setting.beside}
        rows.append({**asked, **found, "store": str(kept) if kept.exists() else None})
    return {"rows": rows, "files": [str(file) for file in _write(folder, rows)]}


def _read(answer: Path) -> dict[str, Any] | None:
    """Return what was found before; None if it was not, or is damaged."""
    try:
        found = json.loads(answer.read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and found.keys() == {*_OF_SUMMARY, "seconds"}
    return found if whole else None


def _write(folder: Path, rows: Sequence[dict[str, Any]]) -> list[Path]:
    table = pd.DataFrame([{**row, "asked": "; ".join(row["asked"])} for row in rows])
    try:
        (folder / "results.json").write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")
        table.to_csv(folder / "table.csv", index=False)
        written = [folder / "table.csv", folder / "results.json"]
        try:
            picture = rendered(lambda: error_by_epsilon(rows), Path(PICTURE).suffix)
        except ImportError:  # matplotlib is an extra
            return written
        (folder / PICTURE).write_bytes(picture)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {first_line(error)}") from None
    return [folder / PICTURE, *written]


def error_by_epsilon(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Return a figure of error against ε: a line for jobs that differ in ε alone, dashed for plain noise."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_FIGURE_INCHES, layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: float(row["epsilon_per_km"])):
        lines.setdefault(", ".join(row["asked"]), []).append(row)
    for number, (name, line) in enumerate(lines.items()):
        epsilons = [row["epsilon_per_km"] for row in line]
        for key, style, of in (("loss_km", "o-", ""), ("plain_loss_km", "x--", "plain noise")):
            label = ", ".join(part for part in (of, name) if part) or "this job"
            values = [1000 * row[key] for row in line]
            axes.plot(epsilons, values, style, color=f"C{number}", label=label, markersize=5)
    axes.set(xscale="log", ylim=(0, None), xlabel="ε, 1/km", ylabel="expected error, m")
    ticks = sorted({float(row["epsilon_per_km"]) for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return figure
