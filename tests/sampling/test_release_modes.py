"""Sticky answers, ledgers and coarse places of a finished mechanism; and places that are anything at all."""

import hmac
import math
import multiprocessing
import os
import pickle
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mdpext_dask import Mechanism, ReleaseBudget, StickyKey, open_mechanism
from mdpext_dask.errors import BudgetExceeded, DataError, MdpextError, SpecError, StoreError
from mdpext_dask.problem.grid import Grid, coarse_indices, coarse_radius_km, coarse_steps
from mdpext_dask.runtime.integer_sampling import integer_weights
from mdpext_dask.runtime.random_bits import Words, words_for_tests
from mdpext_dask.sampling import mechanism as mechanisms
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_at
from tests.support.forged import attribute
from tests.support.refusals import refused

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

LON, LAT = -73.98, 40.75
KEY = StickyKey(bytes(range(32)), "2026")


@pytest.fixture
def budget(tmp_path: Path) -> ReleaseBudget:
    return ReleaseBudget(tmp_path / "ledger", 5)


def around(n: int, seed: int = 0) -> NDArray[np.float64]:
    """Return places in and around the grid, lon and lat."""
    rng = np.random.default_rng(seed)
    return np.array([LON, LAT]) + rng.uniform(-0.1, 0.1, (n, 2))


def record_of(mechanism: Mechanism, lon: float, lat: float) -> tuple[int, int]:
    row = mechanism.row(lon=lon, lat=lat)
    grid = mechanism.places.grid
    i, j = np.searchsorted(grid.x_km(), row.x), np.searchsorted(grid.y_km(), row.y)
    return int(i), int(j)


# --- sticky ---------------------------------------------------------------------------------------


def test_a_sticky_answer_is_the_one_that_the_key_says(mechanism: Mechanism, store: str) -> None:
    """In plain Python, from the stored row, the identity in the attributes and HMAC alone."""
    digest = MechanismStore.open(store).attributes["mechanism_sha256"]
    for k, (lon, lat) in enumerate(around(20)):
        user = f"user {k}"
        i, j = record_of(mechanism, lon, lat)
        row = rows_at(mechanism._store, np.array([i]), np.array([j]))[0]
        weights = [int(float(v) * 2**60) for v in row]
        total = sum(weights)
        parts = (b"mdpext sticky draw, version 1", b"2026", digest.encode())
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        key = hmac.digest(KEY.secret, text, "sha256")
        place = (i * mechanism.places.grid.shape[1] + j).to_bytes(8, "big")
        messages = [place + counter.to_bytes(4, "big") + user.encode() for counter in range(9)]
        blocks = b"".join(hmac.digest(key, message, "sha256") for message in messages)
        words = [int.from_bytes(blocks[k : k + 8], "little") for k in range(0, len(blocks), 8)]
        below = next(word for word in words if word < 15 * total) % total
        expected = next(k for k in range(20) if sum(weights[: k + 1]) > below)
        answer = mechanism.sample(lon=lon, lat=lat, user=user, sticky=KEY)
        assert np.array_equal(answer, mechanism.output_lonlat[[expected]])


def test_alone_in_a_batch_and_in_another_process_it_is_the_same(mechanism: Mechanism, store: str) -> None:
    places = around(300)
    users = [f"user {k % 7}" for k in range(300)]
    drawn, _ = mechanism.sample_points(places, users=users, sticky=KEY)
    again, _ = open_mechanism(store).sample_points(places[::-1], users=np.array(users[::-1]), sticky=KEY)
    assert np.array_equal(again[::-1], drawn)
    for place, user, output in list(zip(places, users, drawn, strict=True))[:40]:
        alone = mechanism.sample(lon=place[0], lat=place[1], user=user, sticky=KEY)
        assert np.array_equal(alone[0], mechanism.output_lonlat[output])
    other, _ = mechanism.sample_points(places, users=users, sticky=KEY.for_epoch("2027"))
    assert not np.array_equal(other, drawn)
    assert len(set(drawn.tolist())) > 3


