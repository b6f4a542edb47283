"""An auditor with a mistake in it fails the known answers: proof that they can fail.

Every mutant is the source text of one module with one change. All modules of the auditors are loaded anew
with it, asked for the known answers, and thrown away.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.known_answers import check_known_answers, check_planted_in_store, make_store

_PACKAGE = Path(importlib.import_module("mdpext_dask").__file__ or "").parent
# What the auditors are made of: loaded anew for every mutant.
_AUDITORS = ("auditors.audit", "auditors.methods", "auditors.subject")
# A record of a store, the first of its block both ways.
SEAM = (2, 4)

# By module, what is wrong, and the change of its text that makes it so: «text→what takes its place».
MUTANTS = {
    "promise": {
        "comparison reversed": "violates = differences - error «>→<» broken + tolerance",
        "what is unsure is let through": "np.flatnonzero((differences «+→-» error > kept) &",
        "what is unsure is refused": "violates = differences «-→+» error > broken + tolerance",
        "a tolerance where none is asked for": "tolerance = «promise.tolerance→max(promise.tolerance, 1e-5)»",
        "hidden is what is not": "hidden = breaks & (differences + error «<=→>» kept + tolerance)",
        "near ties decided by rows that are not normalised": (
            "«exact.probability_ratio(first, second, output)→"
            "__import__('fractions').Fraction(float(first[output]) / float(second[output]))», places"
        ),
        "comparison of what may break reversed": "np.asarray(differences + error «>→<» promise",
        "error subtracted from what may break": "np.asarray(differences «+→-» error > promise",
        "another ε": "return self.epsilon_per_km«→ * (1 + 1e-7)»\n",
        "Euclid whatever p is": "lengths(dx, dy, «self.metric_p→2.0», out=out)",
    },
    "exact": {
        "comparison of pairs reversed": "ratio != 1 and «→not »_is_positive(over_bound)",
        "comparison of cells reversed": " and «→not »_is_positive(over_limit)",
        "common logarithm": "abs(_decimal(ratio).«ln→log10»())",
        "normalisation left out": "ours «* exact_total(second) / (theirs * exact_total(first))→/ theirs»",
        "distances along one axis": "«Fraction(y) - Fraction(y_prime)→Fraction(0)»",
        "norms of p = 1 and inf swapped": "return «largest→sum(sizes, Decimal(0))»\n        if p == 2",
        "p instead of its dual": "norm(slopes, «_dual(p)→p», digits)",
        "one side of a cell left out": "probability_ratio(rows[1, j], rows[0, j], output) for j in (0,« 1→»)",
        "tolerance left out": "« + Decimal(tolerance)→»",
    },
    "pairs.compare": {
        "distances in metres": "self._promise.apart_km(differences, scratch, out=apart)«→; apart *= 1000»",
        "common logarithm": "np.«log→log10»(",
        "normalisation left out": "«    wide -= np.log(total)\n→»",
        "sign of log ratios kept in the count": "(logs[:, None], logs_prime, out=scratch)«, out=scratch)→)»",
        "sign of log ratios kept in the largest": "«    np.abs(out, out=out)\n→»",
        "sign of other outputs kept in the largest": "«        np.abs(scratch, out=scratch)\n→»",
        "every ordered pair counts": (
            "«kept_km[np.tril_indices(len(kept_km))] = broken_km[np.tril_indices(len(kept_km))] = math.inf→"
            "np.fill_diagonal(kept_km, math.inf), np.fill_diagonal(broken_km, math.inf)»"
        ),
        "hidden is what is not": "(scratch «<=→>» kept_km + promise.tolerance)",
        "what breaks the promise ranks like the rest": "return Triple(«broken→False», ",
        "violations counted twice": "self.violations += «→2 * »count",
        "sizes of violations lost": "self.sizes[-1] «+→»= count",
        "another output named": "else slope, *records, «output→0»)",
        "another record named": "records = int(self._first.records[i]), int(self._second.records[j«→ - 1»])",
        "positions named for records": "records, xy_km, rows = records«[order]→», xy_km[order]",
        "the last tile left out": "for tile in range(len(self._first.tiles.starts) - «1→2»):",
        "neighbouring tiles left out": "different = wanted[0] «!=→+ 1 <» wanted[1]",
        "one pair of tiles left out": "for position in range(«→1, »len(some)):",
        "one portion of pairs of tiles left out": "for start in range(«0→_TILE_PAIRS», len(order)",
        "outputs pruned the wrong way round": "differences[position] «>→<» self._slope * apart[",
        "error subtracted from bounds of tiles": "largest_differences(*levels, a, b) «+→-» self._error",
        "error subtracted before anything is counted": "np.«add→subtract»(differences, self._error",
        "pruned by the steepest, even if it breaks ε": (
            "return «min(self._promise.kept_per_km, max(self._known, self._tally.slope))→"
            "max(self._known, self._tally.slope)»"
        ),
        "same place left out": "«            self._compare_duplicates(rows, columns, apart)\n→»",
        "same place counted for every ordered pair": (
            "«np.tri(len(apart), k=-1, dtype=bool).T→~np.eye(len(apart), dtype=bool)»"
        ),
        "zeros are small numbers": "wide[zero] = «IMPOSSIBLE_LOG→-30.0»",
    },
    "pairs.tiles": {
        "smallest and largest swapped": "least = np.«minimum→maximum».reduceat(values, starts[:-1])",
        "largest of a level is its smallest": "np.«maximum→minimum»(level.most[::2], level.most[1::2])",
        "boxes too small": "np.«minimum→maximum»(level.low[::2], level.low[1::2])",
        "farthest instead of nearest": (
            "np.maximum(«first.low[a] - second.high[b], second.low[b] - first.high[a]→"
            "first.high[a] - second.low[b], second.high[b] - first.low[a]»)"
        ),
        "differences one way only": "return «np.maximum(up, down, out=up)→up»",
        "pruned the wrong way round": ".max(axis=1) + errors[0] «>→<» reach",
        "error subtracted": ".max(axis=1) «+→-» errors[0] > reach",
        "half of a set left out": "a, b = np.concatenate([2 * a, 2 * a« + 1→»]), np.concatenate([b, b])",
        "distances for p = inf are sums": "return np.«maximum→add»(dx, dy, out=out)",
    },
    "pairs.exhaustive": {
        "the next part left out": "others = np.arange(position + «1→2», len(filled))",
        "one portion of parts left out": "for start in range(«0→_PARTNERS», len(others), _PARTNERS)",
        "parts pruned the wrong way round": "wanted = differences «>→<» reach * apart",
        "error subtracted from bounds of parts": ".max(axis=1) «+→-» error",
        "pruned by the steepest, even if it breaks ε": "reach = «min(promise.kept_per_km, slope)→slope»",
        "parts compared with themselves again": "others = np.arange(position« + 1→», len(filled))",
    },
    "source": {"the last part left out": "return len(self.starts) - «1→2»"},
    "methods": {
        "rows that cannot be used are left out": "violations = tally.violations« + refused→»",
        "only pairs of rows that cannot be used count": (
            "(«exhaustive.pairs_of(source.records) - exhaustive.pairs_of(usable)→"
            "exhaustive.pairs_of(source.records - usable)»)"
        ),
        "the least steep triple named": "worst = sorted(tally.worst«, reverse=True→»)",
        "the best band is the worst": "«max→min»(found, key=lambda part: (part.cells.epsilon",
    },
    "certificate": {
        "comparison reversed": "violations += int((rank «>→<» sure_limit).sum())",
        "limit not lowered by what rounding hides": "raw_limit = rank_of_norm((limit «-→+» allowance)",
        "near ties are violations": "sure_limit = rank_of_norm((limit «+→-» allowance)",
        "ε rounded inward": (
            "epsilon = norm * «(1 + NORM_RELATIVE_ERROR) + allowance→(1 - NORM_RELATIVE_ERROR) - allowance»"
        ),
        "distances in metres": (
            "step_x, step_y = «np.diff(x_km), np.diff(y_km)→np.diff(x_km * 1000), np.diff(y_km * 1000)»"
        ),
        "common logarithm": "np.«log→log10»(",
        "normalisation left out": "«row -= np.log(total, out=total)\n            →»row[impossible]",
        "sign kept to the east": "np.abs(np.subtract(logs[0], logs[1], out=east)«, out=east)→)»",
        "sign kept to the north": "np.abs(np.subtract(row[1:], row[:-1], out=between)«, out=between)→)»",
        "smaller of two sides": "np.«maximum→minimum»(north[0], north[1], out=along_y)",
        "smaller side to the east": "np.«maximum→minimum»(east[:-1], east[1:], out=along_x)",
        "p instead of its dual": "q = «dual_exponent(metric_p)→metric_p»\n    shortest",
        "the first strip left out": "range(«0→width if width < len(step_y) else 0», len(step_y), width)",
        "violations counted twice": "violations += «→2 * »int((rank > sure_limit).sum())",
        "another cell named": "largest, place = peak, Place(i, j« + start→», output)",
        "another output named": "largest, place = peak, Place(i, j + start, «output→0»)",
        "no row in common of bands": (
            "yield slice(cells * band // bands, «cells * (band + 1) // bands + 1→"
            "max(cells * (band + 1) // bands, cells * band // bands + 2)»)"
        ),
        "the last band left out": "for band in range(«bands→max(bands - 1, 1)»):",
        "cells of one band named in another": "_moved(found, «first→0», 0)",
    },
    "subject": {
        "bound without ε": "bound = «self.promise.epsilon_per_km * →»distance",
        "log ratio of rows that are not normalised": (
            "return «probability_ratio(first, second, triple.output)→Fraction(ours) / Fraction(theirs)»"
        ),
    },
    "pairs.sampled": {
        "distances in metres": "apart = promise.apart_km(dx, dy)[:, None]«→ * 1000»",
        "sign of log ratios kept": "«    np.abs(differences, out=differences)\n→»",
        "rows that cannot be used are left out": "«    tally.violations += unusable * source.outputs\n→»",
        "shares divided by more than the outputs": "/ (tally.pairs * «outputs→(outputs + 1)»)",
        "another record named": "int(batch.records[there[pair[position]«→ - 1»]])",
        "the least steep triple named": "int(slopes.«argmax→argmin»())",
        "strata weigh alike": "shares = «weights.tolist()→[1.0] * len(means)»",
    },
}

# Of what only stores go through.
STORE_MUTANTS = {
    "source": {
        "a block of a store left out": "return len(_pieces(self.url, self.token))«→ - 1»\n",
        "x and y of a store swapped": "grid.south_km + «j→i» * grid.spacing_km",
    },
    "certificate": {
        "no halo to the east of a block": ", block.closed_y)«→[[*range(len(x) - 1), len(x) - 2]]»\n",
        "no halo to the north of a block": ", block.closed_y)«→[:, [*range(len(y) - 1), len(y) - 2]]»\n",
        "normalisation of stores left out": (
            "np.log(row, out=row)\n«            row -= np.log(total, out=total)\n→»        else:"
        ),
    },
}


class _Mutated(MetaPathFinder, SourceLoader):
    """Loads one module from another text."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = f"mdpext_dask.{name}", text

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 part of the protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
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
        return {
            name: found
            for name, found in sys.modules.items()
            if name.split(".")[:2] == ["mdpext_dask", "auditors"]
        }

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
    """Return (module, change) of mutants; by default those that are made most, and one in three others."""
    always = ("reversed", "left out", "skipped", "metres", "pruned")
    return [
        pytest.param(
            module, change, id=f"{module}: {name}",
            marks=() if number % 3 == 0 or any(word in name for word in always) else pytest.mark.slow,
        )
        for module, changes in mutants.items()
        for number, (name, change) in enumerate(changes.items())
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "change"), cases(MUTANTS))
def test_a_mutant_fails(module: str, change: str) -> None:
    check_mutant(module, change, check_known_answers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "change"), cases(STORE_MUTANTS))
def test_a_mutant_fails_on_a_store(module: str, change: str, store: str) -> None:
    axis = int("[:, [" in change)  # of the halo to the north
    check_mutant(module, change, lambda: check_planted_in_store(store, SEAM, 1e-6, axis=axis))


def test_everything_is_put_back() -> None:
    before = sys.modules["mdpext_dask.auditors.pairs.compare"]
    with loaded_anew("auditors.pairs.compare", text_of("auditors.pairs.compare")):
        assert sys.modules["mdpext_dask.auditors.pairs.compare"] is not before
    assert sys.modules["mdpext_dask.auditors.pairs.compare"] is before
    assert (
        importlib.import_module("mdpext_dask.auditors.methods") is sys.modules["mdpext_dask.auditors.methods"]
    )
