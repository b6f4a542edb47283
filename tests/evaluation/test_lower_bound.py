"""The lower bound: below every optimum and every audited mechanism, whoever solves it, however it is cut."""

import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mdpext_dask import build, evaluate
from mdpext_dask.compute.executor import InlineExecutor, open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import GuaranteeViolation, SpecError, StoreError
from mdpext_dask.evaluation.bound import lattices, levels, search
from mdpext_dask.evaluation.bound import lower_bound as driver
from mdpext_dask.evaluation.bound.lattice_program import GAP, lattice_bound, reach_of
from mdpext_dask.evaluation.bound.lattices import (
    Found,
    Level,
    Offset,
    Part,
    bound_alone,
    lattice_of,
    offsets_of,
    promise_of,
)
from mdpext_dask.evaluation.bound.levels import Levels
from mdpext_dask.evaluation.bound.lower_bound import BoundRequest, LowerBound, estimate, lower_bound
from mdpext_dask.evaluation.bound.merging import groups_of, merged
from mdpext_dask.evaluation.bound.search import LEAST_PART
from mdpext_dask.evaluation.bound.seed_dual import seed_dual_bound
from mdpext_dask.events import silent
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.resume import create
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.seed import interior_point
from mdpext_dask.seed.block_tridiagonal import ends
from mdpext_dask.seed.grid_rows import PairRows, directions
from mdpext_dask.seed.record_program import Lattice, LatticePromise
from mdpext_dask.store.loss import cached_loss
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.baseline_checks import least_loss
from tests.support.inside import call
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
# What a program that is stopped at its gap may miss of the optimum.
MISSED = 2 * GAP
# Of the oracle: larger coefficients do it harm, and say next to nothing.
_LARGEST_EXPONENT = 23
# Of neighbours: at exponents of 21 the oracle has been seen to miss the optimum by 2e-4, at 22 by 2 %.
_LARGEST_OF_NEIGHBOURS = 8.0


def random_lattice(rng: np.random.Generator, shape: tuple[int, int], outputs: int) -> Lattice:
    side = rng.uniform(0.2, 2)
    x, y = (rng.normal() + side * np.arange(n) for n in shape)
    places = rng.uniform(0, side * max(shape), size=(outputs, 2))
    away = np.hypot(*np.moveaxis(np.stack(np.meshgrid(x, y, indexing="ij"), -1)[:, :, None] - places, -1, 0))
    prior = rng.exponential(size=shape) * (rng.random(shape) < 0.8)
    cost = prior[..., None] * (away if rng.random() < 0.5 else rng.exponential(size=(*shape, outputs)))
    return Lattice(x, y, cost, np.ones(shape, dtype=bool))


def optimum(lattice: Lattice, epsilon: float, p: float, near: int | None = None) -> float:
    """Return the least loss of an ε-mDP mechanism on the kept records, over all pairs or only those near."""
    at = np.argwhere(lattice.kept)
    places = np.stack([lattice.x_km[at[:, 0]], lattice.y_km[at[:, 1]]], axis=-1)
    cost = lattice.cost[lattice.kept]
    if not cost.any():
        return 0.0
    budget = epsilon * np.array([[np.linalg.norm(one - other, p) for other in places] for one in places])
    if near is not None:
        moves = {(a * s, b * s) for a, b in directions(near) for s in (1, -1)}
        far = np.array([[tuple(one - other) not in moves for other in at] for one in at])
        budget[far] = math.inf
    best = least_loss(cost, np.where(budget <= _LARGEST_EXPONENT, budget, math.inf))
    # Of a program in a thousand with such coefficients the oracle says that it is unbounded, which none is.
    assume(best is not None)
    return best


def over_offsets(lattice: Lattice, promise: LatticePromise, stride: int) -> float:
    total = 0.0
    for a, b in offsets_of(stride, lattice.kept.shape):
        x, y = slice(a, None, stride), slice(b, None, stride)
        part = Lattice(lattice.x_km[x], lattice.y_km[y], lattice.cost[x, y], lattice.kept[x, y])
        total += lattice_bound(part, promise)
    return total


