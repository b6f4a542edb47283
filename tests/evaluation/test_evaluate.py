"""What a finished mechanism costs: by definition, on every executor, in files and pictures."""

import functools
import itertools
import json
import math
import pickle
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask import AttackRequest, BoundRequest, audit
from mdpext_dask.errors import SpecError, StoreError
from mdpext_dask.evaluation import evaluate as evaluation
from mdpext_dask.evaluation.attackers import passes
from mdpext_dask.evaluation.baselines.noise import planar_laplace
from mdpext_dask.evaluation.baselines.problem import Problem, expected_loss
from mdpext_dask.evaluation.plain import plain_facts
from mdpext_dask.evaluation.quantiles import BINS_PER_OCTAVE, SHARES, Tally, exact_sum, weighted_quantiles
from mdpext_dask.evaluation.spread import band_edges_km
from mdpext_dask.evaluation.words import table
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.maps import averaged
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.definitions import by_definition, quantile_by_definition
from tests.support.forged import flip_a_bit, shard_of
from tests.support.inside import call, mdpext
from tests.support.refusals import refused

Stores = Callable[[str], Path]
# What this is about needs no bound and no attackers; other tests are about those.
evaluate = functools.partial(evaluation.evaluate, bound=BoundRequest(seconds=0), attacks=None)
PART = BoundRequest(stride=3, offsets=4)
KINDS = ("travel", "euclidean", "planar", "region")


@pytest.fixture(params=KINDS)
def finished(request: pytest.FixtureRequest, stores: Stores) -> Path:
    return stores(request.param)


# --- what the plain thing loses -------------------------------------------------------------------


def test_the_plain_thing_by_its_rows(finished: Path) -> None:
    store = MechanismStore.open(str(finished))
    problem = Problem.of_store(store)
    exact = expected_loss(problem, planar_laplace(problem, math.inf).rows)
    found = evaluate(str(finished))
    error = found["plain_standard_error_km"]
    assert abs(found["plain_loss_km"] - exact) < 4 * error
    assert 0 < error < 0.01 * exact
    assert found["over_plain"] == pytest.approx(found["loss_km"] / found["plain_loss_km"] - 1)
    # As `run` has found it.
    said = {key: store.attributes[key] for key in found if "plain" in key}
    assert said == {key: found[key] for key in said}
    assert ("beside it", found["plain_in_words"]) in table(found)


def test_who_loses_more_than_the_plain_thing_is_told_what_to_set(stores: Stores) -> None:
    store = MechanismStore.open(str(stores("travel")))
    plain_km = plain_facts(store, 1.0)["plain_loss_km"]
    more, less = (plain_facts(store, share * plain_km)["plain_in_words"] for share in (1.25, 0.8))
    assert "this mechanism 25.0% more" in more
    assert 'extension.method = "noise"' in more
    assert less.endswith("this mechanism 20.0% less")


# --- what is computed -----------------------------------------------------------------------------


