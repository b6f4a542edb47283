"""What attackers learn: identities of the literature, brute force, enumeration, every executor."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from mdpext_dask.compute.executor import InlineExecutor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import DataError, MdpextError, SpecError, StoreError
from mdpext_dask.evaluation import evaluate
from mdpext_dask.evaluation.attackers import leakage as leaks
from mdpext_dask.evaluation.attackers import measure, tallies
from mdpext_dask.evaluation.attackers import repeated_releases as curves
from mdpext_dask.evaluation.attackers.best_guesses import GOOD_GAP, best_guesses
from mdpext_dask.evaluation.attackers.districts import by_district, read_districts, rectangles
from mdpext_dask.evaluation.attackers.geometric_median import geometric_median, lower_bound, slope_at
from mdpext_dask.evaluation.attackers.passes import Passes
from mdpext_dask.evaluation.attackers.requests import AttackRequest, attackers_of, read_attacker_prior
from mdpext_dask.evaluation.attackers.tallies import Column, Tally, TallyPlan, add_column
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest
from mdpext_dask.evaluation.words import table
from mdpext_dask.events import silent
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection
from mdpext_dask.readers.point_chunks import BY_NAME, PointColumns
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.definitions import by_definition, quantile_by_definition, records_km
from tests.support.inside import call, mdpext
from tests.support.refusals import refused
from tests.support.regions import PLANE

Array = NDArray[np.float64]
Stores = Callable[[str], Path]
# One report; and a few.
ONE, FEW = AttackRequest(releases=0), AttackRequest(releases=3, victims=20)


def evaluated(path: Path | str, request: AttackRequest = ONE) -> dict[str, Any]:
    return evaluate.evaluate(str(path), bound=BoundRequest(seconds=0), attacks=request)


def attacked(path: Path | str, request: AttackRequest = ONE) -> Any:
    return evaluated(path, request)["adversary"]


def tally_of(
    grid: Grid, prior: Array, rows: Array, losses: Array | None = None, *, side: int = 1, classes: int = 0
) -> tuple[TallyPlan, Tally]:
    """Return the tally of rows in memory: prior of the grid's shape, rows and losses of shape (N, K)."""
    plan = TallyPlan(attackers_of(2), side, classes, losses is not None)
    bins = tuple(-(-n // side) for n in grid.shape)
    found = Tally.nothing(plan, rows.shape[1], (bins[0], bins[1]))
    uniform = np.full(grid.shape, 1 / grid.records)
    by_column = rows.reshape(*grid.shape, -1)
    for i in range(grid.shape[0]):
        column = Column(i, np.arange(grid.shape[1]), np.stack([prior[i], uniform[i]]), by_column[i])
        loss = None if losses is None else losses.reshape(by_column.shape)[i]
        add_column(found, plan, grid, column, loss, (0, 0))
    return plan, found


def places_of(grid: Grid) -> Array:
    return np.array(list(itertools.product(grid.x_km(), grid.y_km())))


def random_prior(grid: Grid, seed: int = 0) -> Array:
    prior = np.random.default_rng(seed).uniform(0.2, 1, grid.shape)
    return np.asarray(prior / prior.sum())


def error_by_search(places: Array, weights: Array) -> float:
    """Return the least Σ w ‖x − g‖ that a search from every place finds."""

    def cost(guess: Array) -> float:
        return float(weights @ np.hypot(*(places - guess).T))

    start = min([*places, (weights[:, None] * places).sum(axis=0) / weights.sum()], key=cost)
    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000}
    return min(cost(start), float(minimize(cost, start, method="Nelder-Mead", options=options).fun))


# --- identities -----------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_what_is_done_with_a_report_tells_no_more_than_the_report(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = Grid(1.0, -2.0, 2, 3, 0.7, (1,))
    prior = random_prior(grid, seed)
    rows = rng.dirichlet(np.full(5, 0.3), grid.records) + 1e-9
    rows /= rows.sum(axis=1, keepdims=True)
    channel = rng.dirichlet(np.ones(4), 5)
    plan, before = tally_of(grid, prior, rows, rng.uniform(0, 3, (grid.records, 5)))
    _, after = tally_of(grid, prior, rows @ channel)
    little = 1e-12
    told, less = leaks.leakage(before), leaks.leakage(after)
    for key in "vulnerability", "leakage_bits", "capacity_bits", "mutual_information_bits":
        assert less[key] <= told[key] + little
    assert less["conditional_entropy_bits"] >= told["conditional_entropy_bits"] - little
    errors = [sum_of_errors(grid, plan, tally) for tally in (before, after)]
    assert errors[0][0] <= errors[1][1] * (1 + little)
    # Nor does a report ever hurt, or tell more than all reports could.
    assert told["prior_vulnerability"] <= told["vulnerability"] * (1 + little)
    assert told["leakage_bits"] <= told["capacity_bits"] + little
    assert told["mutual_information_bits"] <= min(told["capacity_bits"], told["prior_entropy_bits"]) + little
    risk = leaks.losses_of_guesses(before)
    assert risk["error_under_loss_km"] <= risk["prior_error_under_loss_km"] * (1 + little)


def sum_of_errors(grid: Grid, plan: TallyPlan, tally: Tally) -> tuple[float, float]:
    """Return a bound from below on the informed attacker's error, and what his guesses attain."""
    guesses = best_guesses(grid, plan, tally)
    # Guesses are seen from the corner of the grid.
    places = places_of(grid).reshape(*grid.shape, 2) - (grid.west_km, grid.south_km)
    apart = np.hypot(*(places[:, :, None] - guesses.places_km[0]).transpose(3, 0, 1, 2))
    return float(guesses.lower_km[0].sum()), float((tally.bins[0, :, :, 0] * apart).sum())


def test_without_any_budget_a_report_tells_nothing() -> None:
    grid = Grid(3.0, 4.0, 3, 2, 1.0, (1,))
    prior = random_prior(grid)
    rows = np.broadcast_to([0.5, 0.2, 0.3], (grid.records, 3)).copy()
    plan, tally = tally_of(grid, prior, rows)
    told = leaks.leakage(tally)
    bits = "leakage_bits", "capacity_bits", "mutual_information_bits"
    assert [told[key] for key in bits] == pytest.approx([0, 0, 0], abs=1e-14)
    assert told["vulnerability"] == pytest.approx(prior.max(), rel=1e-14)
    assert told["conditional_entropy_bits"] == pytest.approx(-(prior * np.log2(prior)).sum(), rel=1e-14)
    guesses = best_guesses(grid, plan, tally)
    alone = error_by_search(places_of(grid), prior.ravel())
    assert guesses.alone_lower_km <= alone <= guesses.alone_lower_km * (1 + 1e-6)
    assert sum_of_errors(grid, plan, tally) == pytest.approx((alone, alone), rel=1e-6)
    # Every rank of the prior alone.
    order = np.sort(prior.ravel())[::-1]
    expected = sum((rank + 1) * p for rank, p in enumerate(order))
    masses = np.sum([leaks.rank_masses(prior.ravel() * m) for m in rows[0]], axis=0)
    assert leaks.sorted_ranks(masses)["rank_mean"] == pytest.approx(expected, rel=1e-12)


# --- brute force ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        ("travel", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("planar", 1), ("region", 1), ("travel", 2), ("planar", 2)]
        ),
    ],
)
def test_numbers_by_definition(stores: Stores, kind: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stores(kind)
    store = MechanismStore.open(str(path))
    if side > 1:
        # One number less than bins of single records take.
        single = 2 * store.outputs * store.grid.records
        monkeypatch.setattr(tallies, "MOST_BINNED", single - 1)
    found = attacked(path)
    prior, rows, losses, _ = by_definition(path)
    places, joint = records_km(path), prior[:, None] * rows
    outputs = range(rows.shape[1])

    error = sum(error_by_search(places, joint[:, y]) for y in outputs)
    assert found["inference_error_lower_km"] <= error * (1 + 1e-9)
    assert error <= found["inference_error_km"] * (1 + 1e-9)
    assert found["inference_error_km"] <= found["inference_error_lower_km"] * (1 + GOOD_GAP)
    alone = error_by_search(places, prior)
    assert found["prior_inference_error_lower_km"] <= alone <= found["prior_inference_error_km"] * (1 + 1e-9)

    risk = sum(min((joint[:, y] * losses[:, z]).sum() for z in outputs) for y in outputs)
    assert found["error_under_loss_km"] == pytest.approx(risk, rel=1e-12)
    assert found["prior_error_under_loss_km"] == pytest.approx((prior @ losses).min(), rel=1e-12)

    if kind != "planar":
        # max_x M(y|x) ≤ e^(ε D) M(y|x') for any x', and Σ_y M(y|x') = 1; D the diameter.
        limit = store.planar_limit() * math.hypot(store.grid.box.width_km, store.grid.box.height_km)
        assert 0 < found["leakage_bits"] <= found["capacity_bits"] <= limit / math.log(2)
    assert found["prior_vulnerability"] == prior.max()
    assert found["vulnerability"] == pytest.approx(sum(max(joint[:, y]) for y in outputs), rel=1e-14)
    left = -(joint * np.log2(joint / joint.sum(axis=0))).sum()
    assert found["conditional_entropy_bits"] == pytest.approx(left, rel=1e-12)
    entropy = -sum(p * math.log2(p) for p in prior)
    assert found["prior_entropy_bits"] == pytest.approx(entropy, rel=1e-13)
    assert found["mutual_information_bits"] == pytest.approx(entropy - left, rel=1e-9)

    ranks, weights = [], []
    for y in outputs:
        for p in joint[:, y]:
            above, same = sum(q > p for q in joint[:, y]), sum(q == p for q in joint[:, y])
            ranks.append(above + (same + 1) / 2)
            weights.append(float(p))
    assert found["rank_mean"] == pytest.approx(np.dot(ranks, weights), rel=1e-12)
    for share in ("0", "0.5", "1"):
        assert found["rank_quantiles"][share] == quantile_by_definition(ranks, weights, share)

    expected = (rows * losses).sum(axis=1)
    worst = found["worst_record"]
    assert worst["loss_km"] == pytest.approx(expected.max(), rel=1e-12)
    assert (worst["x_km"], worst["y_km"]) == tuple(places[expected.argmax()])
    assert (worst["lon"] is None) == (kind == "planar")
    assert found["not_measured"] == {}


def test_capacity_is_that_of_all_records_that_are_kept(stores: Stores) -> None:
    """Also of those where nobody is: it is for any prior."""
    store = MechanismStore.open(str(stores("planar")))
    rows = store.read("probability").astype(np.float64).reshape(-1, store.outputs)
    rows /= rows.sum(axis=1, keepdims=True)
    used = store.read("prior").ravel() > 0
    found = attacked(store.url)["capacity_bits"]
    assert found == pytest.approx(math.log2(rows.max(axis=0).sum()), rel=1e-14)
    assert found > math.log2(rows[used].max(axis=0).sum())


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.floats(1e-6, 1)), min_size=1, max_size=12))
# Steps that begin at the heaviest place, which is not the median, were too short to get away.
@example(
    [
        (2, 5, 0.47235926697946656),
        *4 * [(3, 2, 0.001)],
        (3, 4, 0.845872765900552),
        *2 * [(5, 1, 0.3844533318197747)],
        (6, 1, 0.589652105086677),
        (6, 1, 0.6506226562063545),
        (6, 4, 0.5493128680703835),
        (5, 1, 0.8190660560363076),
    ]
)
def test_a_median_is_bounded_from_both_sides(drawn: list[tuple[int, int, float]]) -> None:
    numbers = np.array(drawn, dtype=np.float64)
    places, weights = numbers[:, :2], numbers[:, 2]
    found = geometric_median(places, weights)
    best = error_by_search(places, weights)
    assert found.lower_km <= best * (1 + 1e-9)
    assert best <= found.cost_km * (1 + 1e-9)
    assert found.cost_km == pytest.approx(best, rel=1e-5, abs=1e-9)
    # What any guess at all says is a bound as well.
    elsewhere = slope_at(places[:, 0] - 2.3, places[:, 1] - 4.1, weights)
    assert float(lower_bound(elsewhere, weights.sum(), len(weights))) <= best * (1 + 1e-9)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 64]))
