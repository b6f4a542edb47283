"""Texts of stores and files that terminals and pages would act on are shown as they are written."""

import contextlib
import io
import json
from typing import Any

import pytest
import typer
from rich.console import Console

from mdpext_dask.cli import console, progress
from mdpext_dask.errors import MdpextError, StoreError, printable
from mdpext_dask.events import Note, StageStarted
from mdpext_dask.problem.notebook_card import card
from mdpext_dask.reports.page.html import _json, _shown

# Colours and titles, a link, going back over a line, another direction, C1 codes, surrogates, separators.
HOSTILE = [
    "\x1b[2J\x1b[31mholds", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\y", "bad\rgood", "a\x08b", "\x9b31m",
    "\u202egnp.exe", "\u2066x\u2069", "a\u2028b", "\udcff", "\x7f", "\ufeffx", "\u200fabc", "x\x00y",
]  # fmt: skip
HARMLESS = "[bold]Zürich[/] 東京 «ε» 10\u202fkm — 🙂"


def shown(text: str) -> str:
    """Return all that the command line prints of a text, on both streams."""
    file = io.StringIO()
    with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        console.show({text: text, "values": [text, {text: text}]}, as_json=False)
        console._tell(StoreError(f"{text}: cannot be read"), 2, as_json=False)
        with contextlib.suppress(typer.Exit):
            console.end_badly(text, 1)

        def crash(_: list[str]) -> int:
            raise KeyError(text)

        with contextlib.suppress(SystemExit):
            console.answer(crash, [], as_json=False)
        lines = progress.PlainLines(file)
        for event in (Note(text), StageStarted("x"), StageStarted(text)):
            lines(event)
        with progress.RichBar(Console(file=file, force_terminal=False, width=200)) as bar:
            bar(Note(text))
            bar(StageStarted(text, 3))
    return file.getvalue()


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_terminal_acts_on_is_printed(text: str) -> None:
    found = shown(text)
    assert printable(text) in found
    for line in found.split("\n"):
        assert printable(line) == line


def test_what_is_harmless_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(HARMLESS) == HARMLESS
    console.show({"name": HARMLESS}, as_json=False)
    assert HARMLESS in capsys.readouterr().out
    error: Any = MdpextError(HARMLESS)
    console._tell(error, 2, as_json=False)
    assert "[bold]Zürich[/] 東京" in capsys.readouterr().err


@pytest.mark.parametrize("text", [*HOSTILE, "<script>", '"onload="x'])
def test_pages_show_texts_and_do_not_obey_them(text: str) -> None:
    html = card(text, [(text, text)])
    assert printable(html) == html
    assert "<script>" not in html
    assert '"onload' not in html
    assert printable(str(StoreError(f"{text}: no"))) == str(StoreError(f"{text}: no"))
    data = json.loads(_json({text: [text, {"x": text}], "y": 1.5, "z": [float("nan"), float("inf")]}))
    assert data == {printable(text): [printable(text), {"x": printable(text)}], "y": 1.5, "z": [None, None]}
    page = _shown(f"{text}\nnext")
    assert page.endswith("\nnext")
    assert all(printable(line) == line for line in page.split("\n"))