def test_numbers_by_definition(finished: Path, tmp_path: Path) -> None:
    prior, rows, losses, apart = by_definition(finished)
    joint = prior[:, None] * rows
    found = evaluate(str(finished), records=tmp_path / "R.NPZ")
    store = MechanismStore.open(str(finished))
    assert found["loss_km"] == store.attributes["loss_km"]
    assert found["loss_km"] == pytest.approx((joint * losses).sum(), rel=1e-12)
    assert found["distance_km"] == pytest.approx((joint * apart).sum(), rel=1e-12)
    assert found["records_with_prior"] == len(prior)

    assert [path.name for path in tmp_path.iterdir()] == ["R.NPZ"]
    with np.load(tmp_path / "R.NPZ") as file:
        assert set(file) == {"x_km", "y_km", "loss_km", "prior"}
        assert np.array_equal(file["x_km"], store.grid.x_km())
        assert np.array_equal(file["y_km"], store.grid.y_km())
        assert np.array_equal(file["prior"], store.read("prior"))
        assert file["loss_km"].shape == store.grid.shape
        of_records = file["loss_km"][file["prior"] > 0]
        assert np.isnan(file["loss_km"][file["prior"] == 0]).all()
    assert of_records == pytest.approx((rows * losses).sum(axis=1), rel=1e-12)
    assert found["loss_quantiles_resolution_km"] == 0
    assert found["loss_quantiles_km"] == {
        share: quantile_by_definition(of_records.tolist(), prior.tolist(), share) for share in SHARES
    }

    values, weights = losses.ravel(), joint.ravel()
    exact = weighted_quantiles(values[weights > 0], weights[weights > 0], SHARES)
    for share, value in found["report_loss_quantiles_km"].items():
        assert 0 <= value - exact[share] <= found["report_loss_resolution_km"]
    assert found["report_loss_resolution_km"] <= values.max() / BINS_PER_OCTAVE

    # Bands add up to the loss.
    bands = found["by_distance"]
    assert sum(band["probability"] for band in bands) == pytest.approx(1, rel=1e-12)
    parts = [band["probability"] * (band["loss_km"] or 0) for band in bands]
    assert sum(parts) == pytest.approx(found["loss_km"], rel=1e-12)
    assert bands[0]["from_km"] == 0
    assert [band["from_km"] for band in bands[1:]] == [band["to_km"] for band in bands[:-1]]
    assert bands[-1]["to_km"] > apart.max()
    for band in bands:
        within = (apart >= band["from_km"]) & (apart < band["to_km"])
        probability = joint[within].sum()
        # Distances are rounded in two ways; none of these is next to an edge.
        assert band["probability"] == pytest.approx(probability, rel=1e-9, abs=1e-15)
        if band["loss_km"] is None:
            assert probability == 0
        else:
            assert band["loss_km"] == pytest.approx((joint * losses)[within].sum() / probability, rel=1e-9)


@functools.cache
def evaluated_inline(store: str) -> dict[str, Any]:
    return evaluation.evaluate(store, bound=PART, attacks=AttackRequest(releases=3, victims=20))


@pytest.mark.slow
def test_all_executors(stores: Stores, tmp_path: Path, any_cluster: ClusterSection, monkeypatch: Any) -> None:
    """Of the loss, of a part of the lattices and of what attackers learn."""
    # Five blocks a task, so that there are several.
    monkeypatch.setattr(passes, "NUMBERS_OF_TASK", 100)
    expected = evaluated_inline(str(stores("region")))
    assert expected["offsets_used"] == 4 < expected["offsets_total"]
    store = shutil.copytree(stores("region"), tmp_path / "m.zarr")
    opened = MechanismStore.open(str(store), mode="r+")
    opened.update(job={**opened.attributes["job"], "cluster": any_cluster.model_dump()})
    found = evaluation.evaluate(
        store, bound=PART, attacks=AttackRequest(releases=3, victims=20), records=tmp_path / "r.npz"
    )
    took = "lower_bound_seconds"
    assert json.dumps({**found, took: 0}) == json.dumps({**expected, took: 0})


def test_too_many_records_to_sort(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exact = evaluate(str(finished))
    monkeypatch.setattr(evaluation, "MOST_SORTED", 0)
    found = evaluate(str(finished))
    resolution = found["loss_quantiles_resolution_km"]
    assert 0 < resolution <= found["loss_quantiles_km"]["1"] / BINS_PER_OCTAVE
    for share, value in exact["loss_quantiles_km"].items():
        assert 0 <= found["loss_quantiles_km"][share] - value <= resolution
    # A file of all losses does not change what is said.
    assert evaluate(str(finished), records=tmp_path / "r.npz", overwrite=True) == found


# --- quantiles ------------------------------------------------------------------------------------


WEIGHTS = st.one_of(st.floats(1e-300, 1e300), st.sampled_from([1.0, 0.1, 1 / 3, 1e-17]))
SHARE = st.one_of(st.sampled_from(SHARES), st.integers(0, 1000).map(lambda n: str(n / 1000)))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 1e6), WEIGHTS), min_size=1, max_size=30), SHARE)
def test_quantiles_are_exact(pairs: list[tuple[float, float]], share: str) -> None:
    values, weights = (list(column) for column in zip(*pairs, strict=True))
    found = weighted_quantiles(np.array(values), np.array(weights), [share])
    assert found == {share: quantile_by_definition(values, weights, share)}


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_of_equal_weights_a_share_that_comes_out_even_is_met(count: int) -> None:
    """Sums of tenths are not tenths: whoever adds floats up misses these by one."""
    values = np.random.default_rng(0).permutation(count).astype(np.float64)
    found = weighted_quantiles(values, np.full(count, 0.1), ("0.05", "0.25", "0.5", "0.95"))
    assert list(found.values()) == [count * q / 100 - 1 for q in (5, 25, 50, 95)]


