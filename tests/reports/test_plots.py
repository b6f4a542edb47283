"""Pictures for notebooks: what they show is what is stored, and they touch nothing but their axes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import mdpext_dask
from mdpext_dask.auditors.figure import band_shares
from mdpext_dask.errors import SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.sampling.remap_store import remap_store
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
PLACE = {"lon": -73.98, "lat": 40.75}
CORNERS = [[-74.0, 40.70], [-73.98, 40.70], [-73.99, 40.74], [-74.0, 40.70]]


@pytest.fixture(scope="module")
def store(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> MechanismStore:
    path = tmp_path_factory.mktemp("plots") / "m.zarr"
    mdpext_dask.build(parse_job(small_job(store={"block_cells": [2, 2]})), path)
    return MechanismStore.open(str(path))


@pytest.fixture
def mechanism(store: MechanismStore) -> mdpext_dask.Mechanism:
    return mdpext_dask.open_mechanism(store.url)


@pytest.fixture
def ax() -> Axes:
    """Axes of a figure that pyplot does not know."""
    return Figure(figsize=(5, 5)).subplots()


def artist(axes: Axes, name: str) -> Any:
    (found,) = [child for child in axes.get_children() if child.get_gid() == name]
    return found


DRAW: dict[str, Callable[..., Axes]] = {
    "domain": mdpext_dask.plots.plot_domain, "prior": mdpext_dask.plots.plot_prior,
    "row": lambda m, ax=None: mdpext_dask.plots.plot_row(m, **PLACE, ax=ax),
    "output": lambda m, ax=None: mdpext_dask.plots.plot_output(m, 3, ax), "loss": mdpext_dask.plots.plot_loss,
    "certificate": mdpext_dask.plots.plot_certificate,
}  # fmt: skip


@pytest.mark.parametrize("name", DRAW)
def test_maps_are_maps_and_touch_nothing_else(store: MechanismStore, ax: Axes, name: str) -> None:
    plt.close("all")
    settings = dict(mpl.rcParams)
    assert DRAW[name](store.url, ax=ax) is ax
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == settings
    assert (ax.get_aspect(), ax.get_xlabel(), ax.get_ylabel()) == (1, "east (km)", "north (km)")
    box = store.grid.box
    assert ax.get_xlim()[0] < box.west_km < box.east_km < ax.get_xlim()[1]
    assert ax.get_ylim()[0] < box.south_km < box.north_km < ax.get_ylim()[1]
    assert "OpenStreetMap" in artist(ax, "attribution").get_text()
    ax.figure.savefig(Path("/dev/null"), format="png")


def test_without_axes_there_are_new_ones(mechanism: mdpext_dask.Mechanism) -> None:
    plt.close("all")
    axes = mdpext_dask.plots.plot_prior(mechanism)
    assert plt.get_fignums() == [axes.figure.number]  # type: ignore[union-attr]
    mdpext_dask.plots.plot_ratios(mechanism, pairs=100)
    assert len(plt.get_fignums()) == 2
    plt.close("all")


def test_outputs_and_seeds_are_where_they_are_stored(store: MechanismStore, ax: Axes) -> None:
    mdpext_dask.plots.plot_domain(store.url, ax)
    outputs = store.output_xy_km()
    np.testing.assert_array_equal(artist(ax, "outputs").get_offsets(), outputs)
    x = [segment[0, 0] for segment in artist(ax, "seeds east").get_segments()]
    assert x == pytest.approx(np.unique(store.grid.seeds_xy_km()[:, 0]))
    assert len(artist(ax, "roads").get_offsets()) == store.array("problem/node_xy").shape[0]


def test_a_prior_is_a_density(store: MechanismStore, ax: Axes) -> None:
    mdpext_dask.plots.plot_prior(store.url, ax)
    shown = artist(ax, "records")
    west, east, _, _ = shown.get_extent()
    side = (east - west) / shown.get_array().shape[1]
    assert side == pytest.approx(store.grid.spacing_km)
    assert float(shown.get_array().sum()) * side**2 == pytest.approx(1)


def test_dots_of_a_row_have_areas_like_its_probabilities(mechanism: mdpext_dask.Mechanism, ax: Axes) -> None:
    mdpext_dask.plots.plot_row(mechanism, **PLACE, ax=ax)
    row = mechanism.row(**PLACE)
    dots = artist(ax, "row")
    np.testing.assert_array_equal(dots.get_offsets(), mechanism.output_xy_km)
    large = row.values > 0.01
    sizes = dots.get_sizes()
    assert sizes[large] / sizes.max() == pytest.approx(row.values[large] / row.values.max())
    np.testing.assert_array_equal(dots.get_array(), 100 * row.values)
    np.testing.assert_array_equal(artist(ax, "place").get_xydata(), [[float(row.x), float(row.y)]])


def test_the_field_of_an_output_is_the_stored_column(store: MechanismStore, ax: Axes) -> None:
    mdpext_dask.plots.plot_output(store.url, 3, ax)
    shown = artist(ax, "records")
    stored = store.read("probability")[..., 3].astype(np.float64)
    np.testing.assert_array_equal(shown.get_array(), 100 * stored.T)
    # Which place a pixel is at: that with the largest value lies where it is stored.
    i, j = np.unravel_index(stored.argmax(), stored.shape)
    place = store.grid.x_km()[i], store.grid.y_km()[j]
    assert shown.get_cursor_data(_at(ax, place)) == 100 * stored[i, j]


def _at(axes: Axes, place: tuple[float, float]) -> Any:
    x, y = axes.transData.transform(place)
    return type("Event", (), {"x": x, "y": y})


def test_columns_as_sampled(mechanism: mdpext_dask.Mechanism, store: MechanismStore, tmp_path: Path) -> None:
    total = sum(mechanism.column(output).values for output in range(store.outputs))
    np.testing.assert_allclose(total, 1, atol=1e-6)
    row = mechanism.row(**PLACE)
    assert mechanism.column(2, step=2).shape == tuple(-(-n // 2) for n in store.grid.shape)
    here = mechanism.column(2).sel(x=float(row.x), y=float(row.y))
    assert float(here) == pytest.approx(float(row[2]), rel=1e-6)
    for bad in (-1, store.outputs, 1.0, True):
        refused(SpecError, "output: ", mechanism.column, bad)
    copy = shutil.copytree(store.url, tmp_path / "m.zarr")
    remap_store(str(copy))
    remapped = mdpext_dask.open_mechanism(copy, remap=True)
    row = remapped.row(**PLACE)
    for output in range(store.outputs):
        here = remapped.column(output).sel(x=float(row.x), y=float(row.y))
        assert float(here) == pytest.approx(float(row[output]), rel=1e-6)


def test_losses_are_those_that_are_evaluated(store: MechanismStore, ax: Axes, tmp_path: Path) -> None:
    mdpext_dask.plots.plot_loss(store.url, ax)
    mdpext_dask.evaluate(
        store.url, records=tmp_path / "r.npz", bound=mdpext_dask.BoundRequest(seconds=0), attacks=None
    )
    with np.load(tmp_path / "r.npz") as file:
        np.testing.assert_array_equal(artist(ax, "records").get_array().filled(np.nan), file["loss_km"].T)


def test_a_certificate_is_that_of_the_store_or_the_report(store: MechanismStore) -> None:
    report = mdpext_dask.audit(store.url)
    expected = np.array(report.details["epsilon_by_block"]).T / report.limit_per_km
    for subject in (report, store.url):
        axes = Figure().subplots()
        mdpext_dask.plots.plot_certificate(subject, axes)
        np.testing.assert_array_equal(artist(axes, "blocks").get_array(), expected)
        worst = artist(axes, "worst pair").get_xydata()
        np.testing.assert_array_equal(worst, [report.worst["x"], report.worst["x_prime"]])


def test_ratios_are_those_of_the_pairs(store: MechanismStore, ax: Axes) -> None:
    drawn = mdpext_dask.audit(store.url, "sampled", sampling=mdpext_dask.Sampling(pairs=500, random_seed=0))
    exhaustive = mdpext_dask.audit(store.url, "exhaustive")
    other = Figure().subplots(1, 2)
    mdpext_dask.plots.plot_ratios(drawn, ax)
    mdpext_dask.plots.plot_ratios(store.url, other[0], pairs=500)
    mdpext_dask.plots.plot_ratios(exhaustive, other[1], pairs=500)
    for axes in (ax, *other):
        shown = [artist(axes, name).get_array().filled(0) for name in ("kept", "beyond")]
        np.testing.assert_array_equal(np.concatenate(shown).T, band_shares(drawn))
    # The worst triple is the report's, not that of the pairs drawn for it.
    heights = [float(artist(axes, "worst ratio").get_ydata()[0]) for axes in (other[1], ax)]
    assert heights[0] >= heights[1]
    assert heights[0] == pytest.approx(exhaustive.epsilon / exhaustive.limit_per_km, rel=1e-6)


def test_what_is_not_in_the_region_is_hatched(small_job: Job, tmp_path: Path, ax: Axes) -> None:
    region = tmp_path / "r.geojson"
    region.write_text(json.dumps({"type": "Polygon", "coordinates": [CORNERS]}))
    job = small_job(domain={"region": str(region), "cell_km": 0.5, "refine": [2]}, outputs={"count": 3})
    mdpext_dask.build(parse_job(job), tmp_path / "m.zarr")
    store = MechanismStore.open(str(tmp_path / "m.zarr"))
    mdpext_dask.plots.plot_domain(store.url, ax)
    assert len(artist(ax, "dropped").get_paths()) == (~store.kept).sum() > 0
    # What is not stored is not drawn; what people there would report is not asked for.
    field = mdpext_dask.plots.plot_output(store.url, 0, Figure().subplots())
    assert artist(field, "records").get_array().mask.any() == (len(store.plan.skipped) > 0)


def test_what_cannot_be_drawn_is_refused(store: MechanismStore, ax: Axes, tmp_path: Path) -> None:
    rows, points = np.full((3, 2), 0.5), np.arange(6.0).reshape(3, 2)
    foreign: mdpext_dask.AuditReport = mdpext_dask.audit(rows, points=points, epsilon_per_km=1)
    for draw in (mdpext_dask.plots.plot_certificate, mdpext_dask.plots.plot_ratios):
        refused(SpecError, "array in memory: is no mechanism store", draw, foreign, ax)
    copy = shutil.copytree(store.url, tmp_path / "m.zarr")
    (copy / "audit" / "certificate.json").unlink()
    refused(SpecError, "has no certificate yet", mdpext_dask.plots.plot_certificate, copy, ax)
    refused(SpecError, "output: 8 is not one of 0 to 7", mdpext_dask.plots.plot_output, store.url, 8, ax)
    refused(SpecError, "a place is given", mdpext_dask.plots.plot_row, store.url, ax=ax)
