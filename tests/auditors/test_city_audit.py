"""A city is audited from its own rows, grid and plane: what its header claims counts for nothing."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask import audit
from mdpext_dask.auditors.result import HOLDS
from mdpext_dask.errors import DataError, SpecError
from mdpext_dask.runtime import city_layout, open_city
from mdpext_dask.runtime.city import CityFile
from tests.support.cities import GRID, put, rewritten, write_city
from tests.support.reference import audited_epsilon
from tests.support.refusals import refusal


def steepest(path: Path) -> float:
    """Return the largest |log ratio| over distance of all pairs, by brute force."""
    city = CityFile(path)
    rows = np.empty((*GRID.shape, city.outputs))
    for tile in range(len(city.tiles)):
        rows[city.tiles.records(tile)] = city.rows(tile)
    return audited_epsilon(rows, GRID.x_km(), GRID.y_km(), 2.0)


@pytest.mark.parametrize("packing", ["seed", "rows"])
def test_a_city_is_proved_from_its_rows(packing: str, tmp_path: Path) -> None:
    path = write_city(tmp_path / "c.mdp", packing)
    proof, every = audit(path), audit(str(path), "exhaustive")
    assert (proof.method, proof.verdict, proof.changed) == ("certificate", HOLDS, ())
    assert proof.as_json()["holds"] is True
    assert every.holds
    assert every.epsilon == pytest.approx(steepest(path), rel=1e-9)
    assert every.epsilon <= proof.epsilon <= proof.epsilon_planar_per_km < proof.epsilon_per_km == 1.0
    # Another promise than its own.
    assert not audit(path, epsilon_per_km=every.epsilon * 0.9).holds
    assert not audit(path, "exhaustive", epsilon_per_km=every.epsilon * 0.999).holds


@pytest.mark.parametrize("packing", ["seed", "rows"])
@pytest.mark.parametrize("steep", [1.5, pytest.param(3.0, marks=pytest.mark.slow)])
def test_rows_that_break_the_promise_are_found(packing: str, steep: float, tmp_path: Path) -> None:
    path = write_city(tmp_path / "c.mdp", packing, steep=steep)
    assert steepest(path) > 1
    for method in ("certificate", "exhaustive", "sampled"):
        report = audit(path, method)
        assert report.verdict == "violated"
        assert report.worst["log_ratio"] > report.worst["bound"]


def stretched(header: dict[str, Any], _: list[bytes]) -> None:
    header["plane_fit"]["x"] = [[1.001 * c for c in row] for row in header["plane_fit"]["x"]]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (put("epsilon_certified", value=0.1), "epsilon_certified"),
        (put("mechanism_sha256", value="3" * 64), "mechanism_sha256"),
        (put("epsilon_planar_per_km", value=0.9), "epsilon_planar_per_km"),
        (put("distortion", value=0.01), "distortion"), (put("outputs", "lon", 2, value=-73.0), "outputs"),
        (put("plane_fit", "y", 3, 0, value=0.001), "plane_fit"),
        (put("projection", "centre_lat", value=40.781), "plane_fit"), (stretched, "plane_fit"),
    ],
)  # fmt: skip
def test_false_claims_are_named(change: Any, changed: str, tmp_path: Path) -> None:
    report = audit(rewritten(write_city(tmp_path / "c.mdp"), tmp_path / "d.mdp", change))
    assert not report.holds
    assert changed in report.changed


def test_the_identity_of_a_city_is_that_of_all_that_it_holds(tmp_path: Path) -> None:
    """Where the header says which mechanism it is, and something of it has changed, audits say so too."""
    plain = write_city(tmp_path / "c.mdp")
    named = rewritten(
        plain, tmp_path / "d.mdp", put("mechanism_sha256", value=open_city(plain).mechanism_sha256)
    )
    assert audit(named).holds
    for change in (
        put("content_sha256", value="5" * 64),
        put("kept", value="b0"),
        put("epsilon_per_km", value=1.0 + 1e-9),
        put("outputs", "x", 0, value=-2.0000001),
    ):
        report = audit(rewritten(named, tmp_path / "e.mdp", change))
        assert report.holds is False
        assert "mechanism_sha256" in report.changed


def test_a_larger_grid_step_makes_no_smaller_epsilon(tmp_path: Path) -> None:
    """Figures that follow from the grid are changed with it, and the rows decide."""

    def smaller(header: dict[str, Any], _: list[bytes]) -> None:
        header["grid"]["cell_km"] /= 10
        header["quantisation_km"] /= 10

    report = audit(rewritten(write_city(tmp_path / "c.mdp"), tmp_path / "d.mdp", smaller))
    assert report.verdict == "violated"


def test_damaged_tiles_are_named(tmp_path: Path) -> None:
    path = write_city(tmp_path / "c.mdp", "rows")
    bad = rewritten(path, tmp_path / "d.mdp", lambda _, sections: sections.insert(0, sections.pop(1)))
    report = audit(bad)
    assert not report.holds
    assert report.changed == ("epsilon_certified", "tile 0", "tile 1")
    assert math.isinf(report.epsilon)

    def zero(header: dict[str, Any], sections: list[bytes]) -> None:
        rows = CityFile(path).rows(0).copy()
        rows[1, 0, 2] = 0.0
        sections[0], header["rows_sha256"][0] = city_layout.pack_rows(rows), city_layout.rows_sha256(rows)

    assert audit(rewritten(path, bad, zero)).verdict == "not a mechanism"


def test_what_does_not_go_with_a_city(tmp_path: Path) -> None:
    path = write_city(tmp_path / "c.mdp")
    assert "knows where its records are" in refusal(lambda: audit(path, points="p.csv"), kind=SpecError)
    assert "only mechanism stores" in refusal(lambda: audit(path, "boundary"), kind=SpecError)
    assert "no such file" in refusal(lambda: audit(tmp_path / "none.mdp"), kind=DataError)
