"""``mdpext start``: a job file that does what it says, and one line for whatever cannot be."""

import json
import math
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mdpext_dask.job.spec import load_job
from mdpext_dask.problem.geometry import build_geometry
from tests.support.inside import Capture, run_inside
from tests.support.problems import road_folder

# A part of Manhattan that takes a second.
BOX = "-74.003,40.735,-73.968,40.762"
START = ("builtin:manhattan", "--box", BOX, "-o", "manhattan.toml")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_job_is_what_it_says(here: Path, capsys: Capture) -> None:
    code, out, _ = run_inside(capsys, "start", *START, "--hide", "200", "--json")
    facts, text = json.loads(out), (here / "manhattan.toml").read_text()
    assert (code, facts["job"], facts["store"]) == (0, "manhattan.toml", "manhattan.zarr")
    # Records 40 m apart: each of two places is moved by 28 m at most.
    moved = 2 * 0.04 / math.sqrt(2)
    assert facts["log_odds"] == {f"{km:g}": pytest.approx(5 * (km + moved)) for km in (0.05, 0.2, 1.0)}
    assert 0 < facts["loss_km_about"] < facts["plain_loss_km_about"]
    spec = load_job(here / "manhattan.toml")
    assert (spec.privacy.epsilon_per_km, spec.extension.seconds) == (5.0, 300.0)
    grid = build_geometry(spec).grid
    assert (grid.records, grid.cell_km, list(grid.refine)) == (
        facts["records"], facts["cell_km"], facts["refine"],
    )  # fmt: skip
    assert "3.61 where they are 200 m apart" in text
    # What it says of the job is what the plan says, and the same again.
    planned = json.loads(run_inside(capsys, "plan", "manhattan.toml", "--json")[1])
    assert all(facts[key] == planned[key] for key in ("records", "outputs", "store_bytes", "method"))
    assert run_inside(capsys, "start", *START, "--epsilon", "5", "--overwrite", "-q")[0] == 0
    assert (here / "manhattan.toml").read_text() == text


