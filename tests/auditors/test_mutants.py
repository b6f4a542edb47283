"""An auditor with a mistake in it fails the known answers: proof that they can fail.

Every mutant is the source text of one module with one change. All modules of the auditors are loaded anew
with it, asked for the known answers, and thrown away.
"""

import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.known_answers import check_known_answers, check_planted_in_store, make_store

_PACKAGE = Path(importlib.import_module("mdpext_dask").__file__ or "").parent
_ROOM = "mdpext_dask.auditors."
# What the auditors are made of: loaded anew for every mutant.
_AUDITORS = ("auditors.audit", "auditors.methods", "auditors.subject")
# A record of a store, the first of its block both ways.
SEAM = (2, 4)

MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))


class _Mutated(MetaPathFinder, SourceLoader):
    """Loads one module from another text."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = f"mdpext_dask.{name}", text

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def get_filename(self, name: str) -> str:
        return f"<mutant of {name}>"

    def get_data(self, path: str) -> bytes:  # noqa: ARG002 it is the same one
        return self._text.encode()


def text_of(module: str) -> str:
    return _PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text()


@contextmanager
def loaded_anew(module: str, text: str) -> Iterator[None]:
    """Have all auditors loaded anew, one module of them from this text; put everything back at the end."""

    def ours() -> dict[str, ModuleType]:
        return {name: found for name, found in sys.modules.items() if f"{name}.".startswith(_ROOM)}

    parent: Any = sys.modules["mdpext_dask"]
    for name in _AUDITORS:
        importlib.import_module(f"mdpext_dask.{name}")
    kept = ours()
    for name in kept:
        del sys.modules[name]
    finder = _Mutated(module, text)
    sys.meta_path.insert(0, finder)
    try:
        for name in (module, *_AUDITORS):
            importlib.import_module(f"mdpext_dask.{name}")
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(kept)
        parent.auditors = kept["mdpext_dask.auditors"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store whose rows are overwritten."""
    return make_store(tmp_path_factory.mktemp("six"))


@pytest.mark.slow
def test_the_auditors_pass(store: str) -> None:
    """Loaded anew from their own texts, as mutants are."""
    with loaded_anew("auditors.pairs.compare", text_of("auditors.pairs.compare")):
        check_known_answers()
        check_planted_in_store(store, SEAM, 1e-6)


def check_mutant(module: str, change: str, check: Callable[[], None]) -> None:
    """Check that a mutant fails, by a wrong answer: what crashes says nothing about the answers."""
    before, text, other, after = re.split("[«→»]", change)
    source = text_of(f"auditors.{module}")
    assert before + text + after in source
    mutant = source.replace(before + text + after, before + other + after)
    with loaded_anew(f"auditors.{module}", mutant), pytest.raises(AssertionError):
        check()


def cases(mutants: dict[str, dict[str, str]]) -> list[Any]:
    """Return (module, change) of mutants; by default a few of each module, one of directions."""

    def is_quick(module: str, number: int, name: str) -> bool:
        if module == "directions":
            return number == 0
        return number % 4 == 0 or any(word in name for word in ("reversed", "skipped", "metres", "pruned"))

    return [
        pytest.param(
            module, change, id=f"{module}: {name}",
            marks=() if is_quick(module, number, name) else pytest.mark.slow,
        )
        for module, changes in mutants.items()
        for number, (name, change) in enumerate(changes.items())
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "change"), cases(MUTANTS["arrays"]))
def test_a_mutant_fails(module: str, change: str) -> None:
    check_mutant(module, change, check_known_answers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "change"), cases(MUTANTS["stores"]))
def test_a_mutant_fails_on_a_store(module: str, change: str, store: str) -> None:
    axis = int("[:, [" in change)  # of the halo to the north
    check_mutant(module, change, lambda: check_planted_in_store(store, SEAM, 1e-6, axis=axis))


def test_everything_is_put_back() -> None:
    before = sys.modules["mdpext_dask.auditors.pairs.compare"]
    with loaded_anew("auditors.pairs.compare", text_of("auditors.pairs.compare")):
        assert sys.modules["mdpext_dask.auditors.pairs.compare"] is not before
    assert sys.modules["mdpext_dask.auditors.pairs.compare"] is before
    assert importlib.import_module(_ROOM + "methods") is sys.modules[_ROOM + "methods"]