def test_ranks_by_classes_are_right_to_their_resolution(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    grid = Grid(0.0, 0.0, 4, 5, 1.0, (1,))
    rows = rng.dirichlet(np.full(3, 0.5), grid.records) + 1e-6
    rows /= rows.sum(axis=1, keepdims=True)
    prior = random_prior(grid, seed)
    _, tally = tally_of(grid, prior, rows, classes=classes)
    joint = prior.reshape(-1, 1) * rows
    exact: Any = leaks.sorted_ranks(np.sum([leaks.rank_masses(column.copy()) for column in joint.T], axis=0))
    found: Any = leaks.counted_ranks(tally.trimmed())
    for share, rank in exact["rank_quantiles"].items():
        assert 0 <= found["rank_quantiles"][share] - rank <= found["rank_quantiles_resolution"]
    assert 0 <= found["rank_mean"] - exact["rank_mean"] + 1e-9 <= found["rank_mean_resolution"] + 2e-9


# --- wrong beliefs --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["travel", "planar"])
def test_who_believes_the_truth_is_the_informed_attacker(stores: Stores, tmp_path: Path, kind: str) -> None:
    store = MechanismStore.open(str(stores(kind)))
    prior = store.read("prior").ravel()
    points = tmp_path / "points.csv"
    places = places_of(store.grid).tolist()
    lines = [f"{x!r},{y!r},{p!r}" for (x, y), p in zip(places, prior.tolist(), strict=True) if p > 0]
    points.write_text("x_km,y_km,weight\n" + "\n".join(lines))
    found = attacked(store.url, AttackRequest(attacker_prior=points, releases=0))
    *others, same = found["beliefs"]
    assert same["prior"] == "file"
    assert same["inference_error_km"] == pytest.approx(found["inference_error_km"], rel=1e-4)
    assert same["vulnerability"] == pytest.approx(found["vulnerability"], rel=1e-12)
    assert same["error_under_loss_km"] == pytest.approx(found["error_under_loss_km"], rel=1e-12)
    for belief in others:
        assert belief["inference_error_km"] >= found["inference_error_lower_km"]
        assert belief["vulnerability"] <= found["vulnerability"]
        assert belief["error_under_loss_km"] >= found["error_under_loss_km"] * (1 - 1e-12)
    # And being wrong does cost something.
    assert others[-1]["inference_error_km"] > found["inference_error_km"] * 1.001
    assert found["releases"] is None


def test_columns_of_the_attackers_file_may_be_named(stores: Stores, tmp_path: Path) -> None:
    store = MechanismStore.open(str(stores("travel")))
    assert store.projection is not None
    xy = places_of(store.grid)[::3]
    lines = [
        f"{lat!r},{k % 3},{lon!r}" for k, (lon, lat) in enumerate(store.projection.to_degrees(xy).tolist())
    ]
    found = []
    for name, columns in (("lat,weight,lon", BY_NAME), ("n,weight,e", PointColumns("e", "n"))):
        points = tmp_path / f"{name[0]}.csv"
        points.write_text("\n".join([name, *lines]))
        found.append(read_attacker_prior(store, points, columns))
    assert (found[0].record == found[1].record).all()
    assert (found[0].weight == found[1].weight).all()
    with pytest.raises(SpecError, match="only with --attacker-prior"):
        AttackRequest(prior_columns=PointColumns("e", "n"))


def test_a_belief_is_judged_by_definition(stores: Stores, tmp_path: Path) -> None:
    """All of it at one record: that is guessed, whatever is reported."""
    store = MechanismStore.open(str(stores("planar")))
    x, y = float(store.grid.x_km()[3]), float(store.grid.y_km()[2])
    points = tmp_path / "points.csv"
    points.write_text(f"x_km,y_km\n{x + 0.1!r},{y!r}\n1e6,0\n")
    prior, _, losses, _ = by_definition(stores("planar"))
    places = records_km(stores("planar"))
    found = attacked(store.url, AttackRequest(attacker_prior=points, releases=0))["beliefs"][-1]
    error = sum(p * math.dist(place, (x, y)) for p, place in zip(prior, places.tolist(), strict=True))
    assert (found["inference_error_km"], found["points_left_out"]) == (pytest.approx(error, rel=1e-12), 1)
    [note] = found["notes"]
    assert f"{points}: 1 of 2 points lie outside the grid (the furthest, point 2, by " in note
    assert found["vulnerability"] == pytest.approx(float(store.read("prior")[3, 2]), rel=1e-12)
    guess = store.array("problem/loss")[3, 2].argmin()
    assert found["error_under_loss_km"] == pytest.approx(float(prior @ losses[:, guess]), rel=1e-12)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lon,lat\n0,0\n", "has no place on Earth"),
        ("x_km,y_km\n5000,0\n", "no weight lies at the store's records"),
        ("x_km,y_km\n1,a\n", "is not a finite number"),
        (None, "no such file"),
    ],
)
def test_unusable_beliefs(stores: Stores, tmp_path: Path, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / "p.csv").write_text(text)
    request = AttackRequest(attacker_prior=tmp_path / "p.csv")
    refused(MdpextError, f"^--attacker-prior: .*{complaint}", attacked, stores("planar"), request)