@pytest.mark.slow
def test_the_screen_is_short_and_its_commands_work(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run_inside(capsys, "start", "builtin:manhattan", "--hide", "2000", "-o", "my city.toml")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80
    assert any("run 'my city.toml'" in line for line in lines)
    assert run_inside(capsys, "run", "my city.toml", "-q")[0] == 0
    assert (here / "my-city.zarr").is_dir()


def test_every_box_of_a_place_has_a_name_of_its_own(here: Path, capsys: Capture) -> None:
    def named(box: str, *more: str) -> tuple[str, str]:
        given = ["builtin:manhattan", "--hide", "2000", "--box", box, *more, "--json"]
        facts = json.loads(run_inside(capsys, "start", *given)[1])
        assert load_job(here / facts["job"]).job.name + ".zarr" == facts["store"]
        return facts["job"], facts["store"]

    first, second = named(BOX), named("-74.003,40.735,-73.968,40.763")
    assert len({*first, *second}) == 4
    assert re.fullmatch(r"manhattan-[0-9a-f]{6}\.toml", first[0])
    # However it is written.
    assert named(BOX.replace(",", ", ").replace("40.735", "40.7350"), "--overwrite") == first
    assert named(BOX, "-o", "Mid Town.toml") == ("Mid Town.toml", "mid-town.zarr")


@pytest.mark.parametrize("names", [("北京", "上海"), ("Köln", "Küln"), ("n" * 50 + "a", "n" * 50 + "b")])
def test_files_whose_plain_letters_are_alike_name_different_stores(
    here: Path, capsys: Capture, names: tuple[str, str]
) -> None:
    found = []
    for name in names:
        given = ["builtin:manhattan", "--hide", "2000", "--box", BOX, "-o", f"{name}.toml", "--json"]
        found.append(json.loads(run_inside(capsys, "start", *given)[1])["store"])
        assert load_job(here / f"{name}.toml").job.name + ".zarr" == found[-1]
    assert found[0] != found[1]


def test_a_file_of_roads_is_found_from_where_the_job_is(here: Path, capsys: Capture) -> None:
    nodes = [(number, 10 + 0.01 * (number % 8), 50 + 0.01 * (number // 8)) for number in range(64)]
    streets = [(n, n + 1, 800, 0) for n in range(63) if n % 8 < 7] + [(n, n + 8, 1200, 0) for n in range(56)]
    road_folder(here / "roads", nodes, streets)
    (here / "jobs").mkdir()
    told = run_inside(capsys, "start", "roads", "--hide", "2000", "-o", "jobs/town.toml", "-q")
    assert told == (0, "", "")
    job = tomllib.loads((here / "jobs" / "town.toml").read_text())
    assert job["domain"]["roads"] == "../roads"
    assert load_job(here / "jobs" / "town.toml").domain.roads == str(here / "roads")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["builtin:manhattan"], "give --epsilon or --hide"),
        (["--hide", "200"], "give WHERE"),
        (["builtin:manhattan", "--hide", "200", "--epsilon", "5"], "not both"),
        (["builtin:manhattan", "--epsilon", "0.005"], "0.005 per metre is 5"),
        (["builtin:manhattan", "--epsilon", "nan"], "--epsilon"),
        (["builtin:manhattan", "--hide", "0"], "--hide: must be from 1 to 100,000 metres"),
        (["builtin:nowhere", "--hide", "200"], "builtin:nowhere"),
        (["city.osm.pbf", "--hide", "200"], "no such file or folder of roads"),
        (["./city", "--hide", "200"], "no such file or folder of roads"),
        (["12.4,41.8,12.6,42.0", "--hide", "200"], "a box needs a network"),
        (["builtin:manhattan", "--hide", "200", "--box", "1,2,3"], "bbox"),
        (["  ", "--hide", "200"], "must name a place"),
        (["Rome.geojson", "--hide", "200"], "no such file or folder of roads"),
        (["builtin:manhattan", "--epsilon", "100"], "cells of noise, more than"),
        (["builtin:manhattan", "--hide", "200", "--box", "a,b,c,d"], "--box"),
        (["builtin:manhattan", "--hide", "200", "--box", "10,50,10.1,50.1"], "road"),
        (["builtin:manhattan", "--hide", "200", "--seconds", "-1"], "seconds"),
        (["builtin:manhattan", "--hide", "200", "-o", "n" * 300], "cannot be written: File name too long"),
        ([f"{'n' * 300}.pbf", "--hide", "200"], "no such file or folder of roads"),
    ],
)
def test_what_cannot_be_is_one_line_and_no_file(
    here: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    code, out, err = run_inside(capsys, "start", *arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("epsilon", [90, 1000])
def test_what_too_large_an_epsilon_is_told_to_use_works(capsys: Capture, epsilon: int) -> None:
    def started(epsilon: str, *more: str) -> tuple[int, str]:
        code, _, err = run_inside(
            capsys, "start", "builtin:manhattan", "--epsilon", epsilon, *more, "--overwrite"
        )
        return code, err

    code, err = started(str(epsilon))
    assert code == 2
    advice = re.search(r"cells of noise, .* use (\S+)/km .* box of at most (\S+) km x \2 km", err)
    assert advice is not None
    other, side = advice.groups()
    assert started(other)[0] == 0
    assert started(f"{float(other) * 1.1}")[0] == 2  # it is the largest, to two digits
    # A degree is 111.2 km to the north, and less to the east.
    lon, lat, half = -73.98, 40.76, float(side) / 2 / 111.2
    wide = half / math.cos(math.radians(lat))
    box = f"{lon - 0.99 * wide},{lat - 0.99 * half},{lon + 0.99 * wide},{lat + 0.99 * half}"
    assert started(str(epsilon), "--box", box)[0] == 0


def test_an_epsilon_at_which_places_are_told_apart_is_told_as_a_power(here: Path, capsys: Capture) -> None:
    block = "-73.99,40.745,-73.98,40.752"
    code, out, _ = run_inside(
        capsys, "start", "builtin:manhattan", "--epsilon", "800", "--box", block, "-o", "b.toml"
    )
    assert code == 0
    # ε times 1 km and twice the way to a record, rounded up: a promise is never told smaller than it is.
    assert re.search(r"x e\^8\d\d(\.\d+)? where they are 1,000 m apart", out)
    assert load_job(here / "b.toml").privacy.epsilon_per_km == 800


@pytest.mark.parametrize(
    "name",
    ['a "quoted" \\ town', *(pytest.param(case, marks=pytest.mark.slow) for case in ["d\x7fel", "日本"])],
)
def test_odd_names_of_roads_are_written_as_toml(here: Path, capsys: Capture, name: str) -> None:
    # Fewer road nodes than places to which roads are measured, as in a hamlet; and a link in the way.
    nodes = [(number, 10 + 0.01 * (number % 3), 50 + 0.01 * (number // 3)) for number in range(9)]
    streets = [(n, n + 1, 800, 0) for n in range(8) if n % 3 < 2] + [(n, n + 3, 1200, 0) for n in range(6)]
    road_folder(here / name, nodes, streets)
    (here / "far" / "away").mkdir(parents=True)
    (here / "out").symlink_to(here / "far" / "away")
    told = run_inside(capsys, "start", name, "--hide", "2000", "-o", "out/town.toml", "-q")
    assert told == (0, "", "")
    job = load_job(here / "out" / "town.toml")
    assert (job.domain.roads, job.loss.tasks) == (str(here / name), 9)


def test_a_job_that_is_there_stays(here: Path, capsys: Capture) -> None:
    (here / "manhattan.toml").write_text("mine")
    code, _, err = run_inside(capsys, "start", "builtin:manhattan", "--hide", "200")
    assert (code, (here / "manhattan.toml").read_text()) == (2, "mine")
    assert "--overwrite" in err


@pytest.mark.slow
def test_a_terminal_is_asked(here: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mdpext_dask", "start", "--box", BOX, "-o", "b.toml", "-q"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=here)
    os.close(theirs)
    for answer in (b"builtin:manhattan\n", b"250\n"):
        os.write(ours, answer)
    assert process.wait(timeout=120) == 0
    os.close(ours)
    assert load_job(here / "b.toml").privacy.epsilon_per_km == 4.0
