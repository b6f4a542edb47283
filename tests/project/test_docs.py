"""The documentation: tutorial and snippets run, links lead somewhere, references are complete."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from tests.support.scripts import module_at

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """Return the module that makes pages."""
    return module_at(DOCS / "generated.py")


def snippets(page: Path) -> list[str]:
    """Return the blocks of Python on a page of Markdown."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_tutorial_runs_as_a_script_and_the_guide_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    tutorial = runpy.run_path(str(PROJECT / "workflows" / "tutorial.py"))
    plt.close("all")
    told = capsys.readouterr().out
    assert tutorial["certificate"].holds
    assert not tutorial["rounded"].holds
    # Two releases were allowed, the third was not.
    assert (told.count("reported; so far"), told.count("refused: ")) == (2, 1)
    assert (tmp_path / "tutorial" / "report.html").stat().st_size > 10_000
    blocks = snippets(DOCS / "guide.md")
    assert sum("assert" in block for block in blocks) >= 3
    known: dict[str, Any] = {}
    for block in blocks:
        exec(block, known)
    assert capsys.readouterr().out.count("\n") == 2


# What a core installation brings, all that it requires included; everything else cannot be imported.
CORE_ALONE = """
import importlib.abc, re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def named(requirement):
    return re.match(r"[\\w.-]+", requirement)[0].lower().replace("_", "-")

known, ahead = set(), ["mdpext-dask"]
while ahead:
    name = ahead.pop()
    if name not in known:
        known.add(name)
        try:
            ahead += [named(each) for each in requires(name) or () if "extra ==" not in each]
        except PackageNotFoundError:  # for another system or Python
            pass
more = {
    package for package, names in packages_distributions().items()
    if not known & {name.lower().replace("_", "-") for name in names}
}

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in more:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_what_the_readme_shows_runs_after_what_it_installs(tmp_path: Path) -> None:
    """Its Python and the commands beside it, without the libraries of extras."""
    job = {
        "domain": {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2]},
        "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
        "outputs": {"count": 6},
        "loss": {"tasks": 4},
        "cluster": {"kind": "inline"},
    }
    build(parse_job(job), str(tmp_path / "manhattan.zarr"))
    (tmp_path / "points.csv").write_text("lon,lat\n-73.98,40.75\n")
    blocks = snippets(PROJECT / "README.md")
    commands = re.findall(
        r"^mdpext (?:sample|export|audit) [^#`\n]*", (PROJECT / "README.md").read_text(), re.MULTILINE
    )
    assert (len(blocks), len(commands)) == (1, 2)
    program = [CORE_ALONE, *blocks, "from mdpext_dask.cli.main import app"]
    program += [f"app({command.split()[1:]!r}, standalone_mode=False)" for command in commands]
    program.append("import pytest")  # which is no part of it
    (tmp_path / "program.py").write_text("\n".join(program))
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1:] == ["ModuleNotFoundError: No module named 'pytest'"], done.stderr
    assert (tmp_path / "blurred.csv").exists()
    assert (tmp_path / "manhattan.mdp").exists()


def test_every_link_of_every_page_leads_somewhere(pages: ModuleType) -> None:
    found = {page: page for page in DOCS.glob("*.md")} | pages.including_pages()
    assert len(found) >= 20
    for original, page in found.items():
        pages.linked(original.read_text(encoding="utf-8"), original, page)  # refuses one that leads nowhere


def test_every_page_is_in_the_navigation() -> None:
    named = set()
    for page in DOCS.glob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), flags=re.DOTALL):
            named |= set(re.findall(r"([\w-]+)>?$", tree, flags=re.MULTILINE))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= named


def test_the_command_line_s_reference_has_every_command_and_option(pages: ModuleType) -> None:
    text = pages.commands()
    for command in ("run", "plan", "init", "partition", "finalise", "status", "audit", "evaluate", "sample"):
        assert f"`mdpext {command}`" in text
    for option in ("--set", "--overwrite", "--workers", "--json", "--method", "--remap"):
        assert f"`{option}" in text


def test_the_job_file_s_reference_has_every_key(pages: ModuleType) -> None:
    pytest.importorskip("numpydoc", reason="needs pip install 'mdpext-dask[docs]'")
    from mdpext_dask.job.spec import JobSpec

    text = pages.job_keys()  # refuses a key that no docstring describes
    for name, field in JobSpec.model_fields.items():
        section: Any = field.annotation
        part = f"\n{text}".partition(f"\n## [{name}]\n")[2].partition("\n## ")[0]
        for key in section.model_fields:
            assert f"| `{key}` |" in part
    assert "| `epsilon_per_km` | required |" in text
    assert '| `method` | `"auto"` |' in text


@pytest.mark.slow
def test_pages_are_made_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="needs pip install 'mdpext-dask[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", DOCS, tmp_path / "html"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    tutorial = (tmp_path / "html" / "_made" / "tutorial.html").read_text()
    assert tutorial.count("<img") == 4
    assert "holds for all pairs" in tutorial
    api = (tmp_path / "html" / "api.html").read_text()
    for name in ("JobSpec", "build", "open_mechanism", "audit", "evaluate", "plot_row", "StickyKey"):
        assert f">{name}</span>" in api
