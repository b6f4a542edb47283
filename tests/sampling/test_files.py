"""Files of points in, files of reports out: a chunk at a time, and whole or not at all."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from mdpext_dask import Mechanism, ReleaseBudget, StickyKey, open_mechanism
from mdpext_dask.errors import EXIT_UNREAD, BudgetExceeded, DataError, SpecError
from mdpext_dask.sampling import files
from mdpext_dask.sampling.files import Users
from mdpext_dask.sampling.report_files import marked
from tests.support.answers import same_number
from tests.support.inside import Capture, call, run_inside
from tests.support.refusals import refusal

sample_file = partial(files.sample_file, overwrite=True)

SECRETS = ("Anna", "12 Secret Street")
FORMATS = ["csv", "csv.gz", "csv.bz2", "csv.xz", "parquet", "geojson", "geojson.gz", "geojsonl", "ndjson.gz"]
Points = list[tuple[float, float]]
# A program: a store, points, where the reports go, and what to run then.
SAMPLE_FILE = [
    sys.executable, "-c", "import sys; from pathlib import Path; from mdpext_dask.sampling.files import *\n"
    "sample_file(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), chunk_points=40_000, overwrite=True)\n"
    "exec(sys.argv[4])",
]  # fmt: skip


def places(n: int, seed: int = 0) -> Points:
    """Return places in and around Manhattan: the first lies in the grid, others outside."""
    drawn = np.random.default_rng(seed).uniform((-74.3, 40.5), (-73.7, 41.1), (n, 2)).round(6)
    drawn[0] = -73.98, 40.75
    return [(lon, lat) for lon, lat in drawn.tolist()]


def write(path: Path, points: Points) -> Path:
    """Write points with what must not leave: a name and an address."""
    who = [f"{SECRETS[0]}{k}" for k in range(len(points))]
    table = pd.DataFrame({"who": who, "address": SECRETS[1]})
    table["lon"], table["lat"] = np.array(points).reshape(-1, 2).T
    kind = path.name.partition(".")[2].partition(".")[0]
    if kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "parquet":
        table.to_parquet(path)
    else:
        features = [
            f'{{"type": "Feature", "properties": {{"who": "{name}", "address": "{SECRETS[1]}"}}, '
            f'"geometry": {{"type": "Point", "coordinates": {[*place]}}}}}'
            for name, place in zip(who, points, strict=True)
        ]
        whole = '{"type": "FeatureCollection", "bbox": [-75, 40, -73, 42], "features": [%s]}'
        text = whole % ",".join(features) if kind == "geojson" else "\n".join(features)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path) -> pd.DataFrame:
    """Read reports with other readers than ours."""
    kind = path.name.partition(".")[2].partition(".")[0]
    if kind == "csv":
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        numbers = {"row": int, "output": int, **dict.fromkeys(("lon", "lat", "x_km", "y_km"), float)}
        # Python's own numbers are exact.
        return table.assign(**{c: list(map(numbers[c], table[c])) for c in table if c in numbers})
    if kind == "parquet":
        return parquet.read_table(path).to_pandas()
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    if kind == "geojson":
        document = json.loads(text)
        assert set(document) == {"type", "features"}
        features = document["features"]
    else:
        features = [json.loads(line) for line in text.splitlines()]
    for feature in features:
        assert set(feature) == {"type", "properties", "geometry"}
        assert (feature["type"], feature["geometry"]["type"]) == ("Feature", "Point")
    rows = [
        {**f["properties"], **dict(zip(("lon", "lat"), f["geometry"]["coordinates"], strict=True))}
        for f in features
    ]
    return pd.DataFrame(rows, columns=["row", "output", "lon", "lat"] if not rows else None)


# --- formats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("csv.gz", "parquet", "geojson") else pytest.mark.slow)
        for kind in FORMATS
    ],
)
def test_formats(store: str, mechanism: Mechanism, tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    points = places(60)
    source = write(tmp_path / f"points.{kind}", points)
    for word in (0, 2**60 - 2**50, 7 * 2**57):
        same_number(monkeypatch, word)
        expected, outside = mechanism.sample_points(np.array(points))
        answer = sample_file(store, source, tmp_path / f"out.{kind}", chunk_points=13)
        assert (answer["points"], answer["outside"], answer["dropped"]) == (60, outside.sum(), 0)
        found = read(tmp_path / f"out.{kind}")
        assert sorted(found.columns) == ["lat", "lon", "output", "row"]
        assert found["row"].tolist() == list(range(60))
        assert np.array_equal(found["output"], expected)
        # To the last bit.
        assert np.array_equal(found[["lon", "lat"]], mechanism.output_lonlat[expected])
    assert 0 < outside.sum() < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"out.{kind}", f"points.{kind}"]


def test_formats_go_by_the_suffix_and_are_whole_without_any_reports(store: str, tmp_path: Path) -> None:
    source = write(tmp_path / "points.geojson", places(5))
    outside = write(tmp_path / "outside.csv", [(0.0, 0.0)] * 3)
    for kind in FORMATS:
        out = tmp_path / f"out.{kind}"
        assert sample_file(store, source, out)["points"] == len(read(out)) == 5
        answer = sample_file(store, outside, out, "drop")
        assert (answer["points"], answer["outside"], answer["dropped"]) == (0, 3, 3)
        assert len(read(out)) == 0
    assert "archives" in refusal(lambda: sample_file(store, source, tmp_path / "out.csv.zip"), kind=SpecError)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_planar_reports(planar: str, tmp_path: Path, kind: str) -> None:
    source, out = tmp_path / "p.csv", tmp_path / f"o.{kind}"
    source.write_text("x_km,y_km\n0.1,31.2\n-1,30\n100,100\n")
    assert sample_file(planar, source, out, "drop")["dropped"] == 1
    found = read(out)
    assert (list(found.columns), found["row"].tolist()) == (["row", "output", "x_km", "y_km"], [0, 1])
    assert np.array_equal(found[["x_km", "y_km"]], open_mechanism(planar).output_xy_km[found["output"]])
    message = refusal(lambda: sample_file(planar, source, tmp_path / "o.geojson"), kind=SpecError)
    assert "GeoJSON is in degrees, and this mechanism is planar" in message
    assert not (tmp_path / "o.geojson").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_of_the_input_leaves(store: str, tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / f"points.{kind}", [(-73.981234, 40.753217)])
    out = tmp_path / f"out.{kind}"
    sample_file(store, source, out)
    content = out.read_bytes()
    with contextlib.suppress(gzip.BadGzipFile):
        content += gzip.decompress(content)
    for secret in (*SECRETS, "73.981234", "753217", "who", "address", "points", "bbox"):
        assert secret.encode() not in content
    if kind == "parquet":
        file = parquet.ParquetFile(out)
        # No metadata of pandas, which names the columns of the table that was read.
        assert set(file.metadata.metadata or {}) <= {b"ARROW:schema"}
        assert file.schema_arrow.metadata is None
    if kind.endswith(".gz"):
        assert out.read_bytes()[3:8] == bytes(5)  # no name, no time
    # Names go along if they are asked to, and nothing else does.
    sample_file(store, source, out, users=Users("who", keep=True))
    assert read(out)["who"].tolist() == ["Anna0"]
    assert "Secret" not in out.read_bytes().decode("latin1")


# --- streaming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["nearest", "drop"])
def test_chunks_do_not_matter(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    source = write(tmp_path / "points.csv", places(101))
    for word in (2**60 - 2**40, 5 * 2**57):
        same_number(monkeypatch, word)
        answers, contents = [], []
        for size in (9, 50, 1000):
            answer = sample_file(store, source, tmp_path / "o.csv", rule, chunk_points=size)
            answers.append({key: value for key, value in answer.items() if key != "seconds"})
            contents.append((tmp_path / "o.csv").read_bytes())
        assert all(answer == answers[0] for answer in answers)
        assert len(set(contents)) == 1
    assert (answers[0]["dropped"] > 0) == (rule == "drop")
    assert answers[0]["points"] + answers[0]["dropped"] == 101


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_does_not_grow_with_the_points(store: str, tmp_path: Path) -> None:
    peaks = []
    for n in (300_000, 3_000_000):
        source = tmp_path / f"{n}.csv"
        source.write_text("lon,lat\n" + "-73.98,40.75\n" * n)
        # Of this program alone; resource.getrusage() begins with what its parent had.
        peak = "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
        command = [*SAMPLE_FILE, store, source, f"{source}.out", peak]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    # In KiB: their coordinates alone would be 42 MiB more.
    assert peaks[1] - peaks[0] < 20_000


# --- whole or not at all ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet", "geojson", "ndjson"])
def test_a_point_outside_is_named_and_nothing_written(store: str, tmp_path: Path, kind: str) -> None:
    points = [(-73.98, 40.75)] * 30
    points[17] = (-70.123456, 40.654321)
    source, out = write(tmp_path / f"p.{kind}", points), tmp_path / "o.csv"
    out.write_text("what was there")
    message = refusal(lambda: sample_file(store, source, out, "error", chunk_points=4), kind=DataError)
    assert f"{source}: point 18 lies outside the grid or the region" in message
    assert "70.1" not in message
    assert "40.6" not in message
    assert out.read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.csv", f"p.{kind}"]
    points[17] = (-73.98, 40.75)
    assert sample_file(store, write(source, points), out, "error", chunk_points=4)["points"] == 30


def test_what_is_wrong_at_the_end_of_the_points_leaves_nothing_either(store: str, tmp_path: Path) -> None:
    source, out = tmp_path / "p.csv", tmp_path / "o.csv"

    def refused(text: str, rule: str = "nearest", chunk_points: int = 10) -> str:
        source.write_text(text)
        return refusal(
            lambda: sample_file(store, source, out, rule, chunk_points=chunk_points), kind=DataError
        )

    many = "-73.98,40.75\n" * 50
    assert "line 52" in refused("lon,lat\n" + many + "-73.98,north\n")
    for rule in ("nearest", "error"):
        assert "x_km,y_km look like degrees" in refused("x_km,y_km\n" + many, rule)
    # One that is inside as it is says that they are kilometres, and then those before it lie outside.
    for chunk_points in (10, 100):
        assert "point 1 lies outside" in refused("x_km,y_km\n" + many + "0,0\n", "error", chunk_points)
    assert sample_file(store, source, out, chunk_points=10)["outside"] == 50


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("p.csv", "\ufefflon,lat\n-73.98,40.7\n-73.98,x\n", "line 3: lat"), ("p.csv", "", "is empty"),
        ("p.csv", "a,b\n1,2\n", "needs columns lon,lat"),
        ("p.csv", "lon,lat\n-73.98,nan\n", "line 2: lat 'nan' is not a finite number"),
        ("p.csv", "lon,lat\n-73.98,40.7\ninf,40\n", "line 3: lon 'inf' is not a finite number"),
        ("p.csv", "lon,lat\n-7398,40.7\n", "out of range"),
        ("p.csv", "lon,lat\n-73.98,40.7\n,40.7\n", "line 3: lon ''"), ("p.csv", "lon,lat\n", "holds no rows"),
        ("p.geojson", "", "not a readable GeoJSON"),
        ("p.geojson", '{"type":"FeatureCollection","features":[]}', "holds no rows"),
        ("p.geojson", '{"type":"Feature"}', "must be a FeatureCollection"),
        ("p.ndjson", '{"type":"Feature","geometry":null}', "feature 1: its geometry is missing"),
        ("p.ndjson", '{"type":"Feature","geometry":{"type":"Polygon","coordinates":[]}}', "must be a Point"),
        ("p.ndjson", '{"type":"Feature","geometry":{"type":"Point","coordinates":[NaN,1]}}', "NaN is no"),
        ("p.parquet", "PAR1", "not a readable Parquet"),
    ],
)  # fmt: skip
def test_points_that_cannot_be_read(store: str, tmp_path: Path, name: str, text: str, complaint: str) -> None:
    source = tmp_path / name
    source.write_text(text, encoding="utf-8")
    assert complaint in refusal(lambda: sample_file(store, source, tmp_path / "o.parquet"), kind=DataError)
    assert sorted(tmp_path.iterdir()) == [source]


def test_an_altitude_does_not_count(store: str, tmp_path: Path) -> None:
    source = tmp_path / "p.ndjson"
    source.write_text('{"type":"Feature","geometry":{"type":"Point","coordinates":[-73.98,40.75,10.5]}}')
    assert sample_file(store, source, tmp_path / "o.ndjson")["points"] == 1


def test_where_reports_cannot_go(store: str, tmp_path: Path) -> None:
    source = write(tmp_path / "p.csv", places(20))
    before = source.read_bytes()
    key, ledger = tmp_path / "key", tmp_path / "ledger"
    StickyKey.generate().write(key)
    ReleaseBudget(ledger, 3)

    (tmp_path / "link.csv").symlink_to(source)
    users = Users("who", sticky_key=key, ledger=ledger)
    for out in (tmp_path / "missing" / "o.csv", tmp_path):
        assert "cannot be written" in refusal(lambda out=out: sample_file(store, source, out), kind=DataError)
    for out in (Path(store) / "o.csv", Path(store), source, tmp_path / "link.csv", key, ledger):
        message = refusal(lambda out=out: sample_file(store, source, out, users=users), kind=SpecError)
        assert ("lies inside the store" if store in str(out) else "itself, which would be lost") in message
    # A ledger that is not there yet would be made, charged, and replaced by the reports.
    (tmp_path / "here").symlink_to(tmp_path)
    users = Users("who", ledger=tmp_path / "new.csv", release_limit=4)
    for out in (tmp_path / "new.csv", tmp_path / "here" / "new.csv"):
        message = refusal(lambda out=out: sample_file(store, source, out, users=users), kind=SpecError)
        assert "itself, which would be lost" in message
    assert source.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "key", "ledger", "link.csv", "p.csv"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("n", [1, 5000])
def test_a_full_disk_is_one_error(store: str, tmp_path: Path, n: int) -> None:
    source = write(tmp_path / "p.csv", places(n))
    message = refusal(lambda: sample_file(store, source, Path("/dev/full")), kind=DataError)
    assert message.startswith("/dev/full: cannot be written: ")
    assert "No space left" in message


def test_a_pipe_gets_everything_or_nothing(store: str, tmp_path: Path) -> None:
    source, pipe = write(tmp_path / "p.csv", places(50)), tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    sample_file(store, source, pipe, chunk_points=9)
    reader.join(timeout=30)
    assert len(got[0].splitlines()) == 51
    # A bad line at the end: nobody is written to, so nobody need read.
    with source.open("a") as file:
        file.write("x,y,1,north\n")
    refusal(lambda: sample_file(store, source, pipe, chunk_points=9), kind=DataError)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout here")
def test_standard_output_is_gone_on_with_and_not_replaced(store: str, tmp_path: Path) -> None:
    source, log = write(tmp_path / "p.csv", places(3)), tmp_path / "log"
    log.write_text("before\n")
    with log.open("a") as file:
        command = [*SAMPLE_FILE, store, source, "/dev/stdout", "print('after')"]
        subprocess.run(command, check=True, stdout=file)
    lines = log.read_text().splitlines()
    assert (lines[0], lines[1], lines[-1], len(lines)) == ("before", "row,output,lon,lat", "after", 6)


def test_a_kill_in_the_middle_leaves_what_was_there(store: str, tmp_path: Path) -> None:
    source, out = tmp_path / "p.csv", tmp_path / "o.csv"
    out.write_text("what was there")
    os.mkfifo(source)
    process = subprocess.Popen([*SAMPLE_FILE, store, source, out, ""])
    with source.open("w") as pipe:
        pipe.write("lon,lat\n" + "-73.98,40.75\n" * 110_000)
        pipe.flush()
        # It waits for more; two chunks of its reports are on the disk.
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size > 0 for path in tmp_path.glob(".o.csv.*")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    assert out.read_text() == "what was there"
    left = next(tmp_path.glob(".o.csv.*"))
    # What is left belongs to its owner alone, and holds reports.
    assert left.stat().st_mode & 0o077 == 0
    assert left.read_text().startswith("row,output,lon,lat\n")


def test_a_new_file_has_the_rights_of_any_new_file(store: str, tmp_path: Path) -> None:
    source = write(tmp_path / "p.csv", places(3))
    (tmp_path / "other").touch()
    sample_file(store, source, tmp_path / "o.csv")
    assert (tmp_path / "o.csv").stat().st_mode == (tmp_path / "other").stat().st_mode


# --- users -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "ndjson", "geojson", "parquet"])
def test_names_of_any_kind_come_back(store: str, tmp_path: Path, kind: str) -> None:
    names = ['a,b "c"', "Zoë ✓", "1", " x ", "line\nbreak", "\\back", "-", "true"]
    table = pa.table({"user name": names, "lon": [-73.98] * len(names), "lat": [40.75] * len(names)})
    parquet.write_table(table, tmp_path / "p.parquet")
    out = tmp_path / f"o.{kind}"
    sample_file(store, tmp_path / "p.parquet", out, users=Users("user name", keep=True), chunk_points=3)
    assert read(out)["user name"].tolist() == ([marked(name) for name in names] if kind == "csv" else names)


def test_sticky_answers_repeat_in_every_file(store: str, mechanism: Mechanism, tmp_path: Path) -> None:
    key = tmp_path / "key"
    StickyKey.generate().write(key)
    points = places(40)
    users = Users("who", sticky_key=key)
    outs = []
    for kind, size in (("csv", 7), ("ndjson", 1000)):
        source, out = write(tmp_path / f"p.{kind}", points), tmp_path / f"o.{kind}"
        answer = sample_file(store, source, out, users=users, place_km=1.2, chunk_points=size)
        assert answer["key_id"] == StickyKey.read(key).key_id
        assert answer["max_quantisation_km"] == mechanism.quantisation_km(1.2) > mechanism.max_quantisation_km
        outs.append(read(out)["output"].tolist())
    names = [f"Anna{k}" for k in range(40)]
    expected, _ = mechanism.sample_points(
        np.array(points), users=names, sticky=StickyKey.read(key), place_km=1.2
    )
    assert outs[0] == outs[1] == expected.tolist()
    assert "who" not in (tmp_path / "o.csv").read_text()


def test_a_ledger_refuses_the_whole_file(store: str, tmp_path: Path) -> None:
    source, out, ledger = tmp_path / "p.csv", tmp_path / "o.csv", tmp_path / "ledger"
    source.write_text("u,lon,lat\n" + "a,-73.98,40.75\n" * 3 + "b,-73.98,40.75\n")
    users = Users("u", ledger=ledger, release_limit=4)
    answer = sample_file(store, source, out, users=users, chunk_points=2)
    assert (answer["release_limit"], answer["composed_epsilon_per_km"]) == (4, 4.0)
    assert (ReleaseBudget(ledger).spent("a"), ReleaseBudget(ledger).spent("b")) == (3, 1)
    out.unlink()
    refusal(lambda: sample_file(store, source, out, users=users, chunk_points=2), kind=BudgetExceeded)
    assert not out.exists()
    assert (ReleaseBudget(ledger).spent("a"), ReleaseBudget(ledger).spent("b")) == (3, 1)
    # Nor is anything charged for a file that cannot be read to its end, or whose points are not released.
    source.write_text("u,lon,lat\nb,-73.98,40.75\nb,-73.98,north\n")
    refusal(lambda: sample_file(store, source, out, users=users, chunk_points=1), kind=DataError)
    source.write_text("u,lon,lat\nb,-73.98,40.75\nb,0,0\n")
    refusal(lambda: sample_file(store, source, out, "error", users=users, chunk_points=1), kind=DataError)
    assert ReleaseBudget(ledger).spent("b") == 1
    sample_file(store, source, out, "drop", users=users, chunk_points=1)
    assert ReleaseBudget(ledger).spent("b") == 2


def test_what_releases_add_up_to_is_said_of_all_in_the_ledger(store: str, tmp_path: Path) -> None:
    source, ledger = tmp_path / "p.csv", tmp_path / "ledger"
    source.write_text("u,lon,lat\na,-73.98,40.75\n")
    ReleaseBudget(ledger, 4).charge("a", 2, epsilon_per_km=7.0)
    answer = sample_file(store, source, tmp_path / "o.csv", users=Users("u", ledger=ledger))
    assert answer["composed_epsilon_per_km"] == 2 * 7.0 + 2 * 1.0


def test_users_that_do_not_go_together(store: str, tmp_path: Path) -> None:
    some = tmp_path / "file"
    for users, complaint in (
        ({"sticky_key": some}, "--sticky-key: needs --user-column"),
        ({"ledger": some}, "--ledger: needs --user-column"),
        ({"keep": True}, "--keep-users: needs --user-column"),
        ({"column": "u"}, "--user-column: goes with one of"),
        ({"column": "row", "keep": True}, "row is the name of another column"),
        ({"column": "u", "release_limit": 3}, "--release-limit: needs --ledger"),
    ):
        assert complaint in refusal(lambda given=users: Users(**given), kind=SpecError)
    source = tmp_path / "p.csv"
    source.write_text("u,lon,lat\na,-73.98,40.75\n,-73.98,40.75\n")
    users = Users("u", keep=True)
    message = refusal(lambda: sample_file(store, source, tmp_path / "o.csv", users=users), kind=DataError)
    assert message == f"{source}: point 2: u is empty"
    users = Users("name", keep=True)
    message = refusal(lambda: sample_file(store, source, tmp_path / "o.csv", users=users), kind=DataError)
    assert "column name is missing" in message


# --- the command line ------------------------------------------------------------------------------


def test_the_command(store: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, out, key = write(tmp_path / "p.geojson", places(9)), tmp_path / "o.parquet", tmp_path / "key"
    answer = call(capfd, "sample", store, source, "-o", out)
    assert {"points", "outside", "max_quantisation_km", "seconds", "dropped"} <= set(answer)
    made = call(capfd, "sticky-key", key, "--epoch", "2026")
    assert (made["epoch"], made["key_id"]) == ("2026", StickyKey.read(key).key_id)
    wanted = ["--user-column", "who", "--keep-users", "--sticky-key", key, "--place-km", "2", "--overwrite"]
    counted = ["--ledger", tmp_path / "ledger", "--release-limit", "1"]
    for _ in range(2):  # an answer that repeats is no release
        answer = call(capfd, "sample", store, source, "-o", out, *wanted, *counted)
        assert (answer["points"], answer["key_id"], answer["release_limit"]) == (9, made["key_id"], 1)
    assert set(read(out)["who"]) == {f"Anna{k}" for k in range(9)}
    write(source, places(9, seed=1))
    call(capfd, "sample", store, source, "-o", out, *wanted, *counted, code=1)
    call(capfd, "sticky-key", key, code=2)


def sampled_to(target: str, arguments: list[str], **streams: Any) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "mdpext_dask.cli", "sample", *arguments, "-o", target]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **streams)


@pytest.mark.slow
def test_reports_on_standard_output_are_alone_there(store: str, tmp_path: Path) -> None:
    source = write(tmp_path / "p.csv", [(-73.98, 40.75)] * 20)
    with sampled_to("/dev/stdout", [store, str(source)], stdout=subprocess.PIPE) as run:
        out, err = run.communicate(timeout=60)
    assert run.returncode == 0
    assert [line.count(",") for line in out.splitlines()] == [3] * 21
    assert "moved to its record first" in err


def test_standard_output_has_one_use(store: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "p.csv", [(-73.98, 40.75)] * 20)
    for words in (["sample", store, source], ["export", store]):
        document = call(capfd, *words, "-o", "/dev/stdout", code=2)
        assert "/dev/stdout goes to standard output as well" in document["message"]


@pytest.mark.slow
def test_nobody_reading_on_is_no_fault_of_the_points(store: str, tmp_path: Path) -> None:
    source = write(tmp_path / "p.csv", [(-73.98, 40.75)] * 20)
    reading, writing = os.pipe()
    os.close(reading)
    with sampled_to("/dev/stdout", [store, str(source)], stdout=writing) as run:
        os.close(writing)
        _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (EXIT_UNREAD, "")


@pytest.mark.parametrize("rule", ["nearest", "drop", "error"])
def test_swapped_degrees_are_not_taken_for_places_far_away(store: str, tmp_path: Path, rule: str) -> None:
    swapped = [(40.75, -73.98), (40.76, -73.97)]
    out = tmp_path / "o.csv"
    source = write(tmp_path / "p.csv", swapped)
    message = refusal(lambda: sample_file(store, source, out, rule, chunk_points=1), kind=DataError)
    assert "longitude and latitude look swapped" in message
    assert not out.exists()
    # One that is inside as it is says that they are meant so.
    source = write(source, [*swapped, (-73.98, 40.75)])
    assert sample_file(store, source, out, chunk_points=1)["outside"] == 2


@pytest.mark.parametrize("kind", ["csv", "parquet", "geojson"])
def test_points_that_are_known_too_little_are_told(store: str, tmp_path: Path, kind: str) -> None:
    geopandas = pytest.importorskip("geopandas")
    source, accuracy = tmp_path / f"points.{kind}", [20.0, 5e5, np.nan, 4e5]
    table = pd.DataFrame({"lon": -73.98, "lat": 40.75, "user": "anna", "accuracy": accuracy})
    if kind == "geojson":
        shapes = geopandas.points_from_xy(table.lon, table.lat)
        geopandas.GeoDataFrame(table[["accuracy"]], geometry=shapes, crs=4326).to_file(source)
    else:
        getattr(table, f"to_{kind}")(source, index=False)
    report = partial(sample_file, store, source, tmp_path / "out.csv", chunk_points=2)
    said = [note for note in report(accuracy_column="accuracy")["notes"] if "known less well" in note]
    assert len(said) == 1
    assert said[0].startswith(
        f"{source}: 2 of 4 positions are known less well than 1/ε = 1,000 m, the worst to"
    )
    assert not any("known less well" in note for note in report()["notes"])


@pytest.mark.parametrize("cell", ["-1", "inf", "about 20"])
def test_an_accuracy_that_is_none_is_refused(store: str, tmp_path: Path, capsys: Capture, cell: str) -> None:
    source, out = tmp_path / "points.csv", tmp_path / "out.csv"
    source.write_text(f"lon,lat,accuracy\n-73.98,40.75,20\n-73.98,40.75,{cell}\n")
    code, _, err = run_inside(capsys, "sample", store, source, "-o", out, "--accuracy-column", "accuracy")
    assert code == 2
    assert f"point 2: accuracy must be a number of metres from 0, got '{cell}'" in err
    assert not out.exists()