@given(st.lists(st.floats(-1e300, 1e300), max_size=20))
def test_sums_are_exact(numbers: list[float]) -> None:
    assert exact_sum(np.array(numbers)) == sum(map(Fraction, numbers))


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-6, 1)), min_size=1, max_size=40),
    SHARE,
    st.integers(0, 40),
)
def test_tallies_are_right_to_resolution(pairs: list[tuple[float, float]], share: str, cut: int) -> None:
    values, weights = np.array(pairs).T
    total = Tally()
    for part in (slice(0, cut), slice(cut, None)):
        tally = Tally()
        if len(values[part]):
            tally.add(values[part], weights[part])
        total.merge(pickle.loads(pickle.dumps(tally)))
    quantiles, resolution = total.quantiles([share])
    found = quantiles[share]
    # A share that comes out even may be missed by rounding, and then the next number is as good an answer.
    shift = Fraction(1, 10**12)
    near = max(Fraction(share) - shift, Fraction(0)), min(Fraction(share) + shift, Fraction(1))
    exact = [quantile_by_definition(values.tolist(), weights.tolist(), str(q)) for q in near]
    assert exact[0] <= found <= exact[1] + resolution
    assert resolution <= max(values.max() / BINS_PER_OCTAVE, 2.0**-20)


def test_losses_of_any_size_have_a_bin() -> None:
    tally = Tally()
    tally.add(np.array([0.0, 1e-300, 1e300]), np.ones(3))
    assert tally.quantiles(["0", "0.3", "1"])[0] == {"0": 0.0, "0.3": 2.0**-20, "1": 1e300}


@given(st.floats(1e-3, 30), st.integers(1, 40), st.integers(1, 40), st.floats(-500, 500))
def test_bands_cover_every_distance(cell: float, east: int, north: int, output: float) -> None:
    grid = Grid(3.0, -7.0, east, north, cell, (2,))
    edges = band_edges_km(grid, np.array([[output, 0.0]]))
    corners = itertools.product(grid.x_km()[[0, -1]], grid.y_km()[[0, -1]])
    assert edges[-1] > max(math.dist(corner, (output, 0.0)) for corner in corners)
    assert edges[0] == 0
    assert (np.diff(edges) > 0).all()
    assert grid.spacing_km <= edges[1] <= 2.6 * grid.spacing_km
    # Numbers that are written in a few characters.
    assert all(float(f"{edge:.1g}") == edge for edge in edges)


# --- files ----------------------------------------------------------------------------------------


def test_a_large_map_shows_means() -> None:
    values = np.arange(35.0).reshape(5, 7)
    values[0, 0] = values[4, 6] = np.nan
    shown, side = averaged(values, 4)
    assert side == 2
    assert shown[0].tolist() == [np.mean([1, 7, 8]), np.mean([2, 3, 9, 10]), np.mean([4, 5, 11, 12]), 9.5]
    assert shown[2, :3].tolist() == [28.5, 30.5, 32.5]
    assert np.isnan(shown[2, 3])
    assert averaged(values, 7)[1] == 1


@pytest.mark.parametrize(
    ("option", "name"),
    [
        *(("--map", name) for name in ("a.npz", "no/where.png")),
        *(("--records", name) for name in ("a.csv", "a", "folder.npz", "file/a.npz")),
    ],
)
def test_files_that_cannot_be_written(tmp_path: Path, capfd: Any, option: str, name: str) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").write_text("")
    assert mdpext("evaluate", tmp_path / "nothing.zarr", option, tmp_path / name) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {option}: ")
    assert len(error.splitlines()) == 1


