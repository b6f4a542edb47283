"""What a newcomer does wrong is answered in one line that says what to do; nothing is lost by it."""

import shutil
from pathlib import Path

import pytest

from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.sampling.export import export_city
from tests.support.inside import run_inside

JOB = {
    "domain": {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2]},
    "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
    "outputs": {"count": 6},
    "loss": {"tasks": 4},
    "cluster": {"kind": "inline"},
}
TEXT = """
[domain]
roads = "builtin:manhattan"
cell_km = 3.0
refine = [2, 2]
[privacy]
epsilon_per_km = 1.0
[outputs]
count = 6
"""
POINTS = "lon,lat\n-73.98,40.75\n-73.97,40.76\n"
MINE = b"mine"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job, its store, a city, points, and a key."""
    folder = tmp_path_factory.mktemp("newcomer")
    build(parse_job(JOB), str(folder / "m.zarr"))
    export_city(str(folder / "m.zarr"), folder / "c.mdp")
    (folder / "job.toml").write_text(TEXT)
    (folder / "points.csv").write_text(POINTS)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy, which is the working folder."""
    copy = shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(copy)
    return copy


BAD = [
    # The wrong kind of file, or files in the wrong order.
    ("sample points.csv m.zarr -o o.csv", "store comes before the points: mdpext sample m.zarr points.csv"),
    ("sample m.zarr m.zarr -o o.csv", "m.zarr: is a store, where points are expected"),
    ("sample c.mdp points.csv -o o.csv", "c.mdp: not a mechanism store", "an exported city", "open_city"),
    ("evaluate job.toml", "a job file; make its store with mdpext run"),
    ("report points.csv", "a folder such as NAME.zarr, but a file"),
    ("status .", ".: not a mechanism store: there is no Zarr group"),
    ("run m.zarr", "m.zarr: is a folder; a job is a file"),
    ("run points.csv", "points.csv: not a job file in TOML"),
    ("audit job.toml", "job.toml: unknown format"),
    ("report m.zarr --evaluation points.csv -o r.html", "points.csv: is no JSON; give what `mdpext evaluate"),
    ("compare job.toml -o points.csv", "points.csv: is a file; name a folder"),
    ("compare job.toml -o .", "exists already, and is no folder of an earlier comparison", "--overwrite"),
    # Places where nothing can be written.
    ("sample m.zarr points.csv -o no/o.csv", "no/o.csv: cannot be written: there is no folder no"),
    ("export m.zarr -o no/c.mdp", "no/c.mdp: cannot be written: there is no folder no"),
    ("export m.zarr -o .", "it is a folder; name a file in it"),
    ("sample m.zarr points.csv -o o.xlsx", "o.xlsx: reports are CSV, Parquet or GeoJSON, not .xlsx"),
    ("sample m.zarr points.csv -o points.csv --overwrite", "is points.csv itself, which would be lost"),
    # Options.
    ("runn job.toml", "No such command 'runn'"),
    ("run", "Missing argument 'JOB.toml' (see mdpext run --help)"),
    ("sample m.zarr points.csv", "Missing option '--output' / '-o' (see mdpext sample --help)"),
    ("compare job.toml --repeats 0", "--repeats: ", "see mdpext compare --help"),
    ("compare job.toml --limit -1", "--limit: must be more than 0"),
    ("partition m.zarr 7", "there are no blocks 7:8; its blocks are 0:1"),
    ("partition m.zarr --range 5:2", "--range: 5:2 is empty; A:B is A to B - 1"),
    ("evaluate m.zarr --stride 0", "--stride: ", "see mdpext evaluate --help"),
    ("evaluate m.zarr --bound-seconds -1", "--bound-seconds: must be at least 0"),
    ("export m.zarr -o o.mdp --packing zip", "--packing: must be auto, seed, noise or rows, got 'zip'"),
    ("--operator mine status m.zarr", "--operator: must be module:Class, got 'mine'"),
    ("sample m.zarr points.csv -o o.csv --remap", "has no remap; run mdpext remap"),
    # Job files, by override.
    ("run job.toml --set domain.refine=3", "domain.refine: must be a list, in brackets, got 3; say [3]"),
    ("run job.toml --set prior.kind=file", 'prior: kind = "file" needs file'),
    ("run job.toml --set privacy.min_probability=0", "at least 1.46e-11", "would rule them out"),
    ("run job.toml --set domain.bbox=[40.7,-74.02,40.8,-73.93]", "say [-74.02, 40.7, -73.93, 40.8]"),
    ("run job.toml --set domain.bbox=[40.7,40.8,-74.02,-73.93]", "[west, south, east, north], in this order"),
    ("run job.toml --set domain.bbox=[-74.02,-73.93,40.7,40.8]", "order of bbox is west, south, east, north"),
]  # fmt: skip
# How libraries would say it.
FOREIGN = ("Errno", "Traceback", "Input should", "input should", "LocalStore", "valid tuple", "should match")


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0])
def test_a_mistake_is_answered_in_one_line(
    case: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *parts = case
    before = sorted(folder.iterdir())
    outcome = run_inside(capfd, *command.split())
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert (outcome.returncode, outcome.stdout, len(lines)) == (2, "", 1), outcome
    assert all(part in lines[0] for part in parts), lines[0]
    assert not any(word in lines[0] for word in FOREIGN), lines[0]
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("sample m.zarr points.csv -o", "o.csv"),
        ("export m.zarr -o", "o.mdp"),
        ("report m.zarr --bound-seconds 0 -o", "o.html"),
        ("audit m.zarr --picture", "o.png"),
        ("evaluate m.zarr --bound-seconds 0 --no-attacks --map", "o.png"),
        ("evaluate m.zarr --bound-seconds 0 --no-attacks --records", "o.npz"),
    ],
)
def test_a_file_that_exists_is_replaced_only_if_asked(
    command: str, name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(MINE)
    outcome = run_inside(capfd, *command.split(), name)
    assert outcome.returncode == 2
    assert f"{name}: exists already; choose another name, or replace it with --overwrite" in outcome.stderr
    assert (folder / name).read_bytes() == MINE
    assert run_inside(capfd, *command.split(), name, "--overwrite").returncode == 0
    assert (folder / name).read_bytes() != MINE


@pytest.mark.slow
def test_a_comparison_goes_on_in_its_own_folder_and_into_others_if_asked(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "table.csv").write_bytes(MINE)
    command = "compare job.toml --methods em --repeats 1 --bound-seconds 0 --set cluster.kind=inline -o"
    assert run_inside(capfd, *command.split(), "mine").returncode == 2
    assert (folder / "mine" / "table.csv").read_bytes() == MINE
    assert run_inside(capfd, *command.split(), "mine", "--overwrite").returncode == 0
    assert (folder / "mine" / "table.csv").read_bytes() != MINE
    assert run_inside(capfd, *command.split(), "mine").returncode == 0
