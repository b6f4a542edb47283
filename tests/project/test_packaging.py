"""What is published: sdist and wheel are whole, run with NumPy alone where they should, and are typed."""

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import mdpext_dask
from mdpext_dask import open_mechanism
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.runtime import city_layout, ledger, signatures, sticky
from mdpext_dask.sampling.export import export_city
from mdpext_dask.store import schema

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "mdpext_dask"
VERSION = mdpext_dask.__version__
STEM = f"mdpext_dask-{VERSION}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist of this checkout, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(PROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in folder.iterdir()} == {f"{STEM}.tar.gz", f"{STEM}-py3-none-any.whl"}
    return folder


@pytest.fixture(scope="module")
def wheel(published: Path) -> Path:
    return published / f"{STEM}-py3-none-any.whl"


@pytest.fixture(scope="module")
def files(published: Path, wheel: Path) -> dict[str, dict[str, bytes]]:
    """Return what both hold, by name."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name: archive.read(name) for name in archive.namelist()}
    in_sdist = {}
    with tarfile.open(published / f"{STEM}.tar.gz") as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None, member.name  # files alone
            in_sdist[member.name.removeprefix(f"{STEM}/")] = content.read()
    return {"wheel": in_wheel, "sdist": in_sdist}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment that holds the wheel, NumPy and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    [python] = (path for path in folder.glob("*/python*") if path.stem == "python")
    # Of here: pip itself is in no environment that only draws.
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    [packages] = folder.glob("[Ll]ib/**/site-packages/mdpext_dask")
    # As it is installed here, so that no network is needed.
    numpy = Path(np.__file__).parent
    for part in (numpy, numpy.with_name("numpy.libs")):
        if part.exists():
            packages.with_name(part.name).symlink_to(part)
    return python


# --- contents -------------------------------------------------------------------------------------


def package_files() -> set[str]:
    found = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(PROJECT).as_posix() for path in found}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_more(files: dict[str, dict[str, bytes]]) -> None:
    names = set(files["wheel"])
    about = {name for name in names if name.startswith(f"{STEM}.dist-info/")}
    assert names - about == package_files()
    assert "mdpext_dask/py.typed" in names
    for licence in ("LICENSE", "NOTICE"):
        content = files["wheel"][f"{STEM}.dist-info/licenses/{licence}"]
        assert content == (PROJECT / licence).read_bytes() == files["sdist"][licence]


def test_the_sdist_has_what_a_checkout_has(files: dict[str, dict[str, bytes]]) -> None:
    sdist = set(files["sdist"])
    assert package_files() <= sdist
    needed = {"README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "deploy/browser/mdpext.min.js"}
    needed |= {"docs/city-file.md", "workflows/manhattan.toml", "tests/runtime/vectors/vectors.json"}
    assert needed <= sdist
    unwanted = re.compile(r"__pycache__|\.coverage|\.zarr/|\.venv|_build|\.egg-info|^\.ci/|^dist/")
    assert [name for name in sdist if unwanted.search(name)] == []
    assert sum(map(len, files["sdist"].values())) < 10e6


def test_nothing_says_where_it_was_made(files: dict[str, dict[str, bytes]]) -> None:
    for kind, contents in files.items():
        for name, content in contents.items():
            for place in (PROJECT, Path.home() / "", sys.prefix):
                assert f"{place}/".encode() not in content, (kind, name)


def test_metadata(files: dict[str, dict[str, bytes]]) -> None:
    found: Message = Parser().parsestr(files["wheel"][f"{STEM}.dist-info/METADATA"].decode())
    expected = {
        "Name": "mdpext-dask",
        "Version": VERSION,
        "Requires-Python": ">=3.11",
        "License-Expression": "Apache-2.0",
        "Description-Content-Type": "text/markdown",
    }
    assert {key: found[key] for key in expected} == expected
    assert found.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert {"files", "report", "cloud", "cluster", "sample"} <= set(found.get_all("Provides-Extra", []))
    assert files["wheel"][f"{STEM}.dist-info/entry_points.txt"].split() == [
        b"[console_scripts]", b"mdpext", b"=", b"mdpext_dask.cli.main:main",
    ]  # fmt: skip


# --- in a clean environment -----------------------------------------------------------------------

_DRAWS = """
import sys
import numpy as np
from mdpext_dask.runtime import open_city

city = open_city(sys.argv[1], verify=True)
np.save(sys.argv[2], [*city.row(-73.98, 40.75), *city.sample(-73.98, 40.75, n=5).ravel()])
others = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(name for name in others if not name.startswith("_")), sep=",")
"""


def run(python: Path, *arguments: str) -> str:
    done = subprocess.run([str(python), "-I", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_city_is_drawn_from_with_numpy_alone(
    installed: Path, small_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    store, city, found = tmp_path / "m.zarr", tmp_path / "m.mdp", tmp_path / "found.npy"
    build(parse_job(small_job()), str(store))
    export_city(str(store), city)
    assert run(installed, "-c", _DRAWS, str(city), str(found)) == "mdpext_dask,numpy"
    mechanism = open_mechanism(store)
    row, drawn = np.split(np.load(found), [len(mechanism.output_lonlat)])
    np.testing.assert_array_equal(row, mechanism.row(lon=-73.98, lat=40.75))
    assert {*map(tuple, drawn.reshape(5, 2))} <= {*map(tuple, mechanism.output_lonlat)}


def test_what_is_installed_knows_its_version_and_its_place(installed: Path) -> None:
    said = (
        "import mdpext_dask, importlib.metadata as m; print(m.version('mdpext-dask'), mdpext_dask.__file__)"
    )
    version, path = run(installed, "-c", said).split(maxsplit=1)
    assert version == VERSION
    assert Path(path).is_relative_to(installed.parents[1])


_TYPED = """
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from numpy.typing import NDArray

