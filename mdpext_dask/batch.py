"""Obfuscating a file of locations."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pandas as pd

from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.mechanism import OutsideRule, open_mechanism
from mdpext_dask.tables import LONLAT, PLANAR, read_points


def sample_file(
    store: str, points: Path, output: Path, outside: str = "nearest", *, remap: bool = False
) -> dict[str, Any]:
    """Draw one reported place for every point of a CSV file, and write them as CSV.

    The output has the columns row (of the input, from 0), output, lon, lat (x_km, y_km where the mechanism
    is planar); nothing else of the input is carried over, since any other column may give the place away.
    It is written whole or not at all.

    Parameters
    ----------
    store
        A finished mechanism store.
    points
        CSV with columns lon,lat or x_km,y_km; the latter where the mechanism is planar.
    output
        Where the reports go.
    outside
        Rule for points outside the grid or the region; see
        :meth:`mdpext_dask.mechanism.Mechanism.sample_points`.
    remap
        Whether to report what the store's remap says; see :func:`mdpext_dask.mechanism.open_mechanism`.

    Raises
    ------
    SpecError, DataError
        If the rule is not known, the points cannot be read, or the output cannot be written.
    """
    started = time.perf_counter()
    if outside not in get_args(OutsideRule):
        raise SpecError(f"--outside: must be {', '.join(get_args(OutsideRule))}, got {outside!r}")
    target = output.resolve()
    if Path(store).resolve() in target.parents:
        raise SpecError(f"{output}: lies inside the store")
    mechanism = open_mechanism(store, remap=remap)
    places = read_points(points, weights=False)
    if mechanism.planar and not places.planar:
        raise DataError(
            f"{points}: has columns lon,lat, but {store} is planar, its loss file has no centre_lon, "
            "centre_lat; use x_km,y_km"
        )
    drawn, was_outside = mechanism.sample_points(
        places.coordinates, planar=places.planar, outside=cast(OutsideRule, outside)
    )
    if places.planar and was_outside.all() and mechanism.holds_degrees(places.coordinates):
        raise DataError(f"{points}: x_km,y_km look like degrees; name the columns lon,lat")
    kept = np.flatnonzero(drawn >= 0)
    columns = PLANAR if mechanism.planar else LONLAT
    reported = (mechanism.output_xy_km if mechanism.planar else mechanism.output_lonlat)[drawn[kept]]
    table = pd.DataFrame({"row": kept, "output": drawn[kept], **dict(zip(columns, reported.T, strict=True))})
    _write_whole(table, target)
    return {
        "points": len(kept),
        "outside": int(was_outside.sum()),
        "outside_rule": outside,
        "remap": remap,
        "max_quantisation_km": mechanism.max_quantisation_km,
        "seconds": time.perf_counter() - started,
    }


def _write_whole(table: pd.DataFrame, path: Path) -> None:
    """Write beside the target first, so that a full disk leaves no half a file under its name."""
    try:
        if path.exists() and not path.is_file():
            table.to_csv(path, index=False)  # a device or a pipe is written to, not replaced
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            table.to_csv(temporary, index=False)
            # mkstemp is private to the user; the result gets the permissions of any new file.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)  # noqa: PTH101
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}") from None
