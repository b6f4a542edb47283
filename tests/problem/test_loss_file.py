"""Loss files: what is read from one, and how a bad one is refused."""

import itertools
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.errors import DataError, MdpextError, SpecError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.memory import check_memory
from mdpext_dask.pipeline.plan import plan_job
from mdpext_dask.problem.domain import Domain, build_domain
from mdpext_dask.problem.geometry import build_geometry
from mdpext_dask.problem.loss_file import ProblemFile, read_problem
from mdpext_dask.problem.projection import Projection
from tests.support.loss_files import job
from tests.support.problems import point_file
from tests.support.refusals import refusal

Arrays = dict[str, Any]
Save = Callable[..., Path]


def arrays() -> Arrays:
    """Return a problem of 7 x 5 records, 2 km apart, and 3 outputs."""
    rng = np.random.default_rng(0)
    return {
        "x_km": -1.5 + 2.0 * np.arange(7), "y_km": 40.0 + 2.0 * np.arange(5),
        "output_xy_km": np.array([(-1.5, 40.0), (3.3, 44.4), (10.5, 48.0)]), "loss_km": rng.random((7, 5, 3)),
        "prior": rng.integers(0, 4, (7, 5)).astype(float),
    }  # fmt: skip


def replaced(**changes: Any) -> Arrays:
    """Return that problem with some keys changed; None leaves a key out."""
    return {key: value for key, value in {**arrays(), **changes}.items() if value is not None}