# --- one lattice ----------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1), shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    p=st.sampled_from([1.0, 1.5, 2.0, 7.0, math.inf]), epsilon=st.sampled_from([0.05, 0.5, 2.0, 20.0]),
)  # fmt: skip
@example(seed=2**32 - 2, shape=(2, 3), p=1.0, epsilon=20.0)
def test_it_is_below_the_optimum(seed: int, shape: tuple[int, int], p: float, epsilon: float) -> None:
    rng = np.random.default_rng(seed)
    lattice = random_lattice(rng, shape, int(rng.integers(1, 5)))
    if rng.random() < 0.4:
        kept = rng.random(shape) < 0.7
        lattice = dataclasses.replace(lattice, kept=kept, cost=np.where(kept[..., None], lattice.cost, 0.0))
    found = lattice_bound(lattice, LatticePromise(epsilon, p))
    # The optimum does not grow with ε, so where the oracle is beyond its means that of a smaller ε will do.
    spacing = min(np.diff(axis).min(initial=np.inf) for axis in (lattice.x_km, lattice.y_km))
    told = min(epsilon, _LARGEST_OF_NEIGHBOURS / spacing)
    best = optimum(lattice, told, p)
    assert lattice.free_km <= found <= best * (1 + 1e-9) + 1e-9 * lattice.cost.max()
    if told < epsilon:
        return
    # Its own rows are all it leaves out; for p = 1 and p = inf they imply the others.
    reach = reach_of(p) if min(lattice.cropped().kept.shape) > 1 else 1
    assert found >= optimum(lattice, epsilon, p, near=reach) * (1 - MISSED) - 1e-9 * lattice.cost.max()
    if p in (1, math.inf) and lattice.kept.all():
        assert found == pytest.approx(best, rel=MISSED, abs=1e-9 * lattice.cost.max())


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1), p=st.sampled_from([1.0, 2.0, math.inf]))
def test_lattices_add_up_to_less_and_coarser_ones_to_less_still(seed: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    lattice = random_lattice(rng, (int(rng.integers(4, 6)), int(rng.integers(3, 6))), 3)
    promise = LatticePromise(1.0, p)
    best = optimum(lattice, 1.0, p)
    bounds = [over_offsets(lattice, promise, stride) for stride in (1, 2, 4)]
    assert bounds[0] <= best * (1 + 1e-9)
    # The pairs of the coarser lattice follow from two steps each of the finer.
    assert bounds[1] <= bounds[0] * (1 + MISSED)
    assert bounds[2] <= bounds[1] * (1 + MISSED)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_two_records_two_outputs_are_randomised_response(epsilon: float, p: float) -> None:
    # Each record costs 1 at the other's output; by symmetry M(y|x) = e^(ε d) / (1 + e^(ε d)) at the own one.
    cost = np.array([[[0.0, 0.5]], [[0.5, 0.0]]])
    lattice = Lattice(np.array([0.0, 1.5]), np.array([2.0]), cost, np.ones((2, 1), dtype=bool))
    expected = 1 / (1 + math.exp(1.5 * epsilon))
    for turned in (lattice, lattice.transposed()):
        found = lattice_bound(turned, LatticePromise(epsilon, p), gap=1e-8)
        assert expected * (1 - 1e-6) <= found <= expected


def test_an_allowance_only_lowers_it() -> None:
    lattice = random_lattice(np.random.default_rng(1), (4, 4), 4)
    exact, little, much = (
        lattice_bound(lattice, LatticePromise(1.0, 2.0, allowance), gap=1e-8) for allowance in (0, 1e-6, 0.1)
    )
    assert much < exact
    assert little == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("epsilon", [1e-9, 0.3, 1.0, 17.0, 135.0])
@pytest.mark.parametrize("sides", [(0.1, 0.0), (0.3, 0.4), (5.1, 1e-9)])
def test_growth_is_rounded_up_and_hardly(epsilon: float, sides: tuple[float, float]) -> None:
    with localcontext() as context:
        context.prec = 40
        apart = (Decimal(sides[0]) ** 2 + Decimal(sides[1]) ** 2).sqrt()
        exact = (Decimal(epsilon) * apart).exp()
        found = LatticePromise(epsilon, 2.0).growth(*sides)
        assert exact < Decimal(found) < exact * (1 + Decimal("1e-14") + Decimal("3e-12") * exact.ln())
    assert LatticePromise(1000.0, 2.0).growth(1.0, 0.0) == math.inf


def test_a_lattice_with_nothing_to_lose_or_to_choose() -> None:
    lattice = random_lattice(np.random.default_rng(2), (3, 3), 3)
    promise = LatticePromise(1.0, 2.0)
    nowhere = dataclasses.replace(lattice, cost=np.zeros_like(lattice.cost))
    assert lattice_bound(nowhere, promise) == 0
    one = dataclasses.replace(lattice, cost=lattice.cost[..., :1])
    assert lattice_bound(one, promise) == pytest.approx(one.cost.sum())
    assert lattice_bound(dataclasses.replace(nowhere, kept=np.zeros_like(lattice.kept)), promise) == 0


# --- its rows -------------------------------------------------------------------------------------


def test_directions_are_the_classic_neighbourhoods() -> None:
    assert [2 * len(directions(reach)) for reach in (1, 2, 3)] == [8, 16, 32]


@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 1, 4), (1, 2, 3), (2, 3, 4), (1, 1, 1), (4, 2, 1)])
def test_products_and_normal_equations_are_those_of_the_rows(shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(4)
    blocks, lines, positions = shape
    n, outputs = blocks * lines, 2
    grid = np.arange(n * positions).reshape(n, positions)
    growth = {d: 1 + rng.random(grid[ends(d)[0]].shape) for d in directions(lines)}
    dense = []
    for direction, g in growth.items():
        first, second = (grid[end].ravel() for end in ends(direction))
        for low, high in ((first, second), (second, first)):
            row = np.zeros((len(low), n * positions))
            row[np.arange(len(low)), low] = g.ravel()
            row[np.arange(len(low)), high] = -1
            dense.append(row)
    matrix = np.concatenate(dense)
    rows = PairRows(shape, {d: np.broadcast_to(g, (2, 1, *g.shape)) for d, g in growth.items()})
    z = rng.random((outputs, blocks, lines * positions))
    flat = z.reshape(outputs, -1)

    def by_row(groups: tuple[np.ndarray, ...], output: int) -> np.ndarray:
        return np.concatenate([g[way, output].ravel() for g in groups for way in (0, 1)])

    product = rows.forward(z)
    theta = tuple(rng.random(g.shape) for g in product)
    normal = rows.normal(theta)
    scale = 1 / np.sqrt(normal.main + 1)
    main = normal.main + 1
    for k in range(outputs):
        weights = by_row(theta, k)
        assert np.allclose(by_row(product, k), matrix @ flat[k])
        assert np.allclose(rows.transposed(theta)[k].ravel(), matrix.T @ weights)
        assert np.allclose(rows.magnitude(theta)[k].ravel(), np.abs(matrix).T @ weights)
        expected = matrix.T @ (weights[:, None] * matrix)
        assert np.allclose(normal.times(z)[k].ravel(), expected @ flat[k])
        unit = normal.scaled(scale)
        size = lines * positions
        s = np.diag(scale[k].ravel())
        whole = s @ (expected + np.eye(n * positions)) @ s
        for i in range(blocks):
            here = slice(i * size, (i + 1) * size)
            found = unit.off_diagonal(i)[k] + np.diag(main[k, i] * scale[k, i] ** 2)
            assert np.allclose(found, whole[here, here])
            if i + 1 < blocks:
                between = whole[here, (i + 1) * size : (i + 2) * size]
                assert np.allclose(unit.times(i, z[:, i + 1])[k], between @ z[k, i + 1])
                assert np.allclose(unit.transposed_times(i, z[:, i])[k], between.T @ z[k, i])


# --- parts of the lattices ------------------------------------------------------------------------


def test_the_estimate_and_its_error_are_unbiased_over_all_draws() -> None:
    rng = np.random.default_rng(5)
    shares = rng.dirichlet(np.ones(6))
    bounds = shares * rng.uniform(0.8, 1.2, size=6)
    for count in (3, 4, 5):
        draws = list(itertools.permutations(range(6), count))
        found = [estimate(bounds[list(draw)], shares[list(draw)], 6) for draw in draws]
        values, errors = np.array(found).T
        assert values.mean() == pytest.approx(bounds.sum(), rel=1e-12)
        assert (errors**2).mean() == pytest.approx(values.var(), rel=1e-9)


def test_bounds_in_proportion_to_the_prior_are_estimated_without_error() -> None:
    shares = np.array([0.1, 0.4, 0.2, 0.25, 0.05])
    value, error = estimate(2 * shares[[3, 0, 1]], shares[[3, 0, 1]], 5)
    assert value == pytest.approx(2)
    assert error == pytest.approx(0, abs=1e-12)
    # A pilot with no share of the prior tells nothing, and does no harm.
    assert math.isfinite(estimate([0.0, 0.1, 0.2], [0.0, 0.1, 0.2], 5)[0])


LEVELS = [(1, (1, 1)), (3, (1, 1)), (1, (2, 3)), (2, (3, 1)), (4, (2, 2)), (6, (4, 4))]


@pytest.mark.parametrize("shape", [(7, 5), (3, 8), (4, 4)])
@pytest.mark.parametrize(("stride", "windows"), LEVELS)
def test_every_record_is_in_one_part(shape: tuple[int, int], stride: int, windows: tuple[int, int]) -> None:
    level = Level(stride, windows, None, 1)
    count = np.zeros(shape, dtype=int)
    for window in itertools.product(*map(range, windows)):
        for offset in offsets_of(stride, shape):
            count[level.records(Part(window, offset), shape)] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("shape", [(7, 5), (13, 9)])
@pytest.mark.parametrize(("coarse", "fine"), list(itertools.product(LEVELS, repeat=2)))
def test_parts_of_a_finer_level_are_unions(shape: tuple[int, int], coarse: Any, fine: Any) -> None:
    before, after = (Level(*each, None, 1) for each in (coarse, fine))
    if not after.refines(before):
        return
    numbers = np.arange(math.prod(shape)).reshape(shape)
    several: dict[Part, list[int]] = {}
    for window in itertools.product(*map(range, before.windows)):
        for offset in offsets_of(before.stride, shape):
            part = Part(window, offset)
            records = numbers[before.records(part, shape)].ravel().tolist()
            several.setdefault(after.part_with(part, before), []).extend(records)
    for part, records in several.items():
        assert sorted(records) == numbers[after.records(part, shape)].ravel().tolist()


# --- merged outputs -------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1), p=st.sampled_from([1.0, 2.0]), epsilon=st.sampled_from([0.05, 1.0]),
    most=st.integers(1, 7), reach=st.sampled_from([1, 2]),
)  # fmt: skip
def test_merged_outputs_lose_less(seed: int, p: float, epsilon: float, most: int, reach: int) -> None:
    rng = np.random.default_rng(seed)
    lattice = random_lattice(rng, (int(rng.integers(1, 5)), int(rng.integers(2, 5))), 6)
    prior = np.where(lattice.cost.any(axis=-1), rng.exponential(size=lattice.kept.shape), 0.0)
    assume(prior.any())
    fewer = dataclasses.replace(lattice, cost=merged(lattice.cost, prior, most))
    assert fewer.cost.shape[-1] <= most
    promise, size = LatticePromise(epsilon, p), 1e-9 * lattice.cost.max()
    found = lattice_bound(fewer, promise, reach=reach)
    whole = lattice_bound(lattice, promise, reach=reach)
    assert found <= whole * (1 + MISSED) + size
    assert found <= optimum(lattice, epsilon, p) * (1 + 1e-9) + size
    if most >= 6:
        assert found == whole


