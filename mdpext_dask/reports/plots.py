"""Plots for notebooks: each function draws into matplotlib axes and returns them.

`ax` are the axes to draw into; by default new ones are made. No other state of matplotlib changes. A
mechanism is given as :class:`mdpext_dask.sampling.mechanism.Mechanism`, or by the path or URL of its store.
The attribution of the data is written into the corner of a map, and must stay there.

A plot that is shown to others must not reveal a person's place: see :func:`plot_row`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.figure import draw_map, draw_ratios
from mdpext_dask.auditors.methods import Sampling, sample_pairs
from mdpext_dask.auditors.result import CERTIFICATE, SAMPLED, AuditReport
from mdpext_dask.auditors.subject import is_store, store_subject
from mdpext_dask.compute.executor import InlineExecutor, open_for_reader
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import SpecError, first_line
from mdpext_dask.evaluation.evaluate import measure_spread
from mdpext_dask.evaluation.figure import draw_loss
from mdpext_dask.events import silent
from mdpext_dask.problem import maps
from mdpext_dask.problem.notebook_card import prior_in_squares
from mdpext_dask.sampling.mechanism import Mechanism, open_mechanism
from mdpext_dask.store import objects
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import has_scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A mechanism, or the path or URL of its store.
Drawn = Mechanism | str | Path
# New axes of a map: height, what is beside it, and limits of its width.
_HEIGHT_INCHES, _BESIDE_INCHES, _WIDTHS_INCHES = 5.6, 1.4, (3.6, 9.0)
_PANEL_INCHES = 7.4, 4.4
# Squares along the longer side in which a prior is counted, large enough to be seen.
_PRIOR_SQUARES = 60
# Seeds along a side that are drawn as a grid; above, only the border.
_MOST_LINES = 120
# Area of an output with probability 1, in points squared.
_LARGEST_BUBBLE = 1500.0
# Pairs to draw by default.
_PAIRS = 20_000


def plot_domain(mechanism: Drawn, ax: "Axes | None" = None) -> "Axes":
    """Draw a mechanism's domain: road nodes, source cells, prior and outputs.

    Source cells outside the region are hatched.

    Parameters
    ----------
    mechanism
        The mechanism, or its store.
    ax
        Where to draw; default: new axes.

    Returns
    -------
    The axes, in km in the mechanism's plane.
    """
    store = _store_of(mechanism)
    axes = _axes(store, ax)
    _draw_nodes(axes, store)
    _draw_source_cells(axes, store)
    _draw_prior(axes, store, alpha=0.8)
    maps.draw_outputs(axes, store.output_xy_km())
    grid = store.grid
    seeds = f"{grid.seeds:,} seeds, " if has_scores(store.seed_attributes.get("extension", ())) else ""
    return _finished(axes, store, f"{grid.records:,} records, {seeds}{store.outputs:,} outputs")


def plot_prior(mechanism: Drawn, ax: "Axes | None" = None) -> "Axes":
    """Draw the prior as a density: probability per km², in squares large enough to be seen.

    Parameters
    ----------
    mechanism
        The mechanism, or its store.
    ax
        Where to draw; default: new axes.

    Returns
    -------
    The axes, in km in the mechanism's plane.
    """
    store = _store_of(mechanism)
    axes = _axes(store, ax)
    _draw_prior(axes, store)
    return _finished(axes, store, "prior")


def plot_row(
    mechanism: Drawn,
    *,
    lon: float | None = None,
    lat: float | None = None,
    x_km: float | None = None,
    y_km: float | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw M(·|x): the reports of a person at one place; larger dots are likelier.

    The place is marked, so this plot is only for those who know the place anyway.

    Parameters
    ----------
    mechanism
        The mechanism, or its store.
    lon, lat
        The place in degrees; or
    x_km, y_km
        in the plane, in km.
    ax
        Where to draw; default: new axes.

    Returns
    -------
    The axes, in km in the mechanism's plane.

    Raises
    ------
    SpecError
        If the place is not given in one of these ways.
    """
    opened, store = _mechanism_of(mechanism), _store_of(mechanism)
    row = opened.row(lon=lon, lat=lat, x_km=x_km, y_km=y_km)
    axes = _axes(store, ax)
    _draw_nodes(axes, store)
    _draw_bubbles(axes, opened.output_xy_km, row.values)
    axes.plot(float(row.x), float(row.y), "x", color="white", markersize=13, markeredgewidth=5, zorder=5)
    axes.plot(
        float(row.x), float(row.y), "x", color=maps.SIGNAL, markersize=11, markeredgewidth=2.5, zorder=5,
        label="place", gid="place",
    )  # fmt: skip
    return _finished(axes, store, "what a person at the cross reports")