from mdpext_dask import (
    AttackRequest, AuditReport, BoundRequest, JobSpec, Mechanism, PlainLines, ReleaseBudget, Sampling,
    StickyKey, audit, build, evaluate, graph, load_job, open_mechanism, plots, report, trust_operators,
)
from mdpext_dask.errors import GuaranteeViolation, MdpextError
from mdpext_dask.only_here import number
from mdpext_dask.runtime import City, open_city

spec = JobSpec.of(domain={"roads": "x"}, privacy={"epsilon_per_km": 1.0}).replace(job={"name": "a"})
assert_type(spec, JobSpec)
assert_type(load_job("job.toml"), JobSpec)
assert_type(build(spec, Path("m.zarr"), observer=PlainLines()), dict[str, Any])
m = open_mechanism("m.zarr", verify=True)
assert_type(m, Mechanism)
key, budget = StickyKey.generate(), ReleaseBudget("ledger", 5)
assert_type(m.sample(lon=1.0, lat=2.0, accuracy_m=20), NDArray[np.float64])
assert_type(m.sample(lon=1.0, lat=2.0, user="anna", sticky=key, budget=budget), NDArray[np.float64])
outputs, outside = m.sample_points(np.zeros((3, 2)))
assert_type(outside, NDArray[np.bool_])
assert_type(m.row(x_km=1, y_km=1), xr.DataArray)
assert_type(audit("m.zarr", "sampled", sampling=Sampling(pairs=100)), AuditReport)
assert_type(audit(m).holds, bool | None)
assert_type(evaluate("m.zarr", bound=BoundRequest(), attacks=AttackRequest()), dict[str, Any])
assert_type(report(m, "report.html"), dict[str, Any])
assert_type(plots.plot_row(m, lon=1, lat=2), Axes)
assert_type(open_city("m.mdp"), City)
assert_type(open_city("m.mdp").row(1.0, 2.0), NDArray[np.float64])
failure: type[MdpextError] = GuaranteeViolation
trust_operators("mine:Operator")
graph.ExtensionGraph
assert_type(number, int)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_users_scripts_are_checked_by_types(installed: Path, tmp_path: Path) -> None:
    """Against the installed package, with the libraries of this environment beside it."""
    pytest.importorskip("mypy", reason="needs pip install 'mdpext-dask[dev]'")
    [packages] = installed.parents[1].glob("[Ll]ib/**/site-packages/mdpext_dask")
    beside = packages.with_name("beside.pth")
    beside.write_text(f"{Path(np.__file__).parents[1]}\n")
    # No other copy of the package has this.
    only_here = packages / "only_here.py"
    only_here.write_text("number: int = 1\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed)]
    command += ["--cache-dir", str(tmp_path / "cache"), "user.py"]

    def checked(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "user.py").write_text(text)
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    try:
        good = checked(_TYPED)
        assert good.returncode == 0, good.stdout
        bad = checked(_TYPED + 'm.sample(lon="a")\n')
    finally:
        beside.unlink()
        only_here.unlink()
    assert "arg-type" in bad.stdout
    assert bad.returncode == 1


# --- versions and formats -------------------------------------------------------------------------


def test_every_file_has_the_version() -> None:
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert citation["license"] == "Apache-2.0"
    [author] = citation["authors"]
    assert f'authors = [{{ name = "{author["name"]}" }}]' in (PROJECT / "pyproject.toml").read_text()
    assert not {"doi", "identifiers"} & set(citation)
    tag = re.compile(r"mdpext-dask:(\d[\w.]*)|^ *tag: (\S+)", re.MULTILINE)
    found = {
        path: {image or own for image, own in tag.findall(path.read_text())}
        for path in (PROJECT / "deploy").rglob("*")
        if path.is_file()
    }
    assert {path.name: tags for path, tags in found.items() if tags - {VERSION}} == {}
    assert sum(map(bool, found.values())) >= 5


def test_the_table_of_formats_is_that_of_the_code() -> None:
    text = (PROJECT / "docs" / "compatibility.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    [reader] = re.findall(
        r"^const VERSION = (\d+)", (PROJECT / "deploy/browser/mdpext.js").read_text(), re.MULTILINE
    )

    def last(form: str) -> str:
        return form.rpartition(" ")[2]

    city, store, count = str(city_layout.VERSION), str(schema.FORMAT_VERSION), str(ledger._VERSION)
    sticky_key, signing_key = last(sticky._FORMAT), last(signatures._SECRET_FORMAT)
    assert last(signatures._PUBLIC_FORMAT) == signing_key
    [own] = [row[1:] for row in rows if row[0] == VERSION]
    assert own == [store, city, count, sticky_key, signing_key]
    stated = {row[0].partition(" ")[0]: (row[1], row[2]) for row in rows if len(row) == 5}
    expected = {"store": (store, f"1 to {store}"), "[city](city-file.md)": (city, city), "the": ("", reader)}
    expected |= {
        "ledger": (count, count),
        "sticky": (sticky_key, sticky_key),
        "signing": (signing_key, signing_key),
    }
    assert stated | expected == stated