def test_groups_are_of_outputs_that_cost_the_same() -> None:
    rng = np.random.default_rng(3)
    prior = rng.exponential(size=30)
    kinds = rng.exponential(size=(30, 5))
    kind = rng.integers(0, 5, size=40)
    group = groups_of(prior[:, None] * kinds[:, kind], prior, 12)
    # Where members are all alike, no group is cut.
    assert len(np.unique(group)) == len(np.unique(kind)) == len(np.unique(np.stack([group, kind]), axis=1).T)
    cost = prior[:, None] * np.abs(rng.random(30)[:, None] - rng.random(40))
    assert sorted(np.unique(groups_of(cost, prior, 12))) == list(range(12))
    # One output that is best for everybody: nothing to tell apart.
    assert not groups_of(np.zeros((30, 40)), prior, 12).any()


# --- stores ---------------------------------------------------------------------------------------


def problem(job: dict[str, dict[str, Any]], path: Path) -> MechanismStore:
    """Return a store with a job's problem and nothing else."""
    spec = parse_job(job)
    return create(spec, str(path), build_domain(spec))


def bound_of(store: MechanismStore, **options: Any) -> LowerBound:
    return lower_bound(store, InlineExecutor(), Stages(silent), BoundRequest(**options))


def searching(store: MechanismStore) -> search.Search:
    crew, levels = search.Crew.of(InlineExecutor()), Levels(store)
    return search.Search(store, levels, InlineExecutor(), Stages(silent), crew, time.monotonic() + 1e6)