def changed(key: str, index: Any, value: float) -> Arrays:
    """Return that problem with one number changed."""
    problem = arrays()
    problem[key][index] = value
    return problem


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that writes a loss file and returns its path."""

    def write(problem: Arrays, *, compressed: bool = False) -> Path:
        path = tmp_path / "loss.npz"
        (np.savez_compressed if compressed else np.savez)(path, **problem)
        return path

    return write


def read(path: Path) -> ProblemFile:
    return read_problem(str(path))


def build(path: Path) -> Domain:
    return build_domain(parse_job(job(path)))


# --- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_everything_is_read_as_it_was_written(save: Save, compressed: bool) -> None:
    problem = arrays()
    found = read(save(problem, compressed=compressed))
    for key in ("x_km", "y_km", "output_xy_km"):
        np.testing.assert_array_equal(getattr(found, key), problem[key])
    np.testing.assert_array_equal(found.read_loss(), problem["loss_km"])
    np.testing.assert_allclose(found.prior, problem["prior"] / problem["prior"].sum(), rtol=1e-14)
    assert found.spacing_km == 2.0
    assert found.projection is None
    assert (found.notes, found.loss_bytes) == ((), problem["loss_km"].nbytes)


def test_a_prior_of_any_scale_is_normalised_and_without_one_all_records_are_as_likely(save: Save) -> None:
    prior = arrays()["prior"]
    for scale in (1e-300, 1e306):
        found = read(save(replaced(prior=prior * scale))).prior
        np.testing.assert_allclose(found, prior / prior.sum(), rtol=1e-12)
    np.testing.assert_array_equal(read(save(replaced(prior=None))).prior, np.full((7, 5), 1 / 35))


def test_the_loss_keeps_its_precision(save: Save) -> None:
    for given, kept in {"f4": "f4", ">f4": "f4", "f8": "f8", "f2": "f8", "i2": "f8"}.items():
        loss = (arrays()["loss_km"] * 100).astype(given)
        found = read(save(replaced(loss_km=loss))).read_loss()
        assert found.dtype == np.dtype(kept)
        np.testing.assert_array_equal(found, loss)


def test_a_centre_gives_the_projection_and_other_arrays_are_left_alone_and_mentioned(save: Save) -> None:
    remarks = np.array(["mine"], dtype=object)
    problem = read(save(replaced(centre_lon=12.5, centre_lat=np.array([41.9]), remarks=remarks)))
    assert problem.projection == Projection(12.5, 41.9)
    [note] = problem.notes
    assert "remarks is not used" in note


def test_coordinates_may_be_float32(save: Save) -> None:
    x, y = (290.123 + 0.416675 * np.arange(7)), (4640.5 + 0.416675 * np.arange(5))
    outputs = np.array([(290.5, 4641.0), (291.0, 4641.5), (292.0, 4641.9)])
    problem = replaced(x_km=x.astype(np.float32), y_km=y.astype(np.float32), output_xy_km=outputs)
    assert read(save(problem)).spacing_km == pytest.approx(0.416675, rel=1e-4)


# --- the grid --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("refine", "cells"), [((1,), (6, 4)), ((2,), (3, 2)), ((1, 2), (3, 2))])
def test_records_are_those_of_the_file(save: Save, refine: tuple[int, ...], cells: tuple[int, int]) -> None:
    problem = read(save(arrays()))
    grid = problem.grid(refine, None)
    np.testing.assert_allclose(grid.x_km(), problem.x_km, rtol=0, atol=1e-12)
    np.testing.assert_allclose(grid.y_km(), problem.y_km, rtol=0, atol=1e-12)
    assert (grid.cells_x, grid.cells_y) == cells
    assert grid.refine == refine


def test_refinement_that_does_not_fit_is_told_what_would(save: Save) -> None:
    problem = read(save(arrays()))
    for refine in ((3,), (4,), (2, 2), (7,)):
        parts = "domain.refine:", str(list(refine)), "6 x 4 steps", "7 x 5 grid", "products that do: 1, 2"
        refusal(partial(problem.grid, refine, None), *parts, kind=SpecError)


def test_a_stated_cell_must_be_that_of_the_file(save: Save) -> None:
    problem = read(save(arrays()))
    assert problem.grid((2,), 4.003).cell_km == 4.0
    parts = "domain.cell_km:", "4.01", "2 steps", "= 4 km", "leave it out"
    refusal(lambda: problem.grid((2,), 4.01), *parts, kind=SpecError)


# --- what is refused -------------------------------------------------------------------------------

X, Y = arrays()["x_km"], arrays()["y_km"]
_BAD: dict[str, tuple[Arrays, list[str]]] = {
    **{f"{key} missing": (replaced(**{key: None}), [f"{key} is missing", "found"])
       for key in ("x_km", "y_km", "output_xy_km", "loss_km")},
    "nothing": ({}, ["x_km is missing", "found nothing"]),
    "x of a mesh": (replaced(x_km=np.zeros((7, 5))), ["x_km", "(7, 5)"]),
    "one x": (replaced(x_km=X[:1], loss_km=np.zeros((1, 5, 3))), ["x_km", "(1,)", "at least 2"]),
    "x without end": (changed("x_km", 6, np.inf), ["x_km[6] = inf"]),
    "x going down": (replaced(x_km=X[::-1]), ["x_km must increase", "x_km[0] = 10.5", "8.5"]),
    "y twice": (changed("y_km", 2, 42.0), ["y_km must increase", "y_km[1] = 42"]),
    "x uneven": (changed("x_km", 3, X[3] + 1e-5), ["spacing", "x_km[3] - x_km[2] = 2.00001"]),
    "y wider than x": (replaced(y_km=40 + 2.001 * np.arange(5)), ["spacing", "y_km[", "2.001", "2 km"]),
    "loss transposed": (replaced(loss_km=np.zeros((5, 7, 3))), ["loss_km", "(5, 7, 3)", "(7, 5, 3)"]),
    "loss flat": (replaced(loss_km=np.zeros((35, 3))), ["loss_km", "(35, 3)", "(7, 5, 3)"]),
    "outputs transposed": (replaced(output_xy_km=np.zeros((2, 3))), ["output_xy_km", "(2, 3)", "(K, 2)"]),
    "no outputs": (replaced(output_xy_km=np.zeros((0, 2))), ["output_xy_km", "(0, 2)"]),
    "output nowhere": (changed("output_xy_km", (1, 0), np.nan), ["output_xy_km[1, 0] = nan"]),
    "output outside": (changed("output_xy_km", (2, 1), 48.01), ["1 of 3", "number 2", "48.010"]),
    "output twice": (changed("output_xy_km", 2, (-1.5, 40.0)), ["output_xy_km", "same place", "-1.5"]),
    "prior transposed": (replaced(prior=np.ones((5, 7))), ["prior", "(5, 7)", "(7, 5)"]),
    "prior nan": (changed("prior", (3, 4), np.nan), ["prior[3, 4] = nan"]),
    "prior negative": (changed("prior", (3, 4), -0.5), ["prior[3, 4] = -0.5", "not negative"]),
    "prior zero": (replaced(prior=np.zeros((7, 5))), ["prior is zero", "leave it out"]),
    "text": (replaced(x_km=np.array(["a"] * 7)), ["x_km", "<U1", "not numbers"]),
    "complex": (replaced(loss_km=np.zeros((7, 5, 3), dtype=complex)), ["loss_km", "complex128"]),
    "objects": (replaced(prior=np.full((7, 5), None)), ["prior", "object", "not numbers"]),
    "objects as loss": (replaced(loss_km=np.full((7, 5, 3), None)), ["loss_km", "object"]),
    "half a centre": (replaced(centre_lon=12.5), ["centre_lat is missing", "both"]),
    "two centres": (replaced(centre_lon=[1.0, 2.0], centre_lat=1.0), ["centre_lon", "(2,)", "one number"]),
    "centre in metres": (replaced(centre_lon=1.2e5, centre_lat=41.0), ["centre_lon = 120000", "degrees"]),
    "centre misspelt": (replaced(center_lon=12.5, center_lat=41.9), ["center_lat", "mean centre_lat"]),
    "prior misspelt": (replaced(prior=None, priors=np.ones((7, 5))), ["priors", "did you mean prior?"]),
}  # fmt: skip


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_file_is_one_line_with_file_and_key(save: Save, name: str) -> None:
    problem, named = _BAD[name]
    file = save(problem)
    message = refusal(lambda: build(file), *named, kind=DataError)
    assert message.startswith(f"loss.file: {file}: ")
    # The same from the header and the small arrays alone, so that `plan` refuses it as well.
    assert refusal(lambda: build_geometry(parse_job(job(file)))) == message


def test_a_loss_that_cannot_be_is_named(save: Save) -> None:
    for value, dtype in itertools.product((np.nan, np.inf, -1e-9), ("float32", "float64")):
        problem = changed("loss_km", (5, 3, 2), value)
        file = save({**problem, "loss_km": problem["loss_km"].astype(dtype)})
        refusal(partial(build, file), "loss_km[5, 3, 2]", "finite and not negative", kind=DataError)


def test_what_is_no_npz_file_is_named(tmp_path: Path, save: Save) -> None:
    whole = save(arrays()).read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"x,y\n1,2\n", b"", (tmp_path / "array.npy").read_bytes(), whole[:-200]):
        path = tmp_path / "other.npz"
        path.write_bytes(content)
        refusal(partial(read, path), f"{path}: not", kind=DataError)
    refusal(lambda: read(tmp_path / "none.npz"), "no such file", kind=DataError)
    refusal(lambda: read(tmp_path), str(tmp_path), kind=DataError)
    refusal(lambda: read_problem("builtin:rome"), "built-in", kind=DataError)


def test_what_is_damaged_inside_is_named(tmp_path: Path, save: Save) -> None:
    path = save(arrays())
    content = bytearray(path.read_bytes())
    at = content.index(arrays()["loss_km"].tobytes()[:16])
    content[at] ^= 1
    path.write_bytes(content)
    refusal(lambda: build(path), "loss_km cannot be read", kind=DataError)
    with zipfile.ZipFile(tmp_path / "raw.npz", "w") as archive:
        for key in arrays():
            archive.writestr(f"{key}.npy", b"not an array")
    refusal(lambda: read(tmp_path / "raw.npz"), "x_km cannot be read", kind=DataError)


def test_a_table_larger_than_memory_is_refused_unread(tmp_path: Path) -> None:
    """A header that promises a petabyte: refused from the header alone."""
    path = tmp_path / "loss.npz"
    points = np.arange(100_000.0)
    outputs = np.stack([points, points % 10], axis=-1)
    np.savez(path, x_km=points, y_km=np.arange(11.0), output_xy_km=outputs)
    with zipfile.ZipFile(path, "a") as archive, archive.open("loss_km.npy", "w") as member:
        header = {"descr": "<f8", "fortran_order": False, "shape": (100_000, 11, 100_000)}
        np.lib.format.write_array_header_1_0(member, header)
    spec = parse_job(job(path, domain={"refine": [1]}))
    geometry = build_geometry(spec)
    refusal(lambda: check_memory(spec, geometry), "GiB", kind=MdpextError)
    assert "GiB" in plan_job(spec)["refused"]


def test_a_centre_far_from_the_grid_is_refused(save: Save) -> None:
    x = 4000 + 2.0 * np.arange(7)
    outputs = np.array([(4001.0, 41.0), (4002.0, 42.0), (4003.0, 43.0)])
    spec = parse_job(job(save(replaced(x_km=x, output_xy_km=outputs, centre_lon=12.5, centre_lat=41.9))))
    refusal(lambda: build_geometry(spec), "loss.file:", "centre_lon, centre_lat", "distorts", kind=DataError)


# --- priors of other origin ------------------------------------------------------------------------


def test_other_priors(save: Save, tmp_path: Path) -> None:
    file = save(arrays())
    uniform = build_domain(parse_job(job(file, prior={"kind": "uniform"})))
    np.testing.assert_array_equal(uniform.prior, np.full((7, 5), 1 / 35))
    places = [(-1.4, 40.3, 3), (2.6, 44.1, 1), (100, 44, 5)]
    points = point_file(tmp_path / "points.csv", "x_km,y_km,weight", places)
    spec = parse_job(job(file, prior={"kind": "file", "file": points}))
    domain = build_domain(spec)
    expected = np.zeros((7, 5))
    expected[0, 0], expected[2, 2] = 0.75, 0.25
    np.testing.assert_allclose(domain.prior, expected, rtol=1e-15)
    [note] = domain.notes
    where = "1 of 3 points lie outside the grid (the furthest, point 3, by 90 km) and were left out"
    assert note == f"prior.file: {points}: {where}"
    point_file(tmp_path / "points.csv", "lon,lat", [(12.5, 41.9)])
    parts = "prior.file:", points, "no centre", "x_km,y_km"
    refusal(lambda: build_domain(spec), *parts, kind=DataError)


def test_the_floor_must_fit_the_outputs_of_the_file(save: Save) -> None:
    spec = parse_job(job(save(arrays()), privacy={"min_probability": 0.4}))
    for action in (build_domain, plan_job):
        refusal(partial(action, spec), "1/3", kind=SpecError)
