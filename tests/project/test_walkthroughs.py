"""Pages that lead somewhere: every block on them runs, and says what the page says that it says."""

from pathlib import Path

import pandas as pd
import pytest

from tests.support.walkthrough import Block, follow, run_block

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_ten_minutes_lead_to_blurred_points_and_its_screens_are_real(tmp_path: Path) -> None:
    assert follow(DOCS / "ten-minutes.md", tmp_path) == 4
    reports = pd.read_csv(tmp_path / "reports.csv")
    assert list(reports.columns) == ["row", "output", "lon", "lat"]
    assert len(reports) == 2


@pytest.mark.slow
def test_the_table_to_choose_epsilon_from_is_what_its_command_prints(tmp_path: Path) -> None:
    # The Python of the guide goes on from the tutorial, and is run with it.
    assert follow(DOCS / "guide.md", tmp_path, without="python") == 1
    assert (tmp_path / "manhattan-sweep" / "error.png").exists()


def test_a_page_that_says_something_else_or_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho 3 s of 4\n```\n```text\n7.5 s of 4\n```\n")
    assert follow(page, tmp_path) == 1
    for wrong in ("3 s of 5", "3 s"):
        page.write_text(f"```sh\necho 3 s of 4\n```\n```text\n{wrong}\n```\n")
        with pytest.raises(AssertionError):
            follow(page, tmp_path)
    for language, text in (("sh", "false | true"), ("python", "raise SystemExit(3)")):
        with pytest.raises(AssertionError):
            run_block(Block(language, text), tmp_path)


def test_the_recipes_of_the_cookbook_work_as_they_stand(tmp_path: Path) -> None:
    assert follow(DOCS / "cookbook.md", tmp_path) >= 2
    assert (tmp_path / "manhattan.mdp").exists()
    page = (DOCS / "cookbook.md").read_text(encoding="utf-8")
    recipes = page.split("\n## ")[1:]
    assert len(recipes) == 4
    for recipe in recipes:
        assert recipe.count("**Promised:**") == recipe.count("**Not promised:**") == 1