def each_of(store: MechanismStore, level: Level) -> dict[Part, Found]:
    """Return what is proved about every part of a level."""
    windows = itertools.product(*map(range, level.windows))
    parts = itertools.starmap(Part, itertools.product(windows, offsets_of(level.stride, store.grid.shape)))
    found = {part: bound_alone(store.url, level, part) for part in parts}
    return {part: one for part, one in found.items() if one is not None}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> MechanismStore:
    return problem(small_job(domain={"refine": [2]}), tmp_path_factory.mktemp("bound") / "tiny.zarr")


TRIANGLE = [[-74.02, 40.70], [-73.96, 40.70], [-73.96, 40.80], [-74.02, 40.70]]


@pytest.mark.parametrize(
    ("p", "region"),
    [
        (2, False),
        ("inf", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, False), (1.5, True), (2, True)]),
    ],
)
def test_no_audited_mechanism_is_below_it(tmp_path: Path, small_job: Job, p: Any, region: bool) -> None:
    domain: dict[str, Any] = {"metric_p": p, "refine": [2]}
    if region:
        (tmp_path / "region.json").write_text(json.dumps({"type": "Polygon", "coordinates": [TRIANGLE]}))
        domain["region"] = str(tmp_path / "region.json")
    path = str(tmp_path / "s.zarr")
    summary = build(parse_job(small_job(domain=domain)), path)
    store = MechanismStore.open(path)
    assert store.kept.all() != region
    found = [bound_of(store, stride=stride) for stride in (1, 2)]
    assert all(one.certified and one.whole for one in found)
    assert summary["loss_km"] > found[0].lower_bound_km * 1.01
    assert found[1].lower_bound_km <= found[0].lower_bound_km * (1 + MISSED)
    assert all(one.lower_bound_km > 0 for one in found)
    windows = [bound_of(store, stride=stride, window=4).certified_km for stride in (1, 2)]
    assert all(few <= one.lower_bound_km * 1.01 for few, one in zip(windows, found, strict=True))
    promise = promise_of(store)
    assert (promise.epsilon_per_km, promise.allowance_km) == (1.0, 1e-6)