# --- many releases --------------------------------------------------------------------------------


def curve_of(path: Path, releases: int, victims: int, seed: int) -> list[dict[str, Any]]:
    store = MechanismStore.open(str(path))
    over, prior = Passes(store, InlineExecutor(), Stages(silent)), store.read("prior")
    blocks = [prior[block.owned_x, block.owned_y].sum() for block in store.plan]
    masses = np.array([sum(blocks[index] for index in group) for group in over.groups])
    request = AttackRequest(releases=releases, victims=victims, random_seed=seed)
    return curves.release_curve(over, request, masses, victims)


def enumerated(path: Path, releases: int) -> dict[str, float]:
    """Return error, vulnerability and entropy after n releases, over all K^n sequences."""
    (prior, rows, _, _), places = by_definition(path), records_km(path)
    found = {"inference_error_km": 0.0, "vulnerability": 0.0, "entropy_bits": 0.0}
    for sequence in itertools.combinations_with_replacement(range(rows.shape[1]), releases):
        orders = math.factorial(releases)
        for y in set(sequence):
            orders //= math.factorial(sequence.count(y))
        joint = prior * rows[:, list(sequence)].prod(axis=1)
        total = joint.sum()
        found["inference_error_km"] += orders * geometric_median(places, joint).cost_km
        found["vulnerability"] += orders * joint.max()
        found["entropy_bits"] -= orders * float((joint * np.log2(joint / total)).sum())
    return found


