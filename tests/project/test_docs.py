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