@pytest.mark.slow
def test_noise_loses_more_than_windows_with_merged_outputs(tmp_path: Path, small_job: Job) -> None:
    path = str(tmp_path / "s.zarr")
    job = small_job(domain={"refine": [2]}, extension={"method": "noise"}, privacy={"budget": "certified"})
    summary = build(parse_job(job), path)
    store = MechanismStore.open(path)
    for columns in (1, 3, None):
        bounds = each_of(store, Level(1, (2, 2), columns, 2))
        assert 0 < math.fsum(one.bound_km for one in bounds.values()) < summary["loss_km"]


def test_a_lattice_of_a_store_is_its_prior_times_its_loss(tiny: MechanismStore) -> None:
    lattice = lattice_of(tiny, 3, (1, 2))
    prior = tiny.read("prior")[1::3, 2::3]
    x, y = tiny.grid.x_km()[1::3], tiny.grid.y_km()[2::3]
    loss = cached_loss(tiny.url, tiny.problem_sha256)
    places = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
    assert np.array_equal(lattice.cost, prior[..., None] * loss.rows(places).reshape(*prior.shape, -1))
    assert lattice.kept.all()


def test_a_damaged_prior_is_no_problem_to_bound(tmp_path: Path, small_job: Job) -> None:
    store = problem(small_job(domain={"refine": [1]}), tmp_path / "s.zarr")
    store.array("prior")[0, 0] = np.nan
    refused(StoreError, "the prior is damaged", bound_of, store, stride=1)


