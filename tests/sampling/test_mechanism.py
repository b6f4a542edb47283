"""Using a finished mechanism from Python."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from pyproj import Geod

from mdpext_dask import Mechanism, open_mechanism
from mdpext_dask.errors import DataError, SpecError, StoreError
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_at
from tests.support.refusals import refused

PLACE = {"lon": -73.98, "lat": 40.75}


def test_a_row_is_that_of_the_nearest_record(mechanism: Mechanism) -> None:
    dataset = mechanism.dataset
    row = mechanism.row(**PLACE)
    stored = dataset.probability.sel(x=float(row.x), y=float(row.y)).values.astype(float)
    assert np.allclose(row.values, stored / stored.sum(), rtol=1e-15)
    assert abs(float(row.sum()) - 1) < 1e-15
    there = mechanism.row(x_km=float(row.x) + 0.3, y_km=float(row.y) - 0.3)
    assert np.array_equal(there.values, row.values)
    assert np.array_equal(row.output_lon.values, dataset.output_lon.values)


def test_samples_are_outputs_and_follow_the_row(mechanism: Mechanism) -> None:
    draws = mechanism.sample(**PLACE, n=20_000)
    row = mechanism.row(**PLACE).values
    counts = np.array([(draws == place).all(axis=1).sum() for place in mechanism.output_lonlat])
    assert counts.sum() == 20_000
    # Six standard deviations of a binomial count.
    assert (np.abs(counts - 20_000 * row) <= 6 * np.sqrt(20_000 * row * (1 - row)) + 1).all()


def test_many_points_get_the_rows_of_their_records(mechanism: Mechanism) -> None:
    """Looked up together or one by one, in any order, over chunk borders: the same rows."""
    rng = np.random.default_rng(0)
    dataset = mechanism.dataset
    i = rng.integers(0, dataset.sizes["x"], 300)
    j = rng.integers(0, dataset.sizes["y"], 300)
    assert np.array_equal(rows_at(mechanism._store, i, j), dataset.probability.values[i, j])


def test_a_place_is_given_in_exactly_one_way(mechanism: Mechanism) -> None:
    for place in ({}, {"lon": -73.98}, {**PLACE, "x_km": 0.0, "y_km": 0.0}):
        refused(SpecError, "either by lon and lat", mechanism.row, **place)
    for lon in (-7398.0, float("nan")):
        refused(SpecError, "degrees", mechanism.sample, lon=lon, lat=40.75)


def test_how_many_may_be_any_whole_number(mechanism: Mechanism) -> None:
    assert mechanism.sample(**PLACE, n=np.int64(3)).shape == (3, 2)  # type: ignore[arg-type]
    for n in (0, -1, 2.5, True):
        refused(SpecError, "n: must be a whole number from 1 to 1000000000", mechanism.sample, **PLACE, n=n)


def test_points_outside_follow_the_stated_rule(mechanism: Mechanism) -> None:
    points = np.array([[-73.98, 40.75], [-70.0, 40.75]])
    drawn, outside = mechanism.sample_points(points)
    assert outside.tolist() == [False, True]
    assert (drawn >= 0).all()
    assert mechanism.sample_points(points, outside="drop")[0][1] == -1
    refused(DataError, "1 of 2 lie outside", mechanism.sample_points, points, outside="error")
    said = "outside: must be nearest, drop, error"
    for rule in ("Error", "raise", "", None):
        refused(SpecError, said, mechanism.sample_points, points, outside=rule)


def test_what_is_reported_about_it(mechanism: Mechanism) -> None:
    assert mechanism.epsilon_certified < mechanism.epsilon_per_km == 1.0
    assert (mechanism.metric_p, mechanism.max_quantisation_km) == (2.0, pytest.approx(4 / 6 / np.sqrt(2)))
    assert "20 outputs" in repr(mechanism)


def test_a_changed_bit_is_noticed_by_whoever_reads_the_row(store: str, tmp_path: Path) -> None:
    """Without holding whole shards against their receipts: every chunk has a checksum."""
    copy = Path(shutil.copytree(store, tmp_path / "copy.zarr"))
    shards = sorted(path for path in (copy / "probability" / "c").rglob("*") if path.is_file())
    grid = MechanismStore.open(store).grid
    records = np.stack(np.meshgrid(grid.x_km(), grid.y_km(), indexing="ij"), axis=-1).reshape(-1, 2)
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
    refused(StoreError, "no such store", open_mechanism, tmp_path / "nothing.zarr")
    refused(StoreError, "not a mechanism store", open_mechanism, tmp_path)


def test_places_far_outside_get_no_more_than_they_are_apart(mechanism: Mechanism) -> None:
    """Four kilometres across the line of sight, an ocean away: still no more than epsilon times four."""
    geod = Geod(ellps="WGS84")
    moved = 2 * mechanism.max_quantisation_km
    for away_km in (100, 5_000, 10_000, 19_000):
        for bearing in (0, 45, 90, 200):
            lon, lat, back = geod.fwd(-73.967, 40.785, bearing, away_km * 1000)
            pair = [geod.fwd(lon, lat, back + turn, 2000)[:2] for turn in (90, -90)]
            rows = [np.log(mechanism.row(lon=a, lat=b).values) for a, b in pair]
            assert np.abs(rows[0] - rows[1]).max() <= mechanism.epsilon_per_km * (4 + moved)
