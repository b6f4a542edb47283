"""What can be shown of a whole store: one output's column, and the card of a notebook."""

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from mdpext_dask.errors import SpecError
from mdpext_dask.problem.notebook_card import MOST_DOTS, MOST_READ, card, prior_in_squares, small_map
from mdpext_dask.store.mechanism_store import MechanismStore


def column_of(store: MechanismStore, remap: NDArray[np.intp], output: int, step: int) -> xr.DataArray:
    """Return M(y|·) of one output; see :meth:`mdpext_dask.sampling.mechanism.Mechanism.column`.

    Parameters
    ----------
    store
        The store.
    remap
        What is reported instead of each output, shape (K,).
    output, step
        As there.

    Raises
    ------
    SpecError
        If there is no such output, or `step` is less than 1.
    """
    for name, value, least in (("output", output, 0), ("step", step, 1)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise SpecError(f"{name}: must be a whole number of at least {least}, got {value!r}")
    if output >= len(remap):
        raise SpecError(f"output: {output} is not one of 0 to {len(remap) - 1}")
    every = slice(None, None, step)
    x, y = store.grid.x_km()[::step], store.grid.y_km()[::step]
    total = np.zeros((len(x), len(y)))
    for source in np.flatnonzero(remap == output).tolist():
        total += store.read("probability", every, every, slice(source, source + 1))[..., 0]
    return xr.DataArray(
        total,
        dims=("x", "y"),
        coords={"x": x, "y": y, "output": int(output)},
        name="probability",
        attrs={"long_name": "probability of reporting the output", "units": "1"},
    )


def card_of(store: MechanismStore) -> str:
    """Return what notebooks show: the promise, the proof, the size; prior and outputs on a map."""
    attributes, grid = store.attributes, store.grid
    where = "in the plane of its file" if store.projection is None else "on the ground"
    loss, inside = attributes.get("loss_km"), attributes.get("records_inside", grid.records)
    certified = float(attributes["epsilon_certified"])
    rows = [
        ("store", store.url),
        ("promised", f"ε = {attributes['epsilon_per_km']:g} per km {where}, metric p = {store.metric_p:g}"),
        ("certified", f"ε = {certified:.6g} per km in the plane, over all pairs of records"),
        ("records", f"{' x '.join(map(str, grid.shape))}, {inside:,} in the region"),
        ("outputs", f"{store.outputs:,}"),
        ("to the nearest record", f"at most {1000 * attributes['quantisation_km']:.3g} m"),
        *([] if loss is None else [("expected loss", f"{loss:.4g} km")]),
    ]
    picture = ""
    if grid.records <= MOST_READ:
        outputs = store.output_xy_km()
        densities, step = prior_in_squares(np.asarray(store.read("prior"), dtype=np.float64), grid)
        picture = small_map(grid.box, densities, step * grid.spacing_km, outputs[:MOST_DOTS])
    return card("Location mechanism", rows, picture)
