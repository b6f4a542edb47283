"""A problem of the user's own: loss matrix, grid, outputs and prior in one NumPy ``.npz`` file.

| key | shape | unit | |
|---|---|---|---|
| ``x_km``, ``y_km`` | (n_x,), (n_y,) | km | fine grid, x to the east, y to the north, one spacing for both |
| ``output_xy_km`` | (K, 2) | km | outputs, inside the grid's rectangle |
| ``loss_km`` | (n_x, n_y, K) | km | ``loss_km[i, j, k]``: loss of reporting output k from (x_i, y_j) |
| ``prior`` | (n_x, n_y) | 1 | optional, any scale; without it the prior is uniform |
| ``centre_lon``, ``centre_lat`` | () | degrees | optional: the centre of the projection that x and y are in |

Only the loss matrix is large. Its shape and type are read from its header, so that a job can be planned, and
refused if it needs too much memory, without reading the matrix.
"""

import difflib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, SpecError, first_line
from mdpext_dask.job.spec import BUILTIN_PREFIX
from mdpext_dask.problem.grid import Box, Grid
from mdpext_dask.problem.projection import Projection

_REQUIRED = ("x_km", "y_km", "output_xy_km", "loss_km")
_CENTRE = ("centre_lon", "centre_lat")
_OPTIONAL = ("prior", *_CENTRE)
# Raised by opening and unpacking an archive that is missing, truncated, malformed, encrypted or too large.
_UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile,
)  # fmt: skip
# How far the coordinates may be from one spacing, as a share of it.
_SPACING_TOLERANCE = 1e-6
# How far ``domain.cell_km`` may be from the file's value, as a share of it: it is often rounded.
_CELL_TOLERANCE = 1e-3
# A key this close to an optional one counts as misspelt: without its centre, a file is charged no distortion.
_LOOKS_LIKE = 0.8


