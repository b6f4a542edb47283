"""Lengths of edges that do not fit the places of their ends: few are noted, most are refused."""

import os
from pathlib import Path

import networkx
import numpy as np
import pytest

from mdpext_dask.readers.roads.read_network import read_roads
from tests.support.problems import WGS84, road_folder
from tests.support.refusals import refusal

# A street of eleven nodes in Nairobi, from 30 m to 300 m apart.
PLACES = [(36.8 + 0.0003 * k * (k + 1) / 2 / 1.1, -1.28) for k in range(11)]
METRES = WGS84.inv(*np.array(PLACES[:-1]).T, *np.array(PLACES[1:]).T)[2]


def street(folder: Path, metres: np.ndarray | list[float]) -> str:
    nodes = [(k, *place) for k, place in enumerate(PLACES)]
    return road_folder(folder / "roads", nodes, [(k, k + 1, m, 0) for k, m in enumerate(metres)])


def test_what_is_rounded_or_winding_passes_in_silence(tmp_path: Path) -> None:
    for number, metres in enumerate(
        (
            METRES, METRES * 0.995, np.floor(METRES), np.maximum(METRES - 1, 0), METRES * 50,
            [*METRES[:9], 4900.0],
        )
    ):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        assert read_roads(street(tmp_path / str(number), metres), None).notes == ()


def test_a_few_are_noted(tmp_path: Path) -> None:
    metres = METRES.copy()
    metres[[2, 5]] /= 1000
    metres[7] *= 200
    short, long = read_roads(street(tmp_path, metres), None).notes
    assert (
        "2 of 10 edges are shorter than the line between the ends (edge 2 to 3: 0.09106 m for 91.06 m)"
        in short
    )
    assert short.endswith("lengths must be in metres; are they in km?")
    assert "1 of 10 edges are over 100 times as long as the line" in long
    assert "edge 7 to 8" in long
    assert "in km?" not in long


@pytest.mark.parametrize(
    ("factor", "parts"),
    [
        (1e-3, ("10 of 10 edges are shorter", "are they in km?")),
        (1 / 1609.344, ("10 of 10 edges are shorter", "are they in km?")),  # miles
        (0.9, ("10 of 10 edges are shorter", "must be in metres")),
        (1e3, ("edges are over 100 times as long", "must be in metres")),  # millimetres
    ],
)
def test_most_of_them_are_refused(tmp_path: Path, factor: float, parts: tuple[str, ...]) -> None:
    message = refusal(lambda: read_roads(street(tmp_path, METRES * factor), None), str(tmp_path), *parts)
    assert ("in km?" in message) == (factor < 0.5)


def test_every_reader_looks(tmp_path: Path) -> None:
    graph = networkx.MultiDiGraph(crs="epsg:4326")
    for k, (lon, lat) in enumerate(PLACES):
        graph.add_node(k, x=lon, y=lat)
    for k, metres in enumerate(METRES):
        graph.add_edge(k, k + 1, length=float(metres) / 1000, oneway=False)
    networkx.write_graphml(graph, tmp_path / "r.graphml")
    refusal(lambda: read_roads(str(tmp_path / "r.graphml"), None), "10 of 10 edges are shorter", "in km?")


def test_the_built_in_network_passes() -> None:
    assert read_roads("builtin:manhattan", None).notes == ()


@pytest.mark.slow
@pytest.mark.skipif("MDPEXT_ROADS" not in os.environ, reason="MDPEXT_ROADS names no folder of networks")
@pytest.mark.parametrize("city", ["rome", "london", "manhattan"])
def test_networks_of_real_cities_pass(city: str) -> None:
    assert read_roads(str(Path(os.environ["MDPEXT_ROADS"]) / city), None).notes == ()
