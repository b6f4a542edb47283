"""Using a finished mechanism from Python, and on a file."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mdpext_dask import Mechanism, build, load_job, open_mechanism
from mdpext_dask.errors import DataError, SpecError, StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.sampling.files import sample_file
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_at


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("mechanism") / "m.zarr")
    job = {
        "domain": {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2]},
        "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
        "outputs": {"count": 6},
        "loss": {"kind": "euclidean"},
        "cluster": {"kind": "inline"},
        "store": {"block_cells": [2, 2]},
    }
    build(parse_job(job), path)
    return path


@pytest.fixture(scope="module")
def mechanism(store: str) -> Mechanism:
    return open_mechanism(store)


def test_a_row_is_that_of_the_nearest_record(mechanism: Mechanism) -> None:
    dataset = mechanism.dataset
    row = mechanism.row(lon=-73.98, lat=40.75)
    stored = dataset.probability.sel(x=float(row.x), y=float(row.y)).values.astype(float)
    assert np.allclose(row.values, stored / stored.sum(), rtol=1e-15)
    assert abs(float(row.sum()) - 1) < 1e-15
    there = mechanism.row(x_km=float(row.x) + 0.3, y_km=float(row.y) - 0.3)
    assert np.array_equal(there.values, row.values)
    assert np.array_equal(row.output_lon.values, dataset.output_lon.values)


def test_samples_are_outputs_and_follow_the_row(mechanism: Mechanism) -> None:
    draws = mechanism.sample(lon=-73.98, lat=40.75, n=20_000)
    assert draws.shape == (20_000, 2)
    lonlat = mechanism.output_lonlat
    which = np.array([int(np.argmin(np.abs(lonlat - draw).sum(axis=1))) for draw in draws[:200]])
    assert np.array_equal(lonlat[which], draws[:200])
    row = mechanism.row(lon=-73.98, lat=40.75).values
    counts = np.array([(draws == place).all(axis=1).sum() for place in lonlat])
    # Six standard deviations of a binomial count.
    assert (np.abs(counts - 20_000 * row) <= 6 * np.sqrt(20_000 * row * (1 - row)) + 1).all()


def test_two_draws_differ_so_there_is_no_hidden_seed(mechanism: Mechanism) -> None:
    first, second = (mechanism.sample(lon=-73.98, lat=40.75, n=200) for _ in range(2))
    assert not np.array_equal(first, second)


def test_many_points_get_the_rows_of_their_records(mechanism: Mechanism) -> None:
    """Looked up together or one by one, in any order, over chunk borders: the same rows."""
    rng = np.random.default_rng(0)
    dataset = mechanism.dataset
    i = rng.integers(0, dataset.sizes["x"], 300)
    j = rng.integers(0, dataset.sizes["y"], 300)
    assert np.array_equal(rows_at(mechanism._store, i, j), dataset.probability.values[i, j])


def test_a_place_is_given_in_exactly_one_way(mechanism: Mechanism) -> None:
    for place in ({}, {"lon": -73.98}, {"lon": -73.98, "lat": 40.7, "x_km": 0.0, "y_km": 0.0}):
        with pytest.raises(SpecError, match="either by lon and lat"):
            mechanism.row(**place)
    with pytest.raises(SpecError, match="degrees"):
        mechanism.sample(lon=-7398.0, lat=40.75)
    with pytest.raises(SpecError, match="degrees"):
        mechanism.row(lon=float("nan"), lat=40.75)
    for n in (0, -1, 2.5):
        with pytest.raises(SpecError, match="at least 1"):
            mechanism.sample(lon=-73.98, lat=40.75, n=n)


def test_points_outside_follow_the_stated_rule(mechanism: Mechanism) -> None:
    points = np.array([[-73.98, 40.75], [-70.0, 40.75]])
    drawn, outside = mechanism.sample_points(points)
    assert outside.tolist() == [False, True]
    assert (drawn >= 0).all()
    assert mechanism.sample_points(points, outside="drop")[0][1] == -1
    with pytest.raises(DataError, match="1 of 2 lie outside"):
        mechanism.sample_points(points, outside="error")


@pytest.mark.parametrize("rule", ["Error", "raise", "", None])
def test_a_rule_that_is_not_known_is_not_taken_for_another(mechanism: Mechanism, rule: Any) -> None:
    with pytest.raises(SpecError, match="outside: must be nearest, drop, error"):
        mechanism.sample_points(np.array([[12.5, 41.9]]), outside=rule)


def test_how_many_may_be_any_whole_number(mechanism: Mechanism) -> None:
    assert mechanism.sample(lon=-73.98, lat=40.75, n=np.int64(3)).shape == (3, 2)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="n: "):
        mechanism.sample(lon=-73.98, lat=40.75, n=True)


def test_what_is_reported_about_it(mechanism: Mechanism) -> None:
    assert mechanism.epsilon_certified < mechanism.epsilon_per_km == 1.0
    assert mechanism.metric_p == 2.0
    assert mechanism.max_quantisation_km == pytest.approx(0.75 / np.sqrt(2))
    assert "6 outputs" in repr(mechanism)


@pytest.mark.parametrize("columns", ["lon,lat", "x_km,y_km"])
def test_a_file_of_points(store: str, tmp_path: Path, columns: str) -> None:
    points, out = tmp_path / "p.csv", tmp_path / "o.csv"
    rows = ["-73.98,40.75", "-73.95,40.80"] if columns == "lon,lat" else ["0,0", "1.5,-2"]
    points.write_text(f"name,{columns}\n" + "\n".join(f"secret,{row}" for row in rows))
    answer = sample_file(store, points, out)
    assert {"points", "outside", "max_quantisation_km", "seconds"} <= set(answer)
    assert (answer["points"], answer["outside"]) == (2, 0)
    written = pd.read_csv(out)
    assert list(written.columns) == ["row", "output", "lon", "lat"]
    lonlat = open_mechanism(store).output_lonlat
    assert np.allclose(written[["lon", "lat"]], lonlat[written["output"]], rtol=0, atol=1e-12)


def test_nothing_but_the_report_leaves(store: str, tmp_path: Path) -> None:
    points, out = tmp_path / "p.csv", tmp_path / "o.csv"
    points.write_text("name,lon,lat,address\nAnna,-73.98123,40.75321,12 Secret Street\n")
    sample_file(store, points, out)
    for secret in ("Anna", "-73.98123", "40.75321", "Secret"):
        assert secret not in out.read_text()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lon,lat\n-73.98,north\n", "line 2: lat 'north'"),
        ("lon,lat\n-73.98,40.7\n,40.7\n", "line 3: lon ''"),
        ("lon,lat\n-73.98,nan\n", "not a finite number"),
        ("lon,lat\n-7398,40.7\n", "out of range"),
        ("a,b\n1,2\n", "needs columns lon,lat"),
        ("lon,lat\n", "holds no rows"),
        ("", "is empty"),
    ],
)
def test_bad_points_are_named_and_nothing_is_written(
    store: str, tmp_path: Path, text: str, complaint: str
) -> None:
    points, out = tmp_path / "p.csv", tmp_path / "o.csv"
    points.write_text(text)
    with pytest.raises(DataError, match=complaint):
        sample_file(store, points, out)
    assert sorted(tmp_path.iterdir()) == [points]


def test_an_output_that_cannot_be_written_is_one_error(store: str, tmp_path: Path) -> None:
    points = tmp_path / "p.csv"
    points.write_text("lon,lat\n-73.98,40.75\n")
    with pytest.raises(DataError, match="cannot be written"):
        sample_file(store, points, tmp_path / "missing" / "o.csv")


def test_a_changed_bit_is_noticed_by_whoever_reads_the_row(store: str, tmp_path: Path) -> None:
    """Without holding whole shards against their receipts: every chunk has a checksum."""
    copy = Path(shutil.copytree(store, tmp_path / "copy.zarr"))
    shards = sorted(path for path in (copy / "probability" / "c").rglob("*") if path.is_file())
    grid = MechanismStore.open(store).grid
    x, y = (axis.ravel() for axis in np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij"))
    records = np.stack([x, y], axis=-1)
    rng = np.random.default_rng(3)
    for shard in shards[:4]:
        content = shard.read_bytes()
        for position in rng.integers(0, len(content), 3).tolist():
            changed = bytearray(content)
            changed[position] ^= 1 << int(rng.integers(8))
            shard.write_bytes(changed)
            with pytest.raises(StoreError, match="probability cannot be read"):
                open_mechanism(copy).sample_points(records, planar=True)
        shard.write_bytes(content)


def test_what_is_not_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such store"):
        open_mechanism(tmp_path / "nothing.zarr")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="not a mechanism store"):
        open_mechanism(tmp_path / "folder")


def test_the_front_door(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[domain]\nroads = "builtin:manhattan"\ncell_km = 3\nrefine = [2]\n[privacy]\nepsilon_per_km = 1\n'
        "[outputs]\ncount = 3\n"
    )
    summary: dict[str, Any] = build(load_job(job, ["cluster.kind=inline"]), str(tmp_path / "m.zarr"))
    assert summary["state"] == "complete"


def test_the_certificate_is_in_the_store(store: str) -> None:
    assert open_mechanism(store).dataset.attrs["epsilon_certified"] > 0
    assert (Path(store) / "audit" / "certificate.json").is_file()


def test_places_far_outside_get_no_more_than_they_are_apart(mechanism: Mechanism) -> None:
    """Four kilometres across the line of sight, an ocean away: still no more than epsilon times four."""
    from pyproj import Geod

    geod = Geod(ellps="WGS84")
    for away_km in (100, 5_000, 10_000, 19_000):
        for bearing in (0, 45, 90, 200):
            lon, lat, back = geod.fwd(-73.967, 40.785, bearing, away_km * 1000)
            pair = [geod.fwd(lon, lat, back + turn, 2000)[:2] for turn in (90, -90)]
            rows = [np.log(mechanism.row(lon=a, lat=b).values) for a, b in pair]
            moved = 2 * mechanism.max_quantisation_km
            assert np.abs(rows[0] - rows[1]).max() <= mechanism.epsilon_per_km * (4 + moved)


def test_coordinates_that_are_no_degrees_are_refused_in_batches(mechanism: Mechanism) -> None:
    with pytest.raises(DataError, match="out of range"):
        mechanism.sample_points(np.array([[-73.98, 91.0]]))