def test_estimates_hold_what_enumeration_finds(stores: Stores) -> None:
    """Of intervals of 95 %, at least 80 % of so few hold the truth, if draws and posteriors are right."""
    path, seeds = stores("planar"), 20
    exact = {n: enumerated(path, n) for n in (1, 2, 3)}
    inside = {(n, key): 0 for n in exact for key in exact[n]}
    for seed in range(seeds):
        for entry in curve_of(path, 3, 60, seed):
            for key, truth in exact[entry["releases"]].items():
                stem, _, unit = key.rpartition("_") if key != "vulnerability" else (key, "", "")
                half = entry[f"{stem}_half_width{'_' + unit if unit else ''}"]
                inside[entry["releases"], key] += abs(entry[key] - truth) <= half
                assert 0 < half < truth / 2
            assert entry["inference_error_lower_km"] <= entry["inference_error_km"]
    assert min(inside.values()) >= 0.8 * seeds, inside


def test_one_release_is_the_exact_one(stores: Stores) -> None:
    found = attacked(stores("planar"), FEW)
    first, *later = found["releases"]["curve"]
    truth = enumerated(stores("planar"), 1)
    assert first["exact"]
    assert not any(entry["exact"] for entry in later)
    assert first["inference_error_km"] == found["inference_error_km"]
    assert first["inference_error_half_width_km"] == first["entropy_half_width_bits"] == 0
    for key, value in truth.items():
        assert first[key] == pytest.approx(value, rel=1e-6)
        assert found["releases"]["sticky"][key] == first[key]
    assert [entry["releases"] for entry in found["releases"]["curve"]] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["planar", "region"])
