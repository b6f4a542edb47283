"""A picture of an audit."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.figure import MapData, figure_of
from mdpext_dask.auditors.result import AuditReport
from mdpext_dask.auditors.subject import Subject
from mdpext_dask.errors import StoreError
from mdpext_dask.files import rendered, write_whole
from mdpext_dask.problem.grid import Box
from mdpext_dask.store.mechanism_store import MechanismStore

# Of a map: more are a stain, and a slow one.
_MOST_POINTS = 20_000


def draw_audit(report: AuditReport, drawn: AuditReport, subject: Subject, path: Path) -> None:
    """Draw an audit and write it, as a whole or not at all.

    Parameters
    ----------
    report
        The audit.
    drawn
        A sampled audit of the same, whose pairs are shown by distance; the audit itself if it is one.
    subject
        What was audited.
    path
        A file that :func:`mdpext_dask.files.check_picture` has passed; one that is there is replaced.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    content = _rendered(report, drawn, map_data(report, subject), path.suffix.lower())
    write_whole(path, lambda partial: partial.write_bytes(content))


def map_data(report: AuditReport, subject: Subject) -> MapData:
    """Return what the map of an audit shows.

    Parameters
    ----------
    report
        The audit.
    subject
        What was audited: a store's blocks and outputs, or the records of a plain array, some of them if there
        are many.
    """
    source, store = subject.source, subject.store
    if store is not None:
        grid = store.grid
        x, y = grid.x_km(), grid.y_km()
        mismatches = report.details.get("boundary_mismatches", ())
        i, j = np.array([mismatch["record"] for mismatch in mismatches], dtype=np.intp).reshape(-1, 2).T
        return MapData(
            box=Box(float(x[0]), float(y[0]), float(x[-1]), float(y[-1])),
            axes=("east", "north"),
            records=source.records,
            outputs_km=_outputs_km(store),
            borders_km=_borders_km(store),
            mismatches_km=np.stack([x[i], y[j]], axis=-1),
            attribution=str(store.attributes.get("attribution", "")),
        )
    xy_km = source.xy_km(np.arange(source.records))
    box = Box.around(xy_km)
    if len(xy_km) > _MOST_POINTS:
        # At random: every k-th of a lattice would be a pattern that is not there.
        xy_km = xy_km[np.random.default_rng(0).choice(len(xy_km), _MOST_POINTS, replace=False)]
    return MapData(box, ("x", "y"), source.records, xy_km)


def _rendered(report: AuditReport, drawn: AuditReport, places: MapData, suffix: str) -> bytes:
    return rendered(lambda: figure_of(report, drawn, places), suffix)


def _outputs_km(store: MechanismStore) -> NDArray[np.float64]:
    """Return where outputs are, float64 of shape (outputs, 2), in km; none of them if that is damaged."""
    try:
        places = np.stack([store.read(name) for name in ("output_x", "output_y")], axis=-1)
    except (StoreError, ValueError):
        return np.empty((0, 2))
    return np.asarray(places[np.isfinite(places).all(axis=1)], dtype=np.float64)


def _borders_km(store: MechanismStore) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    grid, plan = store.grid, store.plan
    x, y = grid.x_km(), grid.y_km()
    columns = [block.cells_x.start for block in plan if block.cells_y.start == 0]
    rows = [block.cells_y.start for block in plan if block.cells_x.start == 0]
    return x[np.array([*columns, grid.cells_x]) * grid.factor], y[
        np.array([*rows, grid.cells_y]) * grid.factor
    ]