def test_a_remap_remaps_sticky_answers(mechanism: Mechanism) -> None:
    """A remap that changes gives another function of the same draw, not another draw."""
    table = np.roll(np.arange(20), 3)
    remapped = Mechanism(mechanism._store, table)
    places, users = around(50), [f"{k}" for k in range(50)]
    drawn, _ = mechanism.sample_points(places, users=users, sticky=KEY)
    assert np.array_equal(remapped.sample_points(places, users=users, sticky=KEY)[0], table[drawn])


def test_what_does_not_go_together_is_refused(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    place = {"lon": LON, "lat": LAT}
    for arguments, complaint in (
        ({"sticky": KEY}, "user: is needed"),
        ({"budget": budget}, "user: is needed"),
        ({"user": "anna"}, "goes with a sticky key or a release budget"),
        ({"sticky": KEY, "user": "anna", "n": 2}, "always the same one"),
        ({"sticky": KEY, "user": ""}, "not empty"),
        ({"sticky": KEY, "user": 7}, "user"),
        ({"budget": budget, "user": None}, "user: is needed"),
    ):
        refused(SpecError, complaint, mechanism.sample, **place, **arguments)
    places = np.array([[LON, LAT], [LON, LAT]])
    for users in (["anna"], ["anna"] * 3, "ab", ["anna", ""], ["anna", None], ["anna", 7.0]):
        refused(SpecError, "user", mechanism.sample_points, places, users=users, sticky=KEY)
    assert budget.spent("anna") == 0


# --- ledger ---------------------------------------------------------------------------------------


class _Counted:
    """Random words that are counted."""

    def __init__(self) -> None:
        self.words: Words = words_for_tests(1)
        self.asked = 0

    def __call__(self, n: int) -> NDArray[np.uint64]:
        self.asked += n
        return self.words(n)


def test_draws_are_charged_first_and_refused_undrawn(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    source = _Counted()
    place: dict[str, Any] = {"lon": LON, "lat": LAT, "user": "anna", "budget": budget}
    mechanism.sample(**place, n=4, entropy_for_tests=source)
    assert (budget.spent("anna"), budget.composed_epsilon("anna")) == (4, 4 * mechanism.epsilon_per_km)
    asked = source.asked
    refused(BudgetExceeded, "", mechanism.sample, **place, n=2, entropy_for_tests=source)
    assert source.asked == asked
    assert budget.spent("anna") == 4

    def crash(_: int) -> NDArray[np.uint64]:
        raise RuntimeError("in the midst of a draw")

    refused(RuntimeError, "", mechanism.sample, **place, entropy_for_tests=crash)
    assert budget.spent("anna") == 5


def test_a_batch_is_charged_whole_or_not_at_all(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    places, source = around(8), _Counted()
    users = ["anna"] * 6 + ["ben"] * 2
    with pytest.raises(BudgetExceeded):
        mechanism.sample_points(places, users=users, budget=budget, entropy_for_tests=source)
    assert source.asked == 0
    assert [budget.spent(user) for user in ("anna", "ben")] == [0, 0]
    mechanism.sample_points(places[1:], users=users[1:], budget=budget)
    assert [budget.spent(user) for user in ("anna", "ben")] == [5, 2]


def test_a_held_ledger_refuses_places_one_by_one(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    """Each place that is paid for has the answer that it has alone; -1 are those that nothing is left for."""
    places, users = around(20), [f"user {k % 3}" for k in range(20)]
    alone, outside = mechanism.sample_points(places, users=users, sticky=KEY)
    with budget.held() as held:
        for kept, rule in ((np.full(20, True), "nearest"), (~outside, "drop")):
            outputs, _ = mechanism.sample_points(places, users=users, sticky=KEY, budget=held, outside=rule)  # type: ignore[call-overload]
            assert outputs[outputs >= 0].tolist() == alone[outputs >= 0].tolist()
            assert (outputs[~kept] == -1).all()
            for user in set(users):
                mine = np.array([name == user for name in users])
                records = {record_of(mechanism, *place) for place in places[mine & (outputs >= 0)].tolist()}
                assert len(records) <= budget.spent(user) == 5
        refused(BudgetExceeded, "too few", mechanism.sample, LON, LAT, user="user 1", budget=held)
    assert 0 < outside.sum() < len(outside)


def test_several_batches_are_charged_together(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    places = around(3)
    with pytest.raises(BudgetExceeded), budget.batch() as pending:  # noqa: PT012
        for _ in range(2):
            mechanism.sample_points(places, users=["anna"] * 3, budget=pending)
    assert budget.spent("anna") == 0
    with budget.batch() as pending:
        for _ in range(2):
            mechanism.sample_points(places, users=["anna", "ben", "ben"], budget=pending)
    assert [budget.spent(user) for user in ("anna", "ben")] == [2, 4]


def test_what_is_dropped_is_not_charged(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    places = np.array([[LON, LAT], [-70.0, LAT], [LON, LAT]])
    arguments: dict[str, Any] = {"users": ["anna", "anna", "ben"], "budget": budget, "sticky": KEY}
    drawn, _ = mechanism.sample_points(places, **arguments, outside="drop")
    assert drawn[1] == -1
    assert [budget.spent(user) for user in ("anna", "ben")] == [1, 1]
    alone, _ = mechanism.sample_points(places[2:], users=["ben"], sticky=KEY)
    assert drawn[2] == alone[0]
    refused(DataError, "", mechanism.sample_points, places, **arguments, outside="error")
    assert budget.spent("anna") == 1


def test_sticky_answers_cost_by_the_record(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    places = around(30)
    records = [record_of(mechanism, lon, lat) for lon, lat in places]
    assert len(set(records)) > 5
    used: set[tuple[int, int]] = set()
    for place, record in zip(places, records, strict=True):
        arguments: dict[str, Any] = {"lon": place[0], "lat": place[1], "user": "anna", "sticky": KEY}
        if len(used | {record}) > 5:
            refused(BudgetExceeded, "", mechanism.sample, **arguments, budget=budget)
            continue
        used.add(record)
        for _ in range(2):
            mechanism.sample(**arguments, budget=budget)
        assert budget.spent("anna") == len(used)
    # What has been answered is answered again, alone and in a batch; another epoch is another release.
    again = [place for place, record in zip(places, records, strict=True) if record in used]
    mechanism.sample_points(np.array(again), users=["anna"] * len(again), sticky=KEY, budget=budget)
    arguments = {"lon": again[0][0], "lat": again[0][1], "user": "anna", "budget": budget}
    refused(BudgetExceeded, "", mechanism.sample, **arguments, sticky=KEY.for_epoch("2027"))


def test_answers_of_another_mechanism_are_charged_anew(store: str, budget: ReleaseBudget) -> None:
    """What is another mechanism draws anew, so it is one more release of the place."""
    for release, digest in enumerate((None, "another", None), start=1):
        mechanism = open_mechanism(store)
        if digest is not None:
            mechanism.__dict__["mechanism_sha256"] = digest
        mechanism.sample(lon=LON, lat=LAT, user="anna", sticky=KEY, budget=budget)
        mechanism.sample_points(np.array([[LON, LAT]]), users=["anna"], sticky=KEY, budget=budget)
        assert budget.spent("anna") == min(release, 2)


# --- coarse places --------------------------------------------------------------------------------


@given(
    st.integers(1, 30), st.integers(1, 9), st.lists(st.floats(0, 1), min_size=1, max_size=20),
    st.sampled_from([0.1, 0.3, 1.0]),
)  # fmt: skip
def test_a_coarse_index_is_the_nearest_of_few(last: int, steps: int, parts: list[float], h: float) -> None:
    position = np.array(parts) * last
    kept = np.unique([*range(0, last + 1, steps), last])
    found = coarse_indices(position, steps, last)
    assert set(found.tolist()) <= set(kept.tolist())
    moved = np.abs(found - position)
    # At a gap that is shorter than the others, the last one, it need not be the nearest, but near enough.
    assert (moved <= steps / 2 + 1e-9).all()
    nearest = np.abs(position[:, None] - kept).min(axis=1)
    inner = position <= last // steps * steps
    assert np.allclose(moved[inner], nearest[inner], rtol=0, atol=1e-9)
    grid = Grid(0.0, 0.0, last, last, h, (1,))
    x, y = position * h, position[::-1] * h
    i, j = grid.coarse_records(np.stack([x, y], axis=-1), steps)
    assert [grid.record_at(a, b, steps) for a, b in zip(x.tolist(), y.tolist(), strict=True)] == list(
        zip(i.tolist(), j.tolist(), strict=True)
    )


def test_steps_and_radius() -> None:
    assert [coarse_steps(km, 0.25) for km in (0.01, 0.25, 0.26, 0.5, 0.75, 1)] == [1, 1, 2, 2, 3, 4]
    assert coarse_steps(0.3, 0.1) == 3  # and not 4, by rounding
    assert coarse_radius_km(3, 0.2, 2.0) == pytest.approx(math.hypot(0.3, 0.3))
    assert coarse_radius_km(3, 0.2, 1.0) == pytest.approx(0.6)
    assert coarse_radius_km(3, 0.2, math.inf) == pytest.approx(0.3)
    for wrong in (0, -1.0, math.nan, math.inf, 1.7e308, "1", None):
        refused(SpecError, "place_km", coarse_steps, wrong, 0.25)


def test_coarse_places_cost_what_is_reported(mechanism: Mechanism) -> None:
    """Over all pairs of places: the log ratio is at most ε (d + 2ρ'), and ρ is not enough."""
    plain, coarse = mechanism.quantisation_km(), mechanism.quantisation_km(2.0)
    grid = mechanism.places.grid
    assert plain == mechanism.max_quantisation_km == pytest.approx(grid.spacing_km / math.sqrt(2))
    assert coarse == pytest.approx(3 * plain)
    xy = np.random.default_rng(3).uniform(-4, 4, (300, 2))
    i, j = grid.coarse_records(xy, 3)
    assert plain < np.hypot(grid.x_km()[i] - xy[:, 0], grid.y_km()[j] - xy[:, 1]).max() <= coarse
    logs = np.log(integer_weights(rows_at(mechanism._store, i, j)) / 2.0**60)
    steepest = np.abs(logs[:, None] - logs[None]).max(axis=2)
    apart = np.hypot(*(xy[:, None] - xy[None]).transpose(2, 0, 1))
    assert (steepest <= (mechanism.epsilon_per_km * (apart + 2 * coarse) + 1e-6)).all()


def test_a_place_that_wobbles_is_one_place(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    grid = mechanism.places.grid
    x, y = float(grid.x_km()[6]), float(grid.y_km()[6])
    wobble = np.random.default_rng(1).uniform(-0.9, 0.9, (50, 2))
    places = np.array([x, y]) + wobble  # of a coarse place of 3 × 0.667 km: none further than 1 km
    arguments: dict[str, Any] = {"users": ["anna"] * 50, "sticky": KEY, "planar": True}
    drawn, _ = mechanism.sample_points(places, **arguments, budget=budget, place_km=2.0)
    assert len(set(drawn.tolist())) == budget.spent("anna") == 1
    refused(BudgetExceeded, "", mechanism.sample_points, places, **arguments, budget=budget)
    alone = mechanism.sample(x_km=x + 0.9, y_km=y - 0.9, user="anna", sticky=KEY, place_km=2.0)
    assert np.array_equal(alone[0], mechanism.output_lonlat[drawn[0]])


# --- any places -----------------------------------------------------------------------------------

degrees = st.tuples(
    st.floats(-180, 180) | st.sampled_from([-180.0, 180.0, 0.0, LON, LON + 180]),
    st.floats(-90, 90) | st.sampled_from([-90.0, 90.0, 0.0, LAT, -LAT]),
)


@given(
    degrees | st.tuples(st.floats(LON - 0.2, LON + 0.2), st.floats(LAT - 0.2, LAT + 0.2)),
    st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_places_anywhere_on_earth(mechanism: Mechanism, place: tuple[float, float], seed: int) -> None:
    alone = mechanism.sample(lon=place[0], lat=place[1], entropy_for_tests=words_for_tests(seed))
    together, _ = mechanism.sample_points(np.array([place]), entropy_for_tests=words_for_tests(seed))
    assert np.array_equal(alone[0], mechanism.output_lonlat[together[0]])


@given(st.floats(LON - 0.2, LON + 0.2), st.floats(LAT - 0.2, LAT + 0.2))
def test_one_point_is_projected_as_many_are(mechanism: Mechanism, lon: float, lat: float) -> None:
    [together] = mechanism.places.many(np.array([[lon, lat]]), planar=False).tolist()
    assert mechanism.places.one(lon, lat, None, None) == tuple(together)


anything = (
    st.floats() | st.integers() | st.text() | st.none() | st.booleans() | st.just("12.5") | st.binary()
    | st.lists(st.floats())
)  # fmt: skip


@given(st.tuples(anything, anything), st.sampled_from([("lon", "lat"), ("x_km", "y_km")]))
def test_answer_or_one_line(mechanism: Mechanism, place: tuple[Any, Any], names: tuple[str, str]) -> None:
    numbers = [isinstance(value, float | int) and math.isfinite(value) for value in place]
    try:
        answer = mechanism.sample(**dict(zip(names, place, strict=True)))
        assert all(numbers)
        assert not any(isinstance(value, bool) for value in place)
        assert answer.shape == (1, 2)
    except MdpextError as error:
        assert "\n" not in str(error)  # noqa: PT017
    try:
        drawn, _ = mechanism.sample_points([place], planar=names[0] == "x_km")  # type: ignore[arg-type]
        assert all(numbers)
        assert 0 <= drawn[0] < 20
    except MdpextError:
        pass


def test_numbers_that_no_float_holds_are_refused(mechanism: Mechanism) -> None:
    refused(SpecError, "must be finite", mechanism.sample, x_km=10**400, y_km=0)
    with pytest.raises(DataError, match="coordinates must be"):
        mechanism.sample_points(np.array([[10**400, 0]], dtype=object), planar=True)


BATCHES: list[Any] = [
    [["-73.98", "40.75"]], [[LON, math.nan]], [[math.inf, LAT]], [[LON, LAT, 0.0]], [LON, LAT],
    [[None, None]], [[True, False]], [[1 + 2j, 1j]], 5.0,
]  # fmt: skip


@pytest.mark.parametrize("coordinates", BATCHES)
def test_batches_of_something_else_are_refused(mechanism: Mechanism, coordinates: Any) -> None:
    refused(DataError, "points: coordinates must be", mechanism.sample_points, np.array(coordinates))


def test_tables_and_columns_are_told_how_to_be_given(mechanism: Mechanism) -> None:
    table = pd.DataFrame({"user": ["a", "b"], "lon": [LON, LON], "lat": [LAT, LAT]})
    many = "many places at once, for which there is sample_points"
    for place in ((table.lon, table.lat), (table,), (LON, [LAT])):
        refused(SpecError, many, mechanism.sample, *place)
    refused(SpecError, many, mechanism.row, lon=table.lon, lat=table.lat)
    which = "table with columns user, lon, lat; give the two of the place, lon, lat"
    refused(DataError, which, mechanism.sample_points, table)
    refused(DataError, r"an array of shape \(n, 2\)", mechanism.sample_points, table.lon)
    assert len(mechanism.sample_points(table[["lon", "lat"]])[0]) == 2


def test_coordinates_that_are_no_degrees_are_refused(mechanism: Mechanism) -> None:
    refused(DataError, "out of range", mechanism.sample_points, np.array([[-73.98, 91.0]]))
    refused(DataError, "coordinates must be numbers: ", mechanism.sample_points, [[1.0], [1.0, 2.0]])


def test_no_places_are_no_answers(mechanism: Mechanism, budget: ReleaseBudget) -> None:
    drawn, outside = mechanism.sample_points(np.zeros((0, 2)), users=[], sticky=KEY, budget=budget)
    assert drawn.shape == outside.shape == (0,)


# --- rows that are kept ---------------------------------------------------------------------------


def test_a_chunk_is_read_once(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[slice, slice]] = []
    original = mechanisms.rows_of
    monkeypatch.setattr(mechanisms, "rows_of", lambda *a: reads.append(a[1:]) or original(*a))
    mechanism = open_mechanism(store)
    for _ in range(5):
        mechanism.sample(lon=LON, lat=LAT, n=3)
    assert len(reads) == 1


def test_every_record_of_every_chunk_is_found(mechanism: Mechanism) -> None:
    """The last chunks, too, which are not whole."""
    rows, columns = mechanism.places.grid.shape
    i, j = (index.ravel() for index in np.indices((rows, columns)))
    expected = np.cumsum(integer_weights(rows_at(mechanism._store, i, j)), axis=1, dtype=np.uint64)
    found = [mechanism._rows.cumulative(int(a), int(b)) for a, b in zip(i, j, strict=True)]
    assert np.array_equal(found, expected)


def test_a_chunk_that_cannot_be_read_is_asked_for_again(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, broken = mechanisms.rows_of, [True]

    def rows_of(store: MechanismStore, x: slice, y: slice) -> NDArray[np.float32]:
        if broken.pop() if broken else False:
            raise StoreError("not now")
        return original(store, x, y)

    monkeypatch.setattr(mechanisms, "rows_of", rows_of)
    mechanism = open_mechanism(store)
    refused(StoreError, "not now", mechanism.sample, lon=LON, lat=LAT)
    assert mechanism.sample(lon=LON, lat=LAT).shape == (1, 2)


REPLACED: list[dict[str, Any] | None] = [
    {"state": "extending"}, {"state": "refused"}, {"fingerprint": "of another job"},
    {"chunk_hashes": {"digest": "of other bytes"}}, None,
]  # fmt: skip


@pytest.mark.parametrize("said", REPLACED, ids=lambda said: next(iter(said or {"deleted": None})))
def test_replaced_open_stores_are_not_read(store: str, said: dict[str, Any] | None, tmp_path: Path) -> None:
    """Rows of another mechanism, or of one that nobody has certified yet, under the promise of this one."""
    copy = tmp_path / "m.zarr"
    shutil.copytree(store, copy)
    mechanism = open_mechanism(copy)
    mechanism.sample(lon=LON, lat=LAT)
    if said is None:
        (copy / "zarr.json").unlink()
    else:
        attribute(copy, **said)
    for use in (
        lambda: mechanism.sample_points(np.array([[LON, LAT]])),
        lambda: mechanism.row(lon=LON, lat=LAT),
        lambda: pickle.loads(pickle.dumps(mechanism)).sample(lon=LON, lat=LAT),
    ):
        refused(StoreError, "is not the store any more that was opened", use)
    # What has been read was certified.
    assert mechanism.sample(lon=LON, lat=LAT).shape == (1, 2)


def test_batches_in_many_portions_are_the_same(mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    places, users = around(500), [f"{k}" for k in range(500)]
    whole, _ = mechanism.sample_points(places, users=users, sticky=KEY)
    monkeypatch.setattr(mechanisms, "_BATCH_ELEMENTS", 7 * 20)
    parts, _ = mechanism.sample_points(places, users=users, sticky=KEY)
    assert np.array_equal(whole, parts)


def test_an_open_mechanism_can_be_sent_to_another_process(mechanism: Mechanism) -> None:
    mechanism.sample(lon=LON, lat=LAT)
    copy = pickle.loads(pickle.dumps(mechanism))
    answers = [one.sample(lon=LON, lat=LAT, user="anna", sticky=KEY) for one in (mechanism, copy)]
    assert np.array_equal(*answers)


def _send_draws(mechanism: Mechanism, pipe: Connection) -> None:
    pipe.send(mechanism.sample(lon=LON, lat=LAT, n=200).tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_children_that_share_a_mechanism_draw_each_for_itself(mechanism: Mechanism) -> None:
    """Two hundred draws of a row of which any two are alike in less than half of the cases."""
    assert (mechanism.row(lon=LON, lat=LAT) ** 2).sum() < 0.5
    context = multiprocessing.get_context("fork")
    mechanism.sample(lon=LON, lat=LAT)
    answers = []
    for _ in range(3):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_send_draws, args=(mechanism, there))
        child.start()
        answers.append(here.recv())
        child.join()
    answers.append(mechanism.sample(lon=LON, lat=LAT, n=200).tolist())
    assert all(a != b for k, a in enumerate(answers) for b in answers[:k])