def plot_output(mechanism: Drawn, output: int, ax: "Axes | None" = None) -> "Axes":
    """Draw M(y|·): the probability of one output, which is outlined, from each place.

    Reads the whole store. With more than 1,200 records along a side, every second, third, ... is shown.

    Parameters
    ----------
    mechanism
        The mechanism, or its store.
    output
        Which output, from 0.
    ax
        Where to draw; default: new axes.

    Returns
    -------
    The axes, in km in the mechanism's plane.

    Raises
    ------
    SpecError
        If there is no such output.
    """
    opened, store = _mechanism_of(mechanism), _store_of(mechanism)
    step = -(-max(store.grid.shape) // maps.MOST_SHOWN)
    column = opened.column(output, step=step).values
    axes = _axes(store, ax)
    maps.draw_field(axes, store.grid, 100 * column, f"probability of output {output} (%)", step=step, vmin=0)
    maps.draw_outputs(axes, opened.output_xy_km[output : output + 1])
    return _finished(axes, store, f"who reports output {output}")


def plot_loss(mechanism: Drawn, ax: "Axes | None" = None, *, workers: int | None = None) -> "Axes":
    """Draw the expected loss of each record with a prior: ℓ(x) = Σ_y M(y|x) c(x, y).

    Parameters
    ----------
    mechanism
        The mechanism, or its store.
    ax
        Where to draw; default: new axes.
    workers
        Number of local processes; default: only this one.

    Returns
    -------
    The axes, in km in the mechanism's plane.
    """
    store = _store_of(mechanism)
    with open_for_reader(workers, small=True) as executor:
        spread = measure_spread(store, executor, Stages(silent), keep_records=True)
    axes = _axes(store, ax)
    draw_loss(axes, store, spread)
    return _finished(axes, store, f"expected loss {spread.loss_km:.4g} km")


def plot_certificate(subject: AuditReport | Drawn, ax: "Axes | None" = None) -> "Axes":
    """Draw the certified ε of every block as a share of the limit, and the worst pairs.

    Parameters
    ----------
    subject
        The audit of a store by the certificate; or a mechanism or its store, whose last certificate is read.
    ax
        Where to draw; default: new axes.

    Returns
    -------
    The axes, in km in the mechanism's plane.

    Raises
    ------
    SpecError
        If the audit is not of a store, or there is no certificate.
    """
    report = subject if isinstance(subject, AuditReport) else _certificate_of(_store_of(subject))
    store = _audited_store(report)
    axes = _axes(store, ax)
    draw_map(axes, report, store_subject(store))
    maps.say_whose(axes, store.attribution)
    return axes


def plot_ratios(
    subject: AuditReport | Drawn, ax: "Axes | None" = None, *, pairs: int = _PAIRS, random_seed: int = 0
) -> "Axes":
    """Draw |log ratio| / (ε d) of random pairs by distance; values above 1 violate ε.

    Parameters
    ----------
    subject
        A sampled audit of anything; or any audit of a store, a mechanism or its store, from which pairs are
        then drawn.
    ax
        Where to draw; default: new axes.
    pairs, random_seed
        Number of pairs, and the seed that chooses them.

    Returns
    -------
    The axes.

    Raises
    ------
    SpecError
        If the audit is neither sampled nor of a store.
    """
    if isinstance(subject, AuditReport) and subject.method == SAMPLED:
        report = drawn = subject
    else:
        store = _audited_store(subject) if isinstance(subject, AuditReport) else _store_of(subject)
        how = Sampling(pairs=pairs, random_seed=random_seed)
        drawn = sample_pairs(store_subject(store), how, InlineExecutor(), Stages(silent))
        report = subject if isinstance(subject, AuditReport) else drawn
    axes = _new_axes(_PANEL_INCHES) if ax is None else ax
    draw_ratios(axes, report, drawn)
    return axes


# --- what is drawn --------------------------------------------------------------------------------


def _draw_nodes(axes: "Axes", store: MechanismStore) -> None:
    """Draw the nodes of the road network, if the store has one, as faint dots."""
    if store.problem_attributes.get("loss") == "travel":
        nodes = store.read("problem/node_xy")
        axes.scatter(
            nodes[:, 0], nodes[:, 1], s=0.6, color="0.72", linewidths=0, zorder=0.5,
            rasterized=len(nodes) > maps.MANY_POINTS, gid="roads",
        )  # fmt: skip


def _draw_source_cells(axes: "Axes", store: MechanismStore) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    grid = store.grid
    box = grid.box
    x = grid.x_km()[:: grid.factor]
    y = grid.y_km()[:: grid.factor]
    if max(len(x), len(y)) > _MOST_LINES:
        x, y = x[[0, -1]], y[[0, -1]]
    axes.vlines(x, box.south_km, box.north_km, color="0.5", linewidth=0.4, zorder=0.7, gid="seeds east")
    axes.hlines(y, box.west_km, box.east_km, color="0.5", linewidth=0.4, zorder=0.7, gid="seeds north")
    dropped = [
        Rectangle((grid.west_km + i * grid.cell_km, grid.south_km + j * grid.cell_km), *[grid.cell_km] * 2)
        for i, j in np.argwhere(~store.kept).tolist()
    ]
    if dropped:
        looks: dict[str, Any] = {"facecolor": "0.93", "edgecolor": "0.6", "linewidth": 0.0, "hatch": "////"}
        named: dict[str, Any] = {"label": "not in the region", "gid": "dropped"}
        axes.add_collection(PatchCollection(dropped, **looks, **named, zorder=0.8))


def _draw_prior(axes: "Axes", store: MechanismStore, **options: Any) -> None:
    """Draw the prior as a density, in squares of records large enough to be seen."""
    prior = np.asarray(store.read("prior"), dtype=np.float64)
    values, step = prior_in_squares(prior, store.grid, _PRIOR_SQUARES)
    maps.draw_field(axes, store.grid, values, "prior (1/km²)", step=step, vmin=0, zorder=1, **options)


def _draw_bubbles(axes: "Axes", xy_km: NDArray[np.float64], probability: NDArray[np.float64]) -> None:
    bubbles = axes.scatter(
        xy_km[:, 0], xy_km[:, 1], s=np.maximum(_LARGEST_BUBBLE * probability, 1.0), c=100 * probability,
        cmap=maps.SEQUENTIAL, vmin=0, edgecolors="black", linewidths=0.4, zorder=3, gid="row",
    )  # fmt: skip
    maps.colour_bar(axes, bubbles, "probability (%)")


# --- around it ------------------------------------------------------------------------------------


def _store_of(mechanism: Drawn) -> MechanismStore:
    return MechanismStore.open(objects.address_of(mechanism))


def _mechanism_of(mechanism: Drawn) -> Mechanism:
    return mechanism if isinstance(mechanism, Mechanism) else open_mechanism(mechanism)


def _certificate_of(store: MechanismStore) -> AuditReport:
    found = objects.get_json(store.objects, f"audit/{CERTIFICATE}.json")
    if not isinstance(found, Mapping):
        raise SpecError(f"{store.url}: has no certificate yet; run the job again, or audit it")
    # Stores are moved: it is this one's, whatever it was called.
    return replace(AuditReport.from_json(found), subject=store.url)


def _audited_store(report: AuditReport) -> MechanismStore:
    if not is_store(report.subject):
        raise SpecError(f"{report.subject}: is no mechanism store, so there is nothing to draw the report on")
    return MechanismStore.open(report.subject)


def _new_axes(size_inches: tuple[float, float]) -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise SpecError(
            f"plots: matplotlib is needed: pip install 'mdpext-dask[report]' ({first_line(error)})"
        ) from None
    axes: Axes = plt.subplots(figsize=size_inches, layout="constrained")[1]
    return axes


def _axes(store: MechanismStore, ax: "Axes | None") -> "Axes":
    if ax is not None:
        return ax
    box = store.grid.box
    width = maps.width_inches(box.width_km / box.height_km, _HEIGHT_INCHES, _BESIDE_INCHES, _WIDTHS_INCHES)
    return _new_axes((width, _HEIGHT_INCHES))


def _finished(axes: "Axes", store: MechanismStore, title: str) -> "Axes":
    maps.frame(axes, maps.around_records(store.grid))
    axes.set_title(title, fontsize=10, parse_math=False)
    maps.say_whose(axes, store.attribution)
    return axes