@pytest.mark.slow
def test_a_part_is_an_estimate_and_certifies_less(tiny: MechanismStore) -> None:
    whole = bound_of(tiny, stride=3)
    level = Levels(tiny).whole(3)
    each = {part.offset: one.bound_km for part, one in each_of(tiny, level).items()}
    assert whole.lower_bound_km == pytest.approx(sum(each.values()), rel=1e-14)
    part = bound_of(tiny, stride=3, offsets=4, random_seed=1)
    assert not part.certified
    assert part.standard_error_km is not None
    assert abs(part.lower_bound_km - whole.lower_bound_km) < 6 * part.standard_error_km
    free = sum(lattice_of(tiny, 3, o).free_km for o in each if o not in part.offsets)
    assert part.certified_km == pytest.approx(sum(each[o] for o in part.offsets) + free, rel=1e-12)
    assert part.certified_km < whole.lower_bound_km
    assert bound_of(tiny, stride=3, offsets=4, random_seed=2).offsets != part.offsets
    assert bound_of(tiny, stride=3, offsets=90).whole


class Ticks:
    """A clock that goes on by a little whenever somebody looks at it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now

    def rule(self, patch: pytest.MonkeyPatch) -> None:
        """Be the clock of all that a bound is made by; libraries keep theirs."""
        for module in (driver, search, lattices, interior_point):
            patch.setattr(module, "time", SimpleNamespace(monotonic=self))


# Steps of a clock that stand for machines of any speed, from one that is done in a moment to one that hardly
# begins: all moments at which the time may be up.
@pytest.mark.parametrize(
    "tick",
    [
        1e-9,
        1e-3,
        *(pytest.param(case, marks=pytest.mark.slow) for case in [1e-4, 3e-4, 3e-3, 0.01, 0.03, 0.1, 0.4]),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"offsets": 4}])
def test_a_limit_is_kept_and_what_there_is_then_is_certified(
    tiny: MechanismStore, monkeypatch: pytest.MonkeyPatch, tick: float, asked: dict[str, int]
) -> None:
    best = bound_of(tiny, stride=1).certified_km
    free = lattice_of(tiny, 1, (0, 0)).free_km
    clock = Ticks(tick)
    clock.rule(monkeypatch)
    found = bound_of(tiny, seconds=1.0, **asked)
    monkeypatch.undo()
    # Beyond it are those looks at the clock that find the time up: one for each task that is left.
    assert clock.now <= 1.0 + 30 * tick
    assert found.certified_km <= best * (1 + MISSED)
    assert found.certified_km >= free * (1 - 1e-9) or tick >= 0.1
    if found.standard_error_km is None:
        assert found.lower_bound_km == found.certified_km
    else:
        assert LEAST_PART <= found.offsets_used < found.offsets_total
    if tick == 1e-9 and not asked:
        assert (found.stride, found.whole) == (1, True)
        assert found.certified_km == pytest.approx(best, rel=MISSED)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), looks=st.integers(1, 400))
def test_a_program_that_is_stopped_proves_less(seed: int, looks: int) -> None:
    lattice = random_lattice(np.random.default_rng(seed), (4, 5), 3)
    whole = lattice_bound(lattice, LatticePromise(1.0, 2.0))
    with pytest.MonkeyPatch.context() as patch:
        Ticks(1.0).rule(patch)
        stopped = lattice_bound(lattice, LatticePromise(1.0, 2.0), deadline=looks)
    assert lattice.free_km <= stopped <= whole * (1 + MISSED)


@pytest.mark.slow
def test_what_is_solved_of_a_finer_level_replaces_what_stood_for_it(
    tiny: MechanismStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of windows of stride 4, all of stride 2 in one piece but the last lattice, by hand."""
    hunt = searching(tiny)
    first, second = Level(4, (2, 1), 2, 1), hunt.levels.whole(2)
    assert second.refines(first)
    solve = hunt.solve
    asked = []

    def but_the_last(level: Level, offsets: list[Offset]) -> dict[Part, Found]:
        asked.append(level)
        return solve(level, offsets if level == first else offsets[:-1])

    monkeypatch.setattr(hunt, "solve", but_the_last)
    monkeypatch.setattr(hunt, "after", lambda _: second)
    found = driver._ever_finer(hunt, first, hunt.free_km())
    before, after = each_of(tiny, first), each_of(tiny, second)
    expected = sum(one.bound_km for part, one in after.items() if part.offset != (1, 1))
    left = [part for part in before if (part.offset[0] % 2, part.offset[1] % 2) == (1, 1)]
    expected += sum(before[part].bound_km for part in left)
    assert asked == [first, second]
    assert found.certified_km == pytest.approx(expected, rel=1e-12)
    assert found.certified_km <= expected * (1 + 1e-14)
    assert (found.stride, found.offsets_used, found.offsets_total) == (2, 3, 4)
    assert sum(one.bound_km for one in before.values()) < found.certified_km