@dataclass(frozen=True)
class ProblemFile:
    """A loss file without its matrix.

    Parameters
    ----------
    path
        The file.
    x_km, y_km
        Coordinates of the records, float64 of shape (n_x,) and (n_y,), in km, evenly spaced.
    spacing_km
        Their spacing h, in km.
    output_xy_km
        Outputs, float64 of shape (K, 2), in km.
    prior
        π of the records, float64 of shape (n_x, n_y), summing to 1.
    projection
        The projection whose plane x and y are in; None where the file has no centre.
    loss_dtype
        Type in which the loss is kept: float32 or float64.
    notes
        What a user should know.
    """

    path: Path
    x_km: NDArray[np.float64]
    y_km: NDArray[np.float64]
    spacing_km: float
    output_xy_km: NDArray[np.float64]
    prior: NDArray[np.float64]
    projection: Projection | None
    loss_dtype: np.dtype[Any]
    notes: tuple[str, ...]

    @property
    def loss_shape(self) -> tuple[int, int, int]:
        """Shape (n_x, n_y, K) of the loss."""
        return len(self.x_km), len(self.y_km), len(self.output_xy_km)

    @property
    def loss_bytes(self) -> int:
        """Bytes of the loss in memory."""
        return prod(self.loss_shape) * self.loss_dtype.itemsize

    def grid(self, refine: tuple[int, ...], cell_km: float | None) -> Grid:
        """Return the grid whose fine lattice is that of the file.

        Parameters
        ----------
        refine
            Subdivisions per level; a source cell is their product F times the spacing.
        cell_km
            Side of a source cell as the job states it, in km, if it does.

        Raises
        ------
        SpecError
            If source cells of F steps do not fill the grid, or `cell_km` is not F times the spacing.
        """
        factor = prod(refine)
        steps = len(self.x_km) - 1, len(self.y_km) - 1
        if steps[0] % factor or steps[1] % factor:
            common = gcd(*steps)
            fitting = ", ".join(str(f) for f in range(1, common + 1) if common % f == 0)
            raise SpecError(
                f"domain.refine: {list(refine)} has the product {factor}, which does not divide the "
                f"{steps[0]} x {steps[1]} steps of the {steps[0] + 1} x {steps[1] + 1} grid in "
                f"{self.path}; products that do: {fitting}"
            )
        side = self.spacing_km * factor
        if cell_km is not None and abs(cell_km - side) > _CELL_TOLERANCE * side:
            raise SpecError(
                f"domain.cell_km: {cell_km:g} is not the source cell of {self.path}, {factor} steps of "
                f"{self.spacing_km:g} km = {side:g} km; leave it out or change domain.refine"
            )
        cells_x, cells_y = (count // factor for count in steps)
        return Grid(float(self.x_km[0]), float(self.y_km[0]), cells_x, cells_y, side, refine)

    def read_loss(self) -> NDArray[Any]:
        """Return the loss in km, float32 or float64 of shape (n_x, n_y, K).

        Raises
        ------
        DataError
            If it cannot be read, has changed its shape, or holds a number that is not finite or negative.
        """
        with _opened(self.path) as archive:
            values = _member(archive, self.path, "loss_km")
        _check_shape(self.path, "loss_km", values.shape, self.loss_shape)
        loss = np.ascontiguousarray(values, dtype=self.loss_dtype)
        for i, row in enumerate(loss):
            _check_not_negative(self.path, "loss_km", row, i)
        return loss


def _bad(path: Path, complaint: str) -> DataError:
    return DataError(f"loss.file: {path}: {complaint}")


def read_problem(name: str) -> ProblemFile:
    """Read all of a loss file but the loss, and check that its parts fit together.

    Parameters
    ----------
    name
        Path of the file.

    Raises
    ------
    DataError
        If it is not an ``.npz`` file, or a key is missing, of the wrong shape or has numbers that cannot be.
    """
    path = Path(name)
    if name.startswith(BUILTIN_PREFIX):
        raise DataError(f"loss.file: {name}: there are no built-in loss files; give a path")
    with _opened(path) as archive:
        found = set(archive.files)
        if missing := [key for key in _REQUIRED if key not in found]:
            raise _bad(path, f"{missing[0]} is missing; found {', '.join(sorted(found)) or 'nothing'}")
        unused, absent = (
            sorted(found - {*_REQUIRED, *_OPTIONAL}),
            [key for key in _OPTIONAL if key not in found],
        )
        for key in unused:
            if close := difflib.get_close_matches(key, absent, n=1, cutoff=_LOOKS_LIKE):
                raise _bad(path, f"{key} is not a key; did you mean {close[0]}?")
        x, y = (_coordinates(path, key, _numbers(archive, path, key)) for key in ("x_km", "y_km"))
        outputs = _numbers(archive, path, "output_xy_km")
        prior = _numbers(archive, path, "prior") if "prior" in found else None
        centre = {key: _numbers(archive, path, key) for key in _CENTRE if key in found}
        loss_shape, loss_dtype = _header(archive, path, "loss_km")
        kinds = [_header(archive, path, key)[1] for key in ("x_km", "y_km")]
    if outputs.ndim != 2 or outputs.shape[1] != 2 or len(outputs) == 0:
        raise _bad(path, f"output_xy_km has the shape {outputs.shape}, but must have (K, 2), K >= 1")
    _check_shape(path, "loss_km", loss_shape, (len(x), len(y), len(outputs)))
    _check_outputs(path, outputs, Box(float(x[0]), float(y[0]), float(x[-1]), float(y[-1])))
    # What rounding does to coordinates that were saved as float32 is no unevenness.
    rounding = max(float(np.finfo(kind).eps) if kind.kind == "f" else 0.0 for kind in kinds)
    return ProblemFile(
        path=path,
        x_km=x,
        y_km=y,
        spacing_km=_spacing(path, x, y, rounding),
        output_xy_km=outputs,
        prior=_prior(path, prior, (len(x), len(y))),
        projection=_projection(path, centre),
        # Halves and whole numbers are kept as float64, which holds them exactly.
        loss_dtype=np.dtype(np.float32 if (loss_dtype.kind, loss_dtype.itemsize) == ("f", 4) else np.float64),
        notes=(f"{path}: {', '.join(unused)} is not used",) if unused else (),
    )


@contextmanager
def _opened(path: Path) -> Iterator[NpzFile]:
    """Open the file, and turn whatever is wrong with the file as such into one line."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise _bad(path, "not an .npz file; numpy.savez makes one")
        archive = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise _bad(path, "no such file") from None
    except _UNREADABLE as error:
        if isinstance(error, DataError):
            raise
        raise _bad(path, f"not a readable .npz file: {first_line(error)}") from None
    with archive:
        yield archive


def _member(archive: NpzFile, path: Path, key: str) -> NDArray[Any]:
    """Return an array of the file as it is."""
    _header(archive, path, key)
    try:
        return np.asarray(archive[key])
    except _UNREADABLE as error:
        raise _bad(path, f"{key} cannot be read: {first_line(error)}") from None


def _numbers(archive: NpzFile, path: Path, key: str) -> NDArray[np.float64]:
    """Return an array of the file as finite float64."""
    values = np.asarray(_member(archive, path, key), dtype=np.float64)
    _complain(path, key, values, ~np.isfinite(values), "is not a finite number")
    return values


def _header(archive: NpzFile, path: Path, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of an array of the file without reading it; only real numbers are accepted."""
    assert archive.zip is not None  # it is open
    formats = np.lib.format
    try:
        with archive.zip.open(f"{key}.npy") as member:
            old = formats.read_magic(member) == (1, 0)
            read = formats.read_array_header_1_0 if old else formats.read_array_header_2_0
            shape, _, dtype = read(member)
    except _UNREADABLE as error:
        raise _bad(path, f"{key} cannot be read: {first_line(error)}") from None
    if dtype.kind not in "fiu":
        raise _bad(path, f"{key} holds {dtype}, not numbers; save it as float64")
    return tuple(shape), dtype


def _coordinates(path: Path, key: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    if values.ndim != 1 or len(values) < 2:
        raise _bad(path, f"{key} has the shape {values.shape}, but must be a row of at least 2 numbers")
    step = np.diff(values)
    if not (step > 0).all():
        i = int(np.argmax(step <= 0))
        pair = f"{key}[{i}] = {values[i]:g} is followed by {values[i + 1]:g}"
        raise _bad(path, f"{key} must increase, but {pair}")
    return values


def _spacing(path: Path, x: NDArray[np.float64], y: NDArray[np.float64], rounding: float) -> float:
    """Return the one spacing of both axes, in km; coordinates may be off by a share `rounding` of them."""
    spacing = float((x[-1] - x[0]) / (len(x) - 1))
    for key, values in (("x_km", x), ("y_km", y)):
        step = np.diff(values)
        off = np.abs(step - spacing)
        if off.max() > _SPACING_TOLERANCE * spacing + rounding * np.abs(values).max():
            i = int(np.argmax(off))
            raise _bad(
                path,
                f"the spacing must be one and the same in x_km and y_km, but "
                f"{key}[{i + 1}] - {key}[{i}] = {step[i]:.9g} km and the mean of x_km is {spacing:.9g} km",
            )
    return spacing


def _check_outputs(path: Path, outputs: NDArray[np.float64], box: Box) -> None:
    outside = ~box.contains(outputs)
    if outside.any():
        k = int(np.argmax(outside))
        first = f"number {k} at x = {outputs[k, 0]:.3f} km, y = {outputs[k, 1]:.3f} km"
        how_many = f"{int(outside.sum())} of {len(outputs)} outputs"
        raise _bad(path, f"output_xy_km: {how_many} lie outside the grid, the first is {first}")
    places, counts = np.unique(outputs, axis=0, return_counts=True)
    if (counts > 1).any():
        x, y = places[np.argmax(counts > 1)]
        raise _bad(path, f"output_xy_km: two outputs are the same place, x = {x:g} km, y = {y:g} km")


def _prior(path: Path, values: NDArray[np.float64] | None, shape: tuple[int, int]) -> NDArray[np.float64]:
    if values is None:
        return np.full(shape, 1 / prod(shape))
    _check_shape(path, "prior", values.shape, shape)
    _check_not_negative(path, "prior", values)
    if not values.any():
        raise _bad(path, "prior is zero everywhere; leave it out for a uniform one")
    # Not by the sum, which may be too large for a float64.
    relative = values / values.max()
    return np.asarray(relative / relative.sum())


def _projection(path: Path, centre: dict[str, NDArray[np.float64]]) -> Projection | None:
    if not centre:
        return None
    for key, limit in zip(_CENTRE, (180, 90), strict=True):
        if key not in centre:
            raise _bad(path, f"{key} is missing; give both of {' and '.join(_CENTRE)}, or none")
        if centre[key].size != 1:
            raise _bad(path, f"{key} has the shape {centre[key].shape}, but must be one number")
        if abs(centre[key].item()) > limit:
            raise _bad(path, f"{key} = {centre[key].item():g} is out of range; it must be in degrees")
    return Projection(centre["centre_lon"].item(), centre["centre_lat"].item())


def _check_shape(path: Path, key: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise _bad(
            path, f"{key} has the shape {found}, but must have {wanted}, as x_km, y_km and output_xy_km say"
        )


def _check_not_negative(path: Path, key: str, values: NDArray[Any], *before: int) -> None:
    # A comparison with not-a-number is false, so this finds it too.
    bad = ~((values >= 0) & np.isfinite(values))
    _complain(path, key, values, bad, "must be finite and not negative", *before)


def _complain(
    path: Path, key: str, values: NDArray[Any], bad: NDArray[np.bool_], complaint: str, *before: int
) -> None:
    """Name the first bad number, if there is one; `before` are the indices of which `values` is a part."""
    if bad.any():
        where = tuple(int(axis[0]) for axis in np.nonzero(bad))
        index = ", ".join(map(str, (*before, *where)))
        at = f"{key}[{index}]" if index else key
        raise _bad(path, f"{at} = {values[where]:g} {complaint}")