def test_unwritable_files_are_errors(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(StoreError, match=r"^--records: .*No space left"):
        evaluate(str(stores("planar")), records=tmp_path / "r.npz")
    assert list(tmp_path.iterdir()) == []


# --- the command line, and damage -----------------------------------------------------------------


def test_the_command_line(stores: Stores, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = str(stores("travel"))
    command = ["evaluate", store, "--progress", "none", "--bound-seconds", "0", "--no-attacks"]
    answer = call(capfd, *command, "--map", tmp_path / "m.png", "--records", tmp_path / "r.npz")
    assert answer == evaluate(store)
    assert {"lower_bound_km", "gap", "offsets_used", "offsets_total", "adversary"} <= set(answer)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.png", "r.npz"]
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert mdpext(*command) == 0
    text = capfd.readouterr().out
    assert f"{1000 * answer['loss_km']:,.0f} m expected" in text
    assert "bound     not known yet" in text
    assert mdpext(*command, "--verbose") == 0
    text = capfd.readouterr().out
    assert f"{answer['loss_km']:.6g} km" in text
    assert "of reports, which lose" in text
    assert "no mechanism" not in text.partition("\n\n")[2]


@pytest.mark.slow
def test_a_bound_is_told_in_words(stores: Stores) -> None:
    found = evaluation.evaluate(str(stores("planar")), bound=BoundRequest(stride=2), attacks=None)
    text = dict(table(found))["no mechanism"]
    assert text == f"loses less than {found['lower_bound_km']:.6g} km; this one loses {found['gap']:.1%} more"
    assert found["gap"] > 0
    estimate = {**found, "lower_bound_certified": False, "offsets_used": 3, "offsets_total": 4, "gap": None}
    estimate |= {"lower_bound_standard_error_km": 0.5, "lower_bound_certified_km": 0.25}
    text = dict(table(estimate))["no mechanism"]
    assert text.endswith(" km (± 0.98, estimated from 3 of 4 lattices; certified: 0.25 km)")


def test_what_cannot_be_asked_for_is_refused(stores: Stores) -> None:
    store, inside = stores("planar"), "lies inside the store"
    for what, why in (({"records": store / "r.npz"}, inside), ({"picture": store / "m.png"}, inside)):
        refused(SpecError, why, evaluate, str(store), **what)
    refused(SpecError, "--bound-seconds: must be at least 0, got nan", BoundRequest, seconds=math.nan)


@pytest.mark.parametrize("what", ["prior", "rows", "chunk"])
def test_damage_is_one_error(stores: Stores, tmp_path: Path, what: str) -> None:
    path = shutil.copytree(stores("travel"), tmp_path / "m.zarr")
    store = MechanismStore.open(str(path), mode="r+")
    if what == "prior":
        prior = store.array("prior")
        prior[...] = np.where(store.read("prior") > 0, np.nan, 0)
    elif what == "rows":
        i, j = np.argwhere(store.read("prior") > 0)[0].tolist()
        store.array("probability")[i, j] = np.nan
    else:
        shard = path / store.shard_keys(store.plan[0])[0]
        shard.write_bytes(shard.read_bytes()[:-40])
    refused(StoreError, "", evaluate, str(path))


def test_only_a_finished_store_is_evaluated(tmp_path: Path) -> None:
    refused(StoreError, "no such store", evaluate, str(tmp_path / "nothing.zarr"))


def test_an_evaluation_says_that_a_store_is_refused(stores: Stores, tmp_path: Path) -> None:
    path = tmp_path / "refused.zarr"
    shutil.copytree(stores("planar"), path)
    flip_a_bit(shard_of(path))
    assert not audit(str(path)).holds
    found = evaluate(str(stores("planar")), bound=BoundRequest(0), attacks=None)
    assert (found["state"], table(found)[0][0]) == ("complete", "expected loss")
    assert table({**found, "state": MechanismStore.open(str(path)).state})[0][0] == "refused"
