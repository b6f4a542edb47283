"""Points that are hardly those that were meant: what sampling says, and what it refuses."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mdpext_dask import Mechanism
from mdpext_dask.errors import DataError, ImplausibleWarning, SpecError
from mdpext_dask.events import Note
from mdpext_dask.runtime import City, open_city
from mdpext_dask.runtime.ledger import ReleaseBudget
from mdpext_dask.sampling.export import export_city
from mdpext_dask.sampling.files import Users, sample_file
from tests.support.inside import call, run_inside
from tests.support.refusals import refusal, refused

INSIDE, ALSO = (-73.98, 40.75), (-73.95, 40.78)
# Off the coast, 3 km or so from the grid; and another city.
NEAR, PHILADELPHIA = (-73.95, 40.67), (-75.16, 39.95)
# How users write them, and how often each is there.
KIM, LEE = 200, 3


@pytest.fixture(scope="module")
def city(store: str, tmp_path_factory: pytest.TempPathFactory) -> City:
    path = tmp_path_factory.mktemp("city") / "m.mdp"
    export_city(store, path)
    return open_city(path)


def sampled(store: str, source: Path, out: Path, rule: str | None = None, **how: Any) -> dict[str, Any]:
    return sample_file(store, source, out, rule, overwrite=True, **how)


def csv(path: Path, points: list[tuple[float, float]], columns: str = "lon,lat") -> Path:
    path.write_text("\n".join([columns, *(f"{x},{y}" for x, y in points)]) + "\n")
    return path


# --- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_points", [1, 3, 100])
def test_points_that_look_wrong_are_noted_once(store: str, tmp_path: Path, chunk_points: int) -> None:
    points = [INSIDE, PHILADELPHIA, ALSO, ALSO[::-1], (0.0, 0.0), NEAR, PHILADELPHIA]
    source, told = csv(tmp_path / "p.csv", points), list[Any]()
    out = tmp_path / "o.csv"
    answer = sampled(store, source, out, chunk_points=chunk_points, observer=told.append)
    assert told == [Note(note) for note in answer["notes"]]
    outside, swapped, nowhere = answer["notes"]
    assert outside.startswith(f"{source}: 5 of 7 points lie outside the grid (the furthest, point 4, by ")
    assert swapped == f"{source}: longitude and latitude look swapped: point 4"
    assert nowhere == f"{source}: 0, 0 often stands for no place: point 5"
    assert (answer["outside"], answer["outside_rule"]) == (5, "nearest")


def test_what_is_near_or_inside_is_not_worth_a_word(store: str, tmp_path: Path) -> None:
    source = csv(tmp_path / "p.csv", [INSIDE, NEAR, ALSO])
    answer = sampled(store, source, tmp_path / "o.csv")
    assert (answer["outside"], answer["notes"]) == (1, [])


@pytest.mark.parametrize("points", [[PHILADELPHIA] * 5, [NEAR], [(0.0, 0.0)] * 2])
def test_another_city_is_reported_from_only_if_that_is_said(
    store: str, tmp_path: Path, points: list[tuple[float, float]]
) -> None:
    source, out = csv(tmp_path / "p.csv", points), tmp_path / "o.csv"
    said = f"{source}: all {len(points)} points lie outside the grid (the furthest, point 1, by "
    refusal(lambda: sampled(store, source, out, chunk_points=2), said, "--outside nearest")
    assert not out.exists()
    for rule, reports in (("nearest", len(points)), ("drop", 0)):
        answer = sampled(store, source, out, rule, chunk_points=2)
        assert (answer["points"], answer["outside"]) == (reports, len(points))
        assert answer["notes"][0].startswith(said)


def test_what_is_refused_is_not_charged(store: str, tmp_path: Path) -> None:
    source, ledger = tmp_path / "p.csv", tmp_path / "ledger"
    source.write_text("u,lon,lat\na,-75.16,39.95\na,-75.17,39.95\n")
    users = Users("u", ledger=ledger, release_limit=9)
    refusal(lambda: sampled(store, source, tmp_path / "o.csv", users=users, chunk_points=1))
    assert ReleaseBudget(ledger).spent("a") == 0
    sampled(store, source, tmp_path / "o.csv", "nearest", users=users, chunk_points=1)
    assert ReleaseBudget(ledger).spent("a") == 2


def test_the_command_says_it_once_on_standard_error(
    store: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = csv(tmp_path / "p.csv", [INSIDE, ALSO[::-1]]), tmp_path / "o.csv"
    shown = run_inside(capfd, "sample", store, source, "-o", out)
    assert shown.stderr.count("look swapped") == 1
    assert "swapped" not in shown.stdout
    asked = run_inside(capfd, "sample", store, source, "-o", out, "--overwrite", "--json")
    assert asked.stderr == shown.stderr
    assert [f"note: {note}" for note in asked.document()["notes"]] == shown.stderr.splitlines()
    words = ["sample", store, csv(source, [PHILADELPHIA]), "-o", out, "--overwrite"]
    assert "all 1 points lie outside" in call(capfd, *words, code=2)["message"]
    call(capfd, *words, "--outside", "nearest")


# --- users -----------------------------------------------------------------------------------------


def with_users(path: Path, column: str, nameless: int = 300) -> Path:
    names = ["kim"] * KIM + ["lee"] * LEE + [f"once{k}" for k in range(40)] + [""] * nameless
    if path.suffix == ".ndjson":
        lines = [
            json.dumps({
                "type": "Feature", "geometry": {"type": "Point", "coordinates": INSIDE},
                "properties": {column: name} if name else {},
            })
            for name in names
        ]  # fmt: skip
        path.write_text("\n".join(lines))
        return path
    table = pd.DataFrame({column: names, "lon": INSIDE[0], "lat": INSIDE[1]})
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("name", "column"),
    [("p.csv", "user_id"), ("p.parquet", "Device ID"), ("p.ndjson", "user"), ("p.csv", "Customer-Name")],
)
def test_users_whom_nobody_counts(store: str, tmp_path: Path, name: str, column: str) -> None:
    source = with_users(tmp_path / name, column)
    [note] = sampled(store, source, tmp_path / "o.csv", chunk_points=77)["notes"]
    assert f"every row is a release of its own: 'kim' appears {KIM} times in column {column}" in note
    assert "--user-column" in note
    # Those who name the column know.
    with_users(source, column, nameless=0)
    assert sampled(store, source, tmp_path / "o.csv", users=Users(column, keep=True))["notes"] == []


def test_columns_that_are_no_users_or_name_each_once(store: str, tmp_path: Path) -> None:
    for column in ("passenger_count", "name", "u", "street"):
        source = with_users(tmp_path / "p.csv", column)
        assert sampled(store, source, tmp_path / "o.csv")["notes"] == []
    source.write_text("user,lon,lat\na,-73.98,40.75\nb,-73.98,40.75\n")
    assert sampled(store, source, tmp_path / "o.csv")["notes"] == []
    # A column of another kind is left alone.
    table = pd.DataFrame({"user": [[1, 2], [1, 2]], "lon": INSIDE[0], "lat": INSIDE[1]})
    table.to_parquet(tmp_path / "p.parquet")
    assert sampled(store, tmp_path / "p.parquet", tmp_path / "o.csv")["notes"] == []


# --- Python ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"lon": NEAR[0], "lat": NEAR[1]}, "the place lies outside the grid; reported from the nearest"),
        ({"lon": PHILADELPHIA[0], "lat": PHILADELPHIA[1]}, "more than 100 km outside the grid"),
        ({"lon": INSIDE[1], "lat": INSIDE[0]}, "its longitude and latitude look swapped"),
        ({"x_km": 60.0, "y_km": 0.0}, "more than 10 km outside"),
    ],
)
def test_a_sample_from_outside_says_so(
    mechanism: Mechanism, city: City, place: dict[str, float], said: str
) -> None:
    for reporter in (mechanism, city):
        with pytest.warns(ImplausibleWarning, match=said) as caught:
            reporter.sample(**place)
        assert caught[0].filename == __file__
        # Not where it is.
        assert not any(f"{abs(value):g}"[:4] in str(caught[0].message) for value in place.values() if value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImplausibleWarning)
            assert reporter.sample(**place, n=3).shape == (3, 2)
        reporter.sample(lon=INSIDE[0], lat=INSIDE[1])


def test_a_place_that_is_known_too_little_says_so(mechanism: Mechanism, city: City) -> None:
    for reporter in (mechanism, city):
        hidden_m = 1000 / reporter.epsilon_per_km
        for accuracy_m in (None, 0, 20.0, hidden_m):  # warnings are errors
            reporter.sample(*INSIDE, accuracy_m=accuracy_m)
        said = f"known to {1.5 * hidden_m:,.0f} m only, which is more than 1/ε = {hidden_m:,.0f} m"
        with pytest.warns(ImplausibleWarning, match=said) as caught:
            assert reporter.sample(*INSIDE, accuracy_m=1.5 * hidden_m).shape == (1, 2)
        assert caught[0].filename == __file__
        for wrong in (-1.0, float("nan"), float("inf"), "20"):
            refused(SpecError, "accuracy_m", reporter.sample, *INSIDE, accuracy_m=wrong)


def test_many_samples_from_outside_say_so(city: City) -> None:
    with pytest.warns(ImplausibleWarning, match="2 of 3 places lie outside") as caught:
        assert city.sample_many(np.array([INSIDE, NEAR, PHILADELPHIA])).shape == (3, 2)
    assert caught[0].filename == __file__


def test_many_places_of_which_some_are_known_too_little_say_so(city: City) -> None:
    hidden_m, places = 1000 / city.epsilon_per_km, np.array([INSIDE, ALSO, INSIDE])
    assert city.sample_many(places, accuracy_m=[0, hidden_m, np.nan]).shape == (3, 2)  # warnings are errors
    said = f"1 of 3 positions are known less well than 1/ε = {hidden_m:,.0f} m, the worst to "
    with pytest.warns(ImplausibleWarning, match=f"{said}{2 * hidden_m:,.0f} m") as caught:
        city.sample_many(places, accuracy_m=np.array([20.0, 2 * hidden_m, np.nan]))
    assert caught[0].filename == __file__
    for wrong in ([20.0], [-1, 2, 3], [1, 2, np.inf], ["1", "2", "3"], 20.0, [[1], [1, 2], [3]]):
        refused(SpecError, "accuracy_m", city.sample_many, places, accuracy_m=wrong)


TABLE = pd.DataFrame({"lon": [-73.98, -73.95], "lat": [40.75, 40.78], "x_km": [0.0, 1.0], "y_km": [1.0, 0.0]})
SPELT = TABLE.rename(columns={"lon": "Longitude", "lat": "LATITUDE"})


@pytest.mark.parametrize(
    ("points", "planar", "given"),
    [
        (TABLE[["lat", "lon"]], False, "lat, lon"),
        (SPELT[["LATITUDE", "Longitude"]], False, "LATITUDE, Longitude"),
        (TABLE[["y_km", "x_km"]], True, "y_km, x_km"),
        (TABLE[["lon", "lat"]], True, "lon, lat"),
        (TABLE[["x_km", "y_km"]], False, "x_km, y_km"),
        (TABLE[["lon", "x_km"]], False, "lon, x_km"),
        # Two columns of two rows: as rows, they would be taken for two places.
        ((TABLE.lon, TABLE.lat), False, "lon, lat"),
        ([TABLE.lat, TABLE.lon], False, "lat, lon"),
    ],
)
def test_columns_in_another_order_are_refused(
    mechanism: Mechanism, city: City, points: Any, planar: bool, given: str
) -> None:
    wanted = "x_km and then y_km" if planar else "lon and then lat"
    said = f"points: are columns {given}; give a table of two columns, {wanted}"
    for action in (mechanism.sample_points, city.sample_points, city.sample_many):
        refused(SpecError, said, action, points, planar=planar)


def test_columns_in_their_order_and_without_names_are_taken(mechanism: Mechanism) -> None:
    for points in (
        TABLE[["lon", "lat"]], SPELT[["Longitude", "LATITUDE"]], TABLE[["lon", "lat"]].to_numpy(),
        TABLE[["lon", "lat"]].set_axis(["a", "b"], axis=1), [INSIDE, ALSO], TABLE[["lon", "lat"]].iloc[:1],
    ):  # fmt: skip
        assert not mechanism.sample_points(points)[1].any()  # type: ignore[arg-type]
    assert not mechanism.sample_points(TABLE[["x_km", "y_km"]], planar=True)[1].any()  # type: ignore[arg-type]
    # A whole table has too many columns, as before.
    refused(DataError, "two for each place", mechanism.sample_points, TABLE)


def test_a_column_is_no_single_place(mechanism: Mechanism) -> None:
    for lon, lat in ((TABLE.lat, TABLE.lon), (TABLE.lon, TABLE.lat), (TABLE.lon.to_numpy(), 40.75)):
        error = refused(SpecError, "lon, lat: must be", mechanism.sample, lon, lat)
        assert "73.9" not in str(error)
