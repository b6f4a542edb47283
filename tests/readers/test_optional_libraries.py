"""Libraries that only some files need: without one, who needs it and how to get it is said."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.errors import SpecError
from mdpext_dask.problem.region import read_region
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.readers.roads.read_network import read_roads
from tests.support.refusals import refusal

Read = Callable[[Path], object]


@pytest.mark.parametrize(
    ("library", "name", "read"),
    [
        ("pyarrow", "p.parquet", read_points),
        ("ijson", "p.geojson", read_points),
        ("osmium", "a.osm", lambda path: read_roads(str(path), None)),
        ("pyogrio", "a.gpkg", lambda path: read_roads(str(path), None)),
        ("pyogrio", "a.shp", lambda path: read_region(str(path))),
    ],
)
def test_missing(tmp_path: Path, monkeypatch: Any, library: str, name: str, read: Read) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, library, None)
    needs = f"needs {library}: install it with pip install 'mdpext-dask[files]'"
    refusal(lambda: read(path), str(path), needs, kind=SpecError)