def test_windows_add_up_to_less_than_the_whole(tiny: MechanismStore) -> None:
    """And larger ones to more, but for the gaps at which programs stop."""
    whole = bound_of(tiny, stride=1).certified_km
    sums = []
    for windows in (8, 4, 2):
        level = Level(1, (windows, windows), None, reach_of(2))
        sums.append(sum(one.bound_km for one in each_of(tiny, level).values()))
    missed = 1 + 2 * level.gap
    assert all(few <= more * missed for few, more in itertools.pairwise([*sums, whole]))
    assert sums[0] < 0.95 * sums[-1]
    assert free_of(tiny) < sums[0]


def free_of(store: MechanismStore) -> float:
    return lattice_of(store, 1, (0, 0)).free_km


def test_windows_without_prior_are_skipped(tmp_path: Path, small_job: Job) -> None:
    store = problem(small_job(domain={"refine": [2]}), tmp_path / "s.zarr")
    level = Level(1, (2, 2), None, 2)
    prior = store.read("prior")
    half = prior.shape[0] // 2
    prior[half:] = 0
    store.array("prior")[...] = prior
    every = Levels(store)
    assert sorted(every.windows(level)) == [(0, 0), (0, 1)]
    assert {part.window for part in every.parts(level, [(0, 0)])} == {(0, 0), (0, 1)}
    assert bound_alone(store.url, level, Part((1, 0), (0, 0))) == Found(0.0, 0.0, 0.0, True)
    assert every.heaviest(5) == tuple(n % 5 for n in np.argwhere(prior == prior.max())[0])


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, 7])
def test_windows_that_are_asked_for_are_the_same_whoever_solves_them(
    tiny: MechanismStore, window: int
) -> None:
    asked = BoundRequest(stride=2, window=window)
    alone = lower_bound(tiny, InlineExecutor(1), Stages(silent), asked)
    with open_executor(ClusterSection(kind="local"), 2) as executor:
        shared = lower_bound(tiny, executor, Stages(silent), asked)
    assert dataclasses.replace(alone, seconds=0.0) == dataclasses.replace(shared, seconds=0.0)
    assert alone.window is not None
    assert max(alone.window) <= window
    assert alone.whole
    assert alone.certified
    assert alone.certified_km <= bound_of(tiny, stride=2).certified_km * (1 + 1e-2)
    part = bound_of(tiny, stride=2, window=window, offsets=3)
    assert part.standard_error_km is not None
    assert abs(part.lower_bound_km - alone.lower_bound_km) < 6 * part.standard_error_km + 1e-9
    assert part.certified_km < alone.certified_km


def test_the_speed_that_is_seen_decides_the_level(tiny: MechanismStore) -> None:
    hunt = searching(tiny)
    finest = hunt.levels.whole(1)
    seconds = hunt.seconds(finest, 1)
    assert hunt.first(0.5) == finest
    assert hunt.after(finest) is None
    assert hunt.after(Level(4, (2, 2), 2, 1)) == finest
    hunt.pace = 0.505e6 / seconds  # a little longer than there is
    coarser = hunt.first(0.5)
    assert coarser is not None
    assert hunt.levels.quality(coarser) < hunt.levels.quality(finest)
    hunt.pace = 1e12
    assert hunt.first(0.5) is hunt.after(coarser) is None
    assert hunt.part(None)[1] == LEAST_PART


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 0}, "--stride: must be between 1 and"),
        ({"stride": 1000}, "--stride: must be between 1 and"),
        ({"stride": 3, "offsets": 2}, "--offsets: an estimate"),
        ({"offsets": 1}, "--offsets: an estimate"),
        ({"window": 4}, "--window: takes a --stride"),
        ({"stride": 1, "window": 0}, "--window: .* at least one record"),
    ],
)
def test_what_cannot_be_is_refused(tiny: MechanismStore, options: dict[str, Any], message: str) -> None:
    refused(SpecError, message, bound_of, tiny, **options)