def test_posteriors_are_those_of_all_records(stores: Stores, kind: str) -> None:
    path = stores(kind)
    store = MechanismStore.open(str(path))
    prior, rows, _, _ = by_definition(path)
    reports = np.random.default_rng(0).integers(0, store.outputs, (7, 40)).astype(np.int32)
    lengths = curves.lengths_up_to(40)
    assert lengths == (1, 2, 3, 5, 10, 20, 30, 40)
    total = curves.Posteriors.nothing(7, len(lengths))
    for block in store.plan:
        total.add(curves.observe_blocks(store.url, (block.index,), reports, lengths))
    records = records_km(path) - (store.grid.west_km, store.grid.south_km)
    for v, c in itertools.product(range(7), range(len(lengths))):
        logs = np.log(prior) + np.log(rows)[:, reports[v, : lengths[c]]].sum(axis=1)
        share = np.exp(logs - logs.max())
        share /= share.sum()
        assert total.vulnerability()[v, c] == pytest.approx(share.max(), rel=1e-10)
        assert total.mean_km()[v, c] == pytest.approx(share @ records, rel=1e-9, abs=1e-9)
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        assert total.entropy_bits()[v, c] == pytest.approx(entropy, rel=1e-9, abs=1e-9)
        assert np.hypot(*(records[logs >= logs.max() - 1e-9] - total.peak_xy_km[v, c]).T).min() < 1e-9


