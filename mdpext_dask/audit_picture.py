"""A picture of an audit: what is asked for is checked first, what is drawn is written whole or not at all."""

import importlib
import io
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.audit.figure import DOTS_PER_INCH, MapData, figure_of
from mdpext_dask.audit.report import AuditReport
from mdpext_dask.errors import SpecError, StoreError, first_line
from mdpext_dask.grid import Box
from mdpext_dask.store import MechanismStore
from mdpext_dask.subjects import Subject

SUFFIXES = (".png", ".pdf", ".svg")
# Of a map: more are a stain, and a slow one.
_MOST_POINTS = 20_000
# Whoever has a style of their own gets the same picture; and the same audit the same bytes, without a date.
_STYLE: list[Any] = ["default", {"font.size": 9, "svg.hashsalt": "mdpext"}]
_NO_DATE = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn or written, before any work is done for it.

    Parameters
    ----------
    path
        Where it is to be.

    Raises
    ------
    SpecError
        If its format is unknown, its folder is not there or cannot be written, a folder has its name, or
        matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(f"--picture: {path}: must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        if path.is_dir():
            raise SpecError(f"--picture: {path}: is a folder")
        if not path.parent.is_dir():
            raise SpecError(f"--picture: {path}: there is no folder {path.parent}")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SpecError(f"--picture: {path}: cannot be written: {first_line(error)}") from None
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise SpecError(
            f"--picture: matplotlib is needed: pip install 'mdpext-dask[plot]' ({first_line(error)})"
        ) from None


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
        A file that :func:`check_picture` has passed; one that is there is replaced.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    content = _rendered(report, drawn, map_data(report, subject), path.suffix.lower())
    try:
        # A link stays one.
        target = path.resolve()
        partial = target.with_name(f".mdpext-{uuid.uuid4().hex}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"--picture: {path}: cannot be written: {first_line(error)}") from None


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
    from matplotlib import style

    content = io.BytesIO()
    with style.context(_STYLE), warnings.catch_warnings():
        # Names of files may be in any script.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = figure_of(report, drawn, places)
        figure.savefig(content, format=suffix[1:], dpi=DOTS_PER_INCH, metadata=_NO_DATE.get(suffix))
    return content.getvalue()


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
