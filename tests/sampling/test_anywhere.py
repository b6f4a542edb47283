"""Places anywhere, however they are given: one map to records, and the promise for every two of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from numpy.typing import NDArray

from mdpext_dask import Mechanism, build, open_mechanism
from mdpext_dask.errors import DataError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.runtime import City, open_city
from mdpext_dask.runtime.location_sampler import Reporter
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.files import sample_file
from tests.support.problems import all_rows, ground_km

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

# A metric on the ground, and two of the plane.
METRICS = ["2", "1", "inf"]
Floats = NDArray[np.float64]


@pytest.fixture(
    scope="module", params=[pytest.param(p, marks=() if p == "2" else pytest.mark.slow) for p in METRICS]
)
def both(request: pytest.FixtureRequest, tmp_path_factory: Any, small_job: Any) -> tuple[Mechanism, City]:
    """Return a mechanism and the city that is exported from it."""
    folder = tmp_path_factory.mktemp("anywhere")
    p = request.param if request.param == "inf" else int(request.param)
    turned: dict[str, Any] = {"rotation_deg": 29.0} if p == 2 else {}
    build(parse_job(small_job(domain={"metric_p": p, **turned})), folder / "m.zarr")
    export_city(str(folder / "m.zarr"), folder / "m.mdp")
    return open_mechanism(folder / "m.zarr"), open_city(folder / "m.mdp")


def places_of(mechanism: Mechanism) -> tuple[Floats, Floats]:
    """Return places, in degrees and in the plane: in the grid, around it, far away, about the antipode."""
    projection, grid = mechanism.places.projection, mechanism.places.grid
    assert projection is not None
    rng = np.random.default_rng(7)
    bearing = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    rings = [
        1, 0.9 * grid.box.radius_km, grid.box.radius_km, 60, 2200, 10_000, 13_399, 18_900, 19_880, 19_899,
        19_960,
    ]  # fmt: skip
    r = np.array(rings)[:, None] * np.ones(16)
    xy = np.stack([r * np.sin(bearing), r * np.cos(bearing)], axis=-1).reshape(-1, 2)
    xy = np.concatenate([xy, rng.uniform(-20, 20, (30, 2)), rng.uniform(-14_000, 14_000, (30, 2))])
    lonlat = projection.to_degrees(xy)
    return lonlat, projection.to_plane(lonlat)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the records that are drawn from, in order; the first output is always drawn."""
    found: list[int] = []

    def many(_: Reporter, records: NDArray[np.int64], __: object) -> NDArray[np.intp]:
        found.extend(records.tolist())
        return np.zeros(len(records), dtype=np.intp)

    def one(self: Reporter, i: int, j: int) -> NDArray[np.uint64]:
        found.append(i * self.places.grid.shape[1] + j)
        return np.arange(1, len(self._remap) + 1, dtype=np.uint64)

    for kind in (Mechanism, City):
        monkeypatch.setattr(kind, "_draw_many", many)
        monkeypatch.setattr(kind, "_cumulative", one)
    return found


def taken(seen: list[int]) -> list[int]:
    records = seen.copy()
    seen.clear()
    return records


def files_of(folder: Path, coordinates: Floats, names: tuple[str, str]) -> list[Path]:
    """Write places in every kind of file that has them."""
    table = {name: coordinates[:, axis] for axis, name in enumerate(names)}
    lines = [",".join(names), *(f"{x!r},{y!r}" for x, y in coordinates.tolist())]
    (folder / "p.csv").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pa.table(table), folder / "p.parquet")
    found = [folder / "p.csv", folder / "p.parquet"]
    if names[0] == "lon":
        features = [
            {"type": "Feature", "properties": {}, "geometry": {"type": "Point", "coordinates": place}}
            for place in coordinates.tolist()
        ]
        (folder / "p.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
        found.append(folder / "p.geojson")
    return found


def test_every_way_in_is_one_map_that_keeps_the_promise(
    both: tuple[Mechanism, City], seen: list[int], tmp_path: Path
) -> None:
    mechanism, city = both
    lonlat, xy = places_of(mechanism)
    ways: dict[str, list[int]] = {}
    # Around the antipode degrees say where a place is, and the plane may not.
    known = np.isfinite(xy).all(axis=1)
    for reporter in both:
        name = type(reporter).__name__
        for names, places in ((("lon", "lat"), lonlat), (("x_km", "y_km"), np.where(known[:, None], xy, 0))):
            for place in places.tolist():
                reporter.sample(**dict(zip(names, place, strict=True)))
            ways[f"{name} one {names}"] = taken(seen)
            for coarse in (None, 1e-9):
                reporter.sample_points(places, planar=names[0] == "x_km", place_km=coarse)
                ways[f"{name} many {names} {coarse}"] = taken(seen)
            if isinstance(reporter, Mechanism):
                for file in files_of(tmp_path, places, names):
                    sample_file(
                        reporter.url, file, tmp_path / f"out{file.suffix}", chunk_points=50, overwrite=True
                    )
                    ways[f"{file.suffix} {names}"] = taken(seen)
    expected = np.array(ways["Mechanism one ('lon', 'lat')"])
    logs = np.log(all_rows(mechanism._store).reshape(-1, mechanism._store.outputs).astype(float))
    one, other = np.triu_indices(len(lonlat), 1)
    if mechanism.metric_p == 2:
        apart, sound = ground_km(lonlat[one], lonlat[other]), np.ones(len(one), dtype=bool)
    else:
        sound = known[one] & known[other]
        apart = np.linalg.norm(np.where(known[:, None], xy, 0)[one] - xy[other], mechanism.metric_p, axis=1)
    for way, records in ways.items():
        found = np.array(records)
        # A place on the border of two records may fall to either where it is projected otherwise.
        assert (found == expected)[known].mean() > 0.97, way
        ratio = np.abs(logs[found[one]] - logs[found[other]]).max(axis=1)
        bound = mechanism.epsilon_per_km * (apart + 2 * city.max_quantisation_km)
        assert (ratio <= bound * (1 + 1e-9))[sound & ("km" not in way or known[one] & known[other])].all()
    # The bound says something: some pairs come near it.
    assert (ratio / bound)[sound].max() > 0.3


@pytest.mark.parametrize("planar", [False, True])
def test_the_other_side_of_the_earth_is_outside(both: tuple[Mechanism, City], planar: bool) -> None:
    for reporter in both:
        projection = reporter.places.projection
        assert projection is not None
        lon, lat = projection.centre_lon, projection.centre_lat
        antipode = np.array([[lon + 180, -lat], [lon + 180.01, -lat], [lon, lat]])
        far = np.array([[0.0, 20_003.9], [-1e308, 1e308], [0.0, 0.0]])
        places = far if planar else antipode
        drawn, outside = reporter.sample_points(places, planar=planar, outside="drop")
        assert outside.tolist() == [True, True, False]
        assert (drawn[:2] == -1).all()
        names = ("x_km", "y_km") if planar else ("lon", "lat")
        for place in places.tolist():
            reporter.sample(**dict(zip(names, place, strict=True)))
        with pytest.raises(DataError, match="2 of 3 lie outside"):
            reporter.sample_points(places, planar=planar, outside="error")