# --- districts ------------------------------------------------------------------------------------


def test_districts_add_up_to_the_whole(stores: Stores) -> None:
    for kind in ("travel", "planar", "region"):
        result = evaluated(stores(kind))
        found = result["adversary"]
        there = [d for d in found["districts"] if d["probability"] > 0]
        assert len(there) > 1
        assert sum(d["probability"] for d in there) == pytest.approx(1, rel=1e-12)
        assert sum(d["records"] for d in there) == result["records_with_prior"]
        for key, whole in (("loss_km", result), ("inference_error_km", found)):
            assert sum(d["probability"] * d[key] for d in there) == pytest.approx(whole[key], rel=1e-12)
        worst = max(d["loss_quantiles_km"]["1"] for d in there)
        assert worst == result["loss_quantiles_km"]["1"]
        assert worst == pytest.approx(found["worst_record"]["loss_km"], rel=1e-14)


def test_rectangles_are_of_whole_cells() -> None:
    found = rectangles(Grid(0.0, 0.0, 6, 3, 1.0, (2,)))
    assert len(found.names) == 12
    assert found.names[:2] == ("column 1 of 4, row 1 of 3", "column 1 of 4, row 2 of 3")
    # Cells 0-1, 2-3, 4, 5 to the east; 0, 1, 2 to the north. The last records are of the last cells.
    assert (found.label[:, 0] // 3).tolist() == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 3
    assert found.label[0].tolist() == [0, 0, 1, 1, 2, 2, 2]


def geojson(path: Path, polygons: dict[str, list[tuple[float, float]]]) -> Path:
    """Write polygons whose corners are in the plane of the U, in km."""
    features = []
    for name, ring in polygons.items():
        degrees = PLANE.to_degrees(np.array([*ring, ring[0]], dtype=float) - (4, 5)).tolist()
        geometry = {"type": "Polygon", "coordinates": [degrees]}
        properties = {"name": name} if name else None
        features.append({"type": "Feature", "properties": properties, "geometry": geometry})
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


WEST = [(-1.0, -1.0), (4.1, -1.0), (4.1, 11.0), (-1.0, 11.0)]
NORTH_EAST = [(3.9, 5.1), (9.0, 5.1), (9.0, 11.0), (3.9, 11.0)]


def test_districts_of_a_file(stores: Stores, tmp_path: Path) -> None:
    store = MechanismStore.open(str(stores("region")))
    path = geojson(tmp_path / "d.geojson", {"west": WEST, "": NORTH_EAST})
    found = read_districts(store, path)
    assert found.names == ("west", "2")
    x, y = np.meshgrid(store.grid.x_km(), store.grid.y_km(), indexing="ij")
    # The store's plane is centred on its grid, a few metres from the U's own.
    middle = store.grid.box.west_km + store.grid.box.width_km / 2
    expected = np.where(x < middle + 0.1, 0, np.where(y > store.grid.box.south_km + 5.1, 1, -1))
    assert np.array_equal(found.label, expected)
    answers = attacked(store.url, AttackRequest(districts=path, releases=0))["districts"]
    assert [answer["name"] for answer in answers] == ["west", "2", "elsewhere"]
    assert sum(answer["probability"] for answer in answers) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("file", ["d.geojson", "d.gpkg"])
def test_districts_by_a_chosen_property(stores: Stores, tmp_path: Path, file: str) -> None:
    geopandas = pytest.importorskip("geopandas")
    store = MechanismStore.open(str(stores("region")))
    frame = geopandas.read_file(geojson(tmp_path / "plain.geojson", {"west": WEST, "east": NORTH_EAST}))
    frame.assign(Quartiere=["Prati", "Monti"], full=["x", ""]).to_file(tmp_path / file)
    assert read_districts(store, tmp_path / file).names == ("west", "east")
    assert read_districts(store, tmp_path / file, "Quartiere").names == ("Prati", "Monti")
    for key in ("full", "none"):
        named = f"{file}: feature {2 if key == 'full' else 1}: the property {key} is missing or empty; found"
        refused(DataError, named, read_districts, store, tmp_path / file, key)


def test_districts_of_a_map_that_goes_on_across_the_antimeridian(tmp_path: Path) -> None:
    """On it they are squares; in degrees their longitudes would jump."""
    geopandas = pytest.importorskip("geopandas")
    pytest.importorskip("pyogrio")
    store: Any = SimpleNamespace(grid=Grid(-9.0, -9.0, 6, 6, 3.0, (2,)), projection=Projection(180.0, -17.0))
    squares = [shapely.box(-5000, -5000, 5000, 5000), shapely.box(-8000, -8000, 8000, 8000)]
    frame = geopandas.GeoDataFrame({"name": ["in", "out"]}, geometry=squares)
    frame.set_crs("+proj=aeqd +lat_0=-17 +lon_0=180 +ellps=WGS84").to_file(tmp_path / "d.gpkg")
    label = read_districts(store, tmp_path / "d.gpkg").label
    x, y = np.meshgrid(store.grid.x_km(), store.grid.y_km(), indexing="ij")
    far = np.maximum(np.abs(x), np.abs(y))
    assert np.array_equal(label, np.select([far < 5, far < 8], [0, 1], -1))


def polygon(*ring: tuple[float, float]) -> str:
    return json.dumps({"type": "Polygon", "coordinates": [ring]})


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("none.geojson", None, "does not exist"),
        ("a.geojson", "{", "not a GeoJSON file"),
        ("a.geojson", "[1]", "not a GeoJSON file: an object has the type None"),
        ("a.geojson", '{"type": "FeatureCollection"}', "features must be a list"),
        (
            "a.geojson",
            '{"type": "FeatureCollection", "features": [{"type": "Feature"}]}',
            "holds no polygons",
        ),
        ("a.geojson", '{"type": "Feature", "geometry": null}', "holds no polygons"),
        ("a.geojson", '{"type": "Point", "coordinates": [0, 0]}', "holds no polygons"),
        ("a.geojson", polygon((0, 0), (1, 1)), "a ring must be a list of at least 4 positions"),
        (
            "a.geojson",
            polygon((0, 0), (2, 2), (2, 0), (0, 2), (0, 0)),
            "a polygon is broken: Self-intersection",
        ),
        ("a.geojson", polygon((0, 0), (900, 0), (900, 2), (0, 0)), "must be degrees"),
        ("a.geojson", polygon((179, 0), (-179, 0), (-179, 2), (179, 0)), "half-way round the Earth"),
        ("a.shp", "no shapes", "not recognized"),
    ],
)
def test_bad_districts(stores: Stores, tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    store = MechanismStore.open(str(stores("region")))
    refused(DataError, f"^--districts: .*{complaint}", read_districts, store, tmp_path / name)


def test_polygons_say_nothing_about_a_plane_without_a_place(stores: Stores) -> None:
    with pytest.raises(SpecError, match=r"^--districts: .*has no place on Earth"):
        attacked(stores("planar"), AttackRequest(districts=Path("any.geojson")))


def test_a_district_without_people_is_told() -> None:
    grid = Grid(0.0, 0.0, 2, 2, 1.0, (1,))
    prior = np.zeros(grid.shape)
    prior[0, 0] = prior[2, 2] = 0.5
    loss = np.where(prior > 0, 3.0, np.nan)
    found = by_district(rectangles(grid), prior, loss, loss / 2)
    assert [d["probability"] for d in found] == [0.5, 0, 0, 0.5]
    assert found[1]["loss_km"] is found[1]["loss_quantiles_km"] is found[1]["inference_error_km"] is None
    assert found[3]["inference_error_km"] == 1.5


# --- everywhere the same, within limits, and told ---------------------------------------------------


def test_what_takes_too_much_is_null_with_reason(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(stores("planar"))
    whole = attacked(path, FEW)
    monkeypatch.setattr(evaluate, "MOST_SORTED", 0)
    # Ten million records are still few enough for districts.
    assert attacked(path)["districts"] == whole["districts"]
    monkeypatch.setattr(measure, "MOST_RECORDS", 0)
    monkeypatch.setattr(measure, "MOST_SORTED", 0)
    monkeypatch.setattr(measure, "_MOST_PRODUCTS", 0)
    monkeypatch.setattr(curves, "MOST_ADDITIONS", 0)
    monkeypatch.setattr(tallies, "MOST_BINNED", 1)
    result = evaluated(path, FEW)
    found = result["adversary"]
    assert set(found["not_measured"]) == {"error_under_loss_km", "worst_record", "releases", "districts"}
    assert all(found[key] is None for key in found["not_measured"])
    assert set(found) == set(whole)
    assert 0 < found["rank_quantiles_resolution"] < whole["rank_quantiles"]["1"]
    for share, rank in whole["rank_quantiles"].items():
        assert 0 <= found["rank_quantiles"][share] - rank <= found["rank_quantiles_resolution"]
    # With one bin for everything, a bound that holds, and guesses that still are of some use.
    assert found["inference_error_lower_km"] <= whole["inference_error_km"] * (1 + 1e-9)
    assert whole["inference_error_lower_km"] <= found["inference_error_km"] * (1 + 1e-9)
    assert found["inference_error_km"] < whole["prior_inference_error_km"]
    assert "districts" in dict(table(result))


def test_fewer_people_where_there_are_many_records() -> None:
    request = AttackRequest(releases=100, victims=200)
    assert curves.victims_for(request, 60_000) == 200
    assert curves.LEAST_VICTIMS < curves.victims_for(request, 10_000_000) < 200


def test_damage_is_one_error(stores: Stores, tmp_path: Path) -> None:
    path = shutil.copytree(stores("planar"), tmp_path / "m.zarr")
    store = MechanismStore.open(str(path), mode="r+")
    # Where nobody is, so that nothing but this looks at it.
    i, j = np.argwhere(store.read("prior") == 0)[0].tolist()
    store.array("probability")[i, j] = np.nan
    refused(StoreError, "rows are damaged", attacked, path)


def test_the_command_line(stores: Stores, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = str(stores("region"))
    path = geojson(tmp_path / "d.geojson", {"the west": WEST})
    points = tmp_path / "p.csv"
    box = MechanismStore.open(store).grid.box
    points.write_text(f"x_km,y_km\n{box.west_km!r},{box.south_km!r}\n")
    options = ["--progress", "none", "--bound-seconds", "0", "--releases", "2", "--random-seed", "3"]
    options += ["--districts", str(path), "--attacker-prior", str(points)]
    answer = call(capfd, "evaluate", store, *options)
    request = AttackRequest(districts=path, attacker_prior=points, releases=2, random_seed=3)
    assert answer["adversary"] == attacked(store, request)
    told = dict(table(answer))
    assert f"off by {answer['adversary']['inference_error_km']:.4g} km" in told["attacker"]
    for label in ("in the west", "in elsewhere", "2 releases", "believes file", "worst record", "leakage"):
        assert label in told
    for wrong in (["--no-attacks", "--districts", str(path)], ["--releases", "-1"]):
        assert mdpext("evaluate", store, *wrong) == 2


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (AttackRequest(victims=1, releases=2), "victims: must be at least 2, got 1"),
        (AttackRequest(releases=-1), "--releases: must be at least 0"),
        (AttackRequest(random_seed=-1), "--random-seed: must be at least 0"),
    ],
)
def test_requests_that_cannot_be(stores: Stores, request_: AttackRequest, named: str) -> None:
    refused(SpecError, f"^{named}", attacked, stores("planar"), request_)
