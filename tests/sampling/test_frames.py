"""GeoDataFrames in and out: the same reports, in the same system, and nothing beside them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask import Mechanism, ReleaseBudget, StickyKey, open_mechanism, sample_frame
from mdpext_dask.errors import BudgetExceeded, DataError, ImplausibleWarning, SpecError
from mdpext_dask.runtime import open_city
from mdpext_dask.sampling.export import export_city

geopandas = pytest.importorskip("geopandas", reason="needs pip install 'mdpext-dask[files]'")
LONLAT = np.array([[-73.98, 40.75], [-73.96, 40.78], [-74.0, 40.72]])
USERS = ["ada", "bob", "eve"]


def frame(crs: Any = 4326, lonlat: Any = LONLAT) -> Any:
    found = geopandas.GeoDataFrame(
        {"name": USERS[: len(lonlat)]},
        geometry=geopandas.points_from_xy(*np.asarray(lonlat).T),
        index=[7, 5, 9][: len(lonlat)],
        crs=4326,
    )
    return found.to_crs(crs)


@pytest.mark.parametrize("crs", [4326, 32618, 2263, 3857, "OGC:CRS84"])
def test_reports_are_those_of_arrays_in_any_reference_system(crs: Any, mechanism: Mechanism) -> None:
    key = StickyKey.generate()
    outputs, _ = mechanism.sample_points(LONLAT, users=USERS, sticky=key)
    given = frame(crs)
    for points in (given, given.geometry):
        found = sample_frame(mechanism, points, users=USERS, sticky=key)
        assert list(found.columns) == ["geometry"]
        assert list(found.index) == [7, 5, 9]
        assert found.crs == given.crs
        back = found.to_crs(4326).geometry
        np.testing.assert_allclose(
            np.stack([back.x, back.y], -1), mechanism.output_lonlat[outputs], atol=1e-8
        )
    assert list(given.columns) == ["name", "geometry"]  # as it was


def test_an_exported_city_takes_frames_too(store: str, mechanism: Mechanism, tmp_path: Path) -> None:
    export_city(store, tmp_path / "m.mdp")
    key = StickyKey.generate()
    ours = sample_frame(mechanism, frame(), users=USERS, sticky=key)
    theirs = sample_frame(open_city(tmp_path / "m.mdp"), frame(), users=USERS, sticky=key)
    assert ours.geom_equals(theirs).all()


def test_what_is_dropped_has_no_row_and_ledgers_are_charged(mechanism: Mechanism, tmp_path: Path) -> None:
    far = [LONLAT[0], [10.0, 50.0], LONLAT[2]]
    assert list(sample_frame(mechanism, frame(lonlat=far), outside="drop").index) == [7, 9]
    assert len(sample_frame(mechanism, frame()[:0])) == 0
    budget = ReleaseBudget(tmp_path / "releases.db", limit=1)
    sample_frame(mechanism, frame(), users=USERS, budget=budget)
    with pytest.raises(BudgetExceeded):
        sample_frame(mechanism, frame(), users=USERS, budget=budget)


def test_what_are_no_points_is_refused(mechanism: Mechanism, planar: str) -> None:
    shapes = frame().geometry
    for spoilt in (None, shapes.iloc[1].buffer(1), type(shapes.iloc[1])()):
        bad = geopandas.GeoSeries([shapes.iloc[0], spoilt], crs=4326)
        with pytest.raises(DataError, match="1 geometries are no points, the first in row 2"):
            sample_frame(mechanism, bad)
    with pytest.raises(SpecError, match="set_crs"):
        sample_frame(mechanism, geopandas.GeoSeries(list(shapes)))
    with pytest.raises(SpecError, match="got ndarray"):
        sample_frame(mechanism, LONLAT)
    with pytest.raises(SpecError, match="planar"):
        sample_frame(open_mechanism(planar), frame())


def test_points_that_are_known_too_little_say_so(mechanism: Mechanism) -> None:
    given = frame().assign(accuracy=[20.0, 5e5, np.nan])
    with pytest.warns(ImplausibleWarning, match="1 of 3 positions are known less well") as caught:
        assert len(sample_frame(mechanism, given, accuracy_m=given["accuracy"])) == 3
    assert caught[0].filename == __file__
    sample_frame(mechanism, given[:1], accuracy_m=given["accuracy"][:1])
    with pytest.raises(SpecError, match="3 numbers of metres"):
        sample_frame(mechanism, given, accuracy_m=[20.0])