def test_too_large_programs_are_refused(tiny: MechanismStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "predicted_bytes", lambda shape, *_: 2**31 * shape[0] * shape[1])
    refused(SpecError, r"need .* GiB of memory", bound_of, tiny, stride=1)
    found = bound_of(tiny, seconds=1e6)
    assert found.stride > 1 or found.window is not None


@pytest.mark.slow
def test_the_gap(stores: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(shutil.copytree(stores("travel"), tmp_path / "s.zarr"))
    found = evaluate(path, attacks=None)
    assert found["gap"] == pytest.approx(found["loss_km"] / found["lower_bound_km"] - 1)
    assert found["gap"] > 0
    assert found["lower_bound_certified"]
    assert (found["lower_bound_stride"], found["offsets_used"], found["offsets_total"]) == (1, 1, 1)
    assert found["lower_bound_offsets"] is found["lower_bound_standard_error_km"] is None
    assert evaluate(path, bound=BoundRequest(seconds=0), attacks=None)["lower_bound_km"] is None
    capfd.readouterr()
    answer = call(capfd, "evaluate", path, "--no-attacks", "--stride=3", "--offsets=4", "--random-seed=6")
    assert not answer["lower_bound_certified"]
    assert len(answer["lower_bound_offsets"]) == answer["offsets_used"] == 4

    # Rows that report the best output whatever it gives away.
    store = MechanismStore.open(path, mode="r+")
    points = np.stack(np.meshgrid(store.read("x"), store.read("y"), indexing="ij"), axis=-1)
    best = cached_loss(store.url, store.problem_sha256).rows(points.reshape(-1, 2)).argmin(axis=1)
    rows = np.eye(store.outputs, dtype=np.float32)[best]
    store.array("probability")[...] = rows.reshape(*store.grid.shape, -1)
    refused(GuaranteeViolation, r"is less than the .* that every mechanism", evaluate, path, attacks=None)


def test_the_dual_of_the_seed_where_it_is_a_bound(tmp_path: Path, small_job: Job) -> None:
    domain = {"refine": [1], "metric_p": 1}
    path = str(tmp_path / "s.zarr")
    job = small_job(domain=domain, privacy={"budget": "certified"}, seed={"refine_rounds": 0})
    build(parse_job(job), path)
    store = MechanismStore.open(path)
    dual = seed_dual_bound(store)
    best = bound_of(store, stride=1)
    assert dual is not None
    assert dual <= best.lower_bound_km * (1 + MISSED)
    assert dual >= 0.99 * best.lower_bound_km


@pytest.mark.parametrize("domain", [{"refine": [2], "metric_p": 1}, {"refine": [1]}])
def test_tighter_budgets_have_no_dual(tmp_path: Path, small_job: Job, domain: dict[str, Any]) -> None:
    path = str(tmp_path / "s.zarr")
    build(parse_job(small_job(domain=domain)), path)
    assert seed_dual_bound(MechanismStore.open(path)) is None


def test_an_estimate_above_the_loss_is_dropped(tiny: MechanismStore, monkeypatch: pytest.MonkeyPatch) -> None:
    too_high = LowerBound(9.0, 2.0, 1.0, 2, None, None, ((0, 0),), 4, "lattices", 0.0)
    monkeypatch.setattr(driver, "lower_bound", lambda *_, **__: too_high)
    facts = driver.bound_facts(tiny, InlineExecutor(), Stages(silent), 1.5, BoundRequest())
    assert (facts["lower_bound_km"], facts["lower_bound_certified"]) == (1.0, True)
    assert facts["lower_bound_standard_error_km"] is None
    assert facts["gap"] == pytest.approx(0.5)
    # Below the loss, an estimate is one.
    facts = driver.bound_facts(tiny, InlineExecutor(), Stages(silent), 9.5, BoundRequest())
    assert (facts["lower_bound_km"], facts["lower_bound_certified"]) == (9.0, False)
