"""Headers that anybody may have made: refused with the field, or harmless; nothing large is allocated."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.errors import MdpextError, StoreError
from mdpext_dask.runtime import open_city
from tests.support.cities import RAW, put, rewritten, spoil, taken_apart, with_header, write_city
from tests.support.refusals import refusal

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

TRIES = 300
LARGEST_BYTES = 32 * 2**20


def use(path: Path) -> None:
    """Open a city, and do with it all that one does."""
    for remap in (False, True):
        city = open_city(path, remap=remap)
        places = np.array([[-73.97, 40.78], [0.0, 0.0], [-73.95, 40.79], [10.0, 90.0]])
        if city.planar:
            city.sample_points(places, planar=True)
            city.row(x_km=0.0, y_km=-1e300)
        else:
            city.sample_points(places)
            city.sample(-73.97, 40.78, n=3)
            city.row(-74.0, -9.0)
        assert repr(city).isprintable()
        city.quantisation_km(2.0)


@pytest.mark.parametrize("packing", [pytest.param("seed", marks=pytest.mark.slow), "rows"])
def test_no_header_does_harm(packing: str, tmp_path: Path) -> None:
    good, bad = write_city(tmp_path / "good.mdp", packing), tmp_path / "bad.mdp"
    use(good)
    refused, rng = 0, random.Random(packing)
    tracemalloc.start()
    try:
        for number in range(TRIES):
            rewritten(good, bad, lambda header, sections: spoil(header, sections, rng))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                use(bad)
            except MdpextError as error:
                refused += 1
                message = str(error)
                assert message.startswith((f"{bad}: ", "place_km: ")), (number, message)
                assert message.isprintable(), (number, message)
                assert len(message) < 400, (number, message)
            assert tracemalloc.get_traced_memory()[1] - before < LARGEST_BYTES, number
    finally:
        tracemalloc.stop()
    assert refused > TRIES / 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("grid", "cells_x", value=10**9), "grid.cells_x must be a whole number from 1 to 100000000"),
        (put("grid", "refine", value=[10**6] * 9), "records in a row"),
        (put("grid", "refine", 0, value=True), "an entry of grid.refine must be a whole number"),
        (put("epsilon_per_km", value=float("nan")), "NaN is no number"),
        (put("metric_p", value=0), "metric_p must be a number from 1"),
        (put("remap", value=[0, 1, -1, 3]), "an entry of remap must be"),
        (put("remap", value=[0, 1, 4, 3]), "remap names an output that is none of 0 to 3"),
        (put("remap", value=[0]), "remap must have the length 4, has 1"),
        (put("tile_cells", value=[0, 1]), "an entry of tile_cells must be"),
        (put("tile_cells", value=[4, 1]), "tile_cells are more than the grid has"),
        (put("sections", 0, 0, value=-5), "an entry of an entry of sections must be"),
        (put("outputs", "x", value=[1.0]), "outputs have coordinates in different numbers"),
        (put("outputs", "lon", 0, value=None), "outputs must have degrees where there is a projection"),
        (put("quantisation_km", value=0.001), "quantisation_km is not that of the grid"),
        (put("epsilon_certified", value=1.5), "epsilon_certified is more than epsilon_per_km"),
        (put("plane_fit", "x", value=RAW + "["), "nested too deeply"),
        (put("plane_fit", "half_lat", value=60.0), "plane_fit reaches a pole"),
        (put("projection", "fit", value=3), "projection has no key 'fit'"),
        (put("content_sha256", value="\x1b[2J"), r"content_sha256 must be 64 hexadecimal digits"),
        (put("projection", value=None), "outputs must have degrees"),
    ],
)
def test_the_field_is_named(change: Any, said: str, tmp_path: Path) -> None:
    bad = rewritten(write_city(tmp_path / "good.mdp"), tmp_path / "bad.mdp", change)
    message = refusal(lambda: open_city(bad), kind=StoreError)
    assert message.startswith(f"{bad}: its header is not one that mdpext export writes: ")
    assert said in message


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-8-sig"])
def test_a_header_in_another_encoding_is_refused(encoding: str, tmp_path: Path) -> None:
    good, bad = write_city(tmp_path / "good.mdp"), tmp_path / "bad.mdp"
    header, sections = taken_apart(good)
    bad.write_bytes(with_header(json.dumps(header).encode(encoding)) + b"".join(sections))
    assert "its header is not one" in refusal(lambda: open_city(bad), kind=StoreError)
