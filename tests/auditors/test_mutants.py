"""An auditor with a mistake in it fails the known answers: proof that they can fail.

Every mutant is the source text of one module with one change. All modules of the auditors are loaded anew
with it, asked for the known answers, and thrown away.
"""

import importlib
import importlib.util
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

# (module, text, what takes its place): one for each way to be wrong.
MUTANTS: dict[str, tuple[str, str, str]] = {
    # --- telling what breaks a promise ---
    "judge: comparison reversed": (
        "auditors.pairs.judge",
        "violates = differences - error > broken + tolerance",
        "violates = differences - error < broken + tolerance",
    ),
    "judge: what is unsure is let through": (
        "auditors.pairs.judge",
        "np.flatnonzero((differences + error > kept) &",
        "np.flatnonzero((differences - error > kept) &",
    ),
    "judge: what is unsure is refused": (
        "auditors.pairs.judge",
        "violates = differences - error > broken + tolerance",
        "violates = differences + error > broken + tolerance",
    ),
    "judge: a tolerance where none is asked for": (
        "auditors.pairs.judge",
        "tolerance = promise.tolerance",
        "tolerance = max(promise.tolerance, 1e-5)",
    ),
    "judge: hidden is what is not": (
        "auditors.pairs.judge",
        "hidden = breaks & (differences + error <= kept + tolerance)",
        "hidden = breaks & (differences + error > kept + tolerance)",
    ),
    "judge: near ties decided by rows that are not normalised": (
        "auditors.pairs.judge",
        "probability_ratio(first, second, output), places",
        '__import__("fractions").Fraction(float(first[output]) / float(second[output])), places',
    ),
    "may_break: comparison reversed": (
        "auditors.pairs.judge",
        "np.asarray(differences + error > promise",
        "np.asarray(differences + error < promise",
    ),
    "may_break: error subtracted": (
        "auditors.pairs.judge",
        "np.asarray(differences + error > promise",
        "np.asarray(differences - error > promise",
    ),
    "promise: another ε": (
        "auditors.promise",
        "return self.epsilon_per_km\n",
        "return self.epsilon_per_km * (1 + 1e-7)\n",
    ),
    # --- digits beyond float64 ---
    "exact: comparison of pairs reversed": (
        "auditors.exact",
        'digits):\n                return excess > 0\n        digits *= 2\n    raise Undecided(f"|ln',
        'digits):\n                return excess < 0\n        digits *= 2\n    raise Undecided(f"|ln',
    ),
    "exact: comparison of cells reversed": (
        "auditors.exact",
        'return excess > 0\n        digits *= 2\n    raise Undecided(f"a cert',
        'return excess < 0\n        digits *= 2\n    raise Undecided(f"a cert',
    ),
    "exact: common logarithm": (
        "auditors.exact",
        "abs(_decimal(ratio).ln())",
        "abs(_decimal(ratio).log10())",
    ),
    "exact: normalisation left out": (
        "auditors.exact",
        "return ours * exact_total(second) / (theirs * exact_total(first))",
        "return ours / theirs",
    ),
    "exact: distances along one axis": (
        "auditors.exact",
        "Fraction(y) - Fraction(y_prime)",
        "Fraction(0)",
    ),
    "exact: norms of p = 1 and inf swapped": (
        "auditors.exact",
        "return largest\n        if p == 2",
        "return sum(sizes, Decimal(0))\n        if p == 2",
    ),
    "exact: p instead of its dual": (
        "auditors.exact",
        "norm(slopes, _dual(p), digits)",
        "norm(slopes, p, digits)",
    ),
    "exact: one side of a cell left out": (
        "auditors.exact",
        "east = [probability_ratio(rows[1, j], rows[0, j], output) for j in (0, 1)]",
        "east = [probability_ratio(rows[1, j], rows[0, j], output) for j in (0,)]",
    ),
    "exact: tolerance left out": ("auditors.exact", " + Decimal(tolerance)", ""),
    # --- pairs of tiles ---
    "pairs: distances in metres": (
        "auditors.pairs.compare",
        "self._promise.apart_km(differences, scratch, out=apart)",
        "np.multiply(self._promise.apart_km(differences, scratch), 1000, out=apart)",
    ),
    "promise: Euclid whatever p is": (
        "auditors.promise",
        "lengths(dx, dy, self.metric_p, out=out)",
        "lengths(dx, dy, 2.0, out=out)",
    ),
    "pairs: common logarithm": ("auditors.pairs.compare", "np.log(", "np.log10("),
    "pairs: normalisation left out": ("auditors.pairs.compare", "    wide -= np.log(total)\n", ""),
    "pairs: sign of log ratios kept in the count": (
        "auditors.pairs.compare",
        "np.abs(np.subtract(logs[:, None], logs_prime, out=scratch), out=scratch)",
        "np.subtract(logs[:, None], logs_prime, out=scratch)",
    ),
    "pairs: sign of log ratios kept in the largest": (
        "auditors.pairs.compare",
        "    np.abs(out, out=out)\n",
        "",
    ),
    "pairs: sign of other outputs kept in the largest": (
        "auditors.pairs.compare",
        "        np.abs(scratch, out=scratch)\n",
        "",
    ),
    "pairs: every ordered pair counts": (
        "auditors.pairs.compare",
        "kept_km[np.tril_indices(len(kept_km))] = broken_km[np.tril_indices(len(kept_km))] = math.inf",
        "np.fill_diagonal(kept_km, math.inf), np.fill_diagonal(broken_km, math.inf)",
    ),
    "pairs: hidden is what is not": (
        "auditors.pairs.compare",
        "(scratch <= kept_km + promise.tolerance)",
        "(scratch > kept_km + promise.tolerance)",
    ),
    "pairs: what breaks the promise ranks like the rest": (
        "auditors.pairs.compare",
        "return Triple(broken, ",
        "return Triple(False, ",
    ),
    "pairs: violations counted twice": (
        "auditors.pairs.compare",
        "tally.violations += count",
        "tally.violations += 2 * count",
    ),
    "pairs: sizes of violations lost": (
        "auditors.pairs.compare",
        "self.sizes[-1] += count",
        "self.sizes[-1] = count",
    ),
    "pairs: another output named": (
        "auditors.pairs.compare",
        "else slope, *records, output)",
        "else slope, *records, 0)",
    ),
    "pairs: another record named": (
        "auditors.pairs.compare",
        "records = int(self._first.records[i]), int(self._second.records[j])",
        "records = int(self._first.records[i]), int(self._second.records[j - 1])",
    ),
    "pairs: positions named for records": (
        "auditors.pairs.compare",
        "        records=records[order],\n",
        "        records=records,\n",
    ),
    "pairs: the last tile left out": (
        "auditors.pairs.compare",
        "for tile in range(len(self._first.tiles.starts) - 1):",
        "for tile in range(len(self._first.tiles.starts) - 2):",
    ),
    "pairs: neighbouring tiles left out": (
        "auditors.pairs.compare",
        "different = wanted[0] != wanted[1]",
        "different = wanted[0] + 1 < wanted[1]",
    ),
    "pairs: one pair of tiles left out": (
        "auditors.pairs.compare",
        "for position in range(len(some)):",
        "for position in range(1, len(some)):",
    ),
    "pairs: one portion of pairs of tiles left out": (
        "auditors.pairs.compare",
        "for start in range(0, len(order), _TILE_PAIRS):",
        "for start in range(_TILE_PAIRS, len(order), _TILE_PAIRS):",
    ),
    "pairs: outputs pruned the wrong way round": (
        "auditors.pairs.compare",
        "differences[position] > self._slope * apart[some[position]]",
        "differences[position] < self._slope * apart[some[position]]",
    ),
    "pairs: error subtracted from bounds of tiles": (
        "auditors.pairs.compare",
        "differences = largest_differences(*levels, a, b) + self._error",
        "differences = largest_differences(*levels, a, b) - self._error",
    ),
    "pairs: error subtracted before anything is counted": (
        "auditors.pairs.compare",
        "np.add(differences, self._error, out=scratch)",
        "np.subtract(differences, self._error, out=scratch)",
    ),
    "pairs: pruned by the steepest, even if it breaks ε": (
        "auditors.pairs.compare",
        "return min(self._promise.kept_per_km, max(self._known, self._tally.slope))",
        "return max(self._known, self._tally.slope)",
    ),
    "pairs: same place left out": (
        "auditors.pairs.compare",
        "            self._compare_duplicates(rows, columns, apart)\n",
        "",
    ),
    "pairs: same place counted for every ordered pair": (
        "auditors.pairs.compare",
        "np.tri(len(apart), k=-1, dtype=bool).T",
        "~np.eye(len(apart), dtype=bool)",
    ),
    "pairs: zeros are small numbers": (
        "auditors.pairs.compare",
        "wide[zero] = IMPOSSIBLE_LOG",
        "wide[zero] = -30.0",
    ),
    # --- bounds of tiles ---
    "tiles: smallest and largest swapped": (
        "auditors.pairs.tiles",
        "least = np.minimum.reduceat(values, starts[:-1])",
        "least = np.maximum.reduceat(values, starts[:-1])",
    ),
    "tiles: largest of a level is its smallest": (
        "auditors.pairs.tiles",
        "np.maximum(level.most[::2], level.most[1::2])",
        "np.minimum(level.most[::2], level.most[1::2])",
    ),
    "tiles: boxes too small": (
        "auditors.pairs.tiles",
        "np.minimum(level.low[::2], level.low[1::2])",
        "np.maximum(level.low[::2], level.low[1::2])",
    ),
    "tiles: farthest instead of nearest": (
        "auditors.pairs.tiles",
        "np.maximum(first.low[a] - second.high[b], second.low[b] - first.high[a])",
        "np.maximum(first.high[a] - second.low[b], second.high[b] - first.low[a])",
    ),
    "tiles: differences one way only": (
        "auditors.pairs.tiles",
        "return np.maximum(up, down, out=up)",
        "return up",
    ),
    "tiles: pruned the wrong way round": (
        "auditors.pairs.tiles",
        ".max(axis=1) + errors[0] > reach",
        ".max(axis=1) + errors[0] < reach",
    ),
    "tiles: error subtracted": (
        "auditors.pairs.tiles",
        ".max(axis=1) + errors[0] > reach",
        ".max(axis=1) - errors[0] > reach",
    ),
    "tiles: half of a set left out": (
        "auditors.pairs.tiles",
        "a, b = np.concatenate([2 * a, 2 * a + 1]), np.concatenate([b, b])",
        "a, b = np.concatenate([2 * a, 2 * a]), np.concatenate([b, b])",
    ),
    "tiles: distances for p = inf are sums": (
        "auditors.pairs.tiles",
        "return np.maximum(dx, dy, out=out)",
        "return np.add(dx, dy, out=out)",
    ),
    # --- parts ---
    "exhaustive: the next part left out": (
        "auditors.pairs.exhaustive",
        "others = np.arange(position + 1, len(filled))",
        "others = np.arange(position + 2, len(filled))",
    ),
    "exhaustive: one portion of parts left out": (
        "auditors.pairs.exhaustive",
        "for start in range(0, len(others), _PARTNERS)",
        "for start in range(_PARTNERS, len(others), _PARTNERS)",
    ),
    "exhaustive: parts pruned the wrong way round": (
        "auditors.pairs.exhaustive",
        "wanted = differences > reach * apart",
        "wanted = differences < reach * apart",
    ),
    "exhaustive: error subtracted from bounds of parts": (
        "auditors.pairs.exhaustive",
        ".max(axis=1) + error",
        ".max(axis=1) - error",
    ),
    "exhaustive: pruned by the steepest, even if it breaks ε": (
        "auditors.pairs.exhaustive",
        "reach = min(promise.kept_per_km, slope)",
        "reach = slope",
    ),
    "exhaustive: parts compared with themselves again": (
        "auditors.pairs.exhaustive",
        "others = np.arange(position + 1, len(filled))",
        "others = np.arange(position, len(filled))",
    ),
    "source: the last part left out": (
        "auditors.source",
        "return len(self.starts) - 1",
        "return len(self.starts) - 2",
    ),
    "auditors: rows that cannot be used are left out": (
        "auditors.methods",
        "violations = tally.violations + refused",
        "violations = tally.violations",
    ),
    "auditors: only pairs of rows that cannot be used count": (
        "auditors.methods",
        "(exhaustive.pairs_of(source.records) - exhaustive.pairs_of(usable))",
        "exhaustive.pairs_of(source.records - usable)",
    ),
    "auditors: the least steep triple named": (
        "auditors.methods",
        "worst = sorted(tally.worst, reverse=True)",
        "worst = sorted(tally.worst)",
    ),
    # --- the certificate ---
    "certificate: comparison reversed": (
        "auditors.certificate",
        "violations += int((rank > limits[1]).sum())",
        "violations += int((rank < limits[1]).sum())",
    ),
    "certificate: limit not lowered by what rounding hides": (
        "auditors.certificate",
        "raw_limit = rank_of_norm((limit - allowance)",
        "raw_limit = rank_of_norm((limit + allowance)",
    ),
    "certificate: near ties are violations": (
        "auditors.certificate",
        "sure_limit = rank_of_norm((limit + allowance)",
        "sure_limit = rank_of_norm((limit - allowance)",
    ),
    "certificate: ε rounded inward": (
        "auditors.certificate",
        "epsilon = norm * (1 + NORM_RELATIVE_ERROR) + allowance",
        "epsilon = norm * (1 - NORM_RELATIVE_ERROR) - allowance",
    ),
    "certificate: distances in metres": (
        "auditors.certificate",
        "step_x, step_y = np.diff(x_km), np.diff(y_km)",
        "step_x, step_y = np.diff(x_km * 1000), np.diff(y_km * 1000)",
    ),
    "certificate: common logarithm": ("auditors.certificate", "np.log(", "np.log10("),
    "certificate: normalisation left out": (
        "auditors.certificate",
        "            row -= np.log(total, out=total)\n            row[impossible]",
        "            row[impossible]",
    ),
    "certificate: sign kept to the east": (
        "auditors.certificate",
        "np.abs(np.subtract(logs[0], logs[1], out=east), out=east)",
        "np.subtract(logs[0], logs[1], out=east)",
    ),
    "certificate: sign kept to the north": (
        "auditors.certificate",
        "np.abs(np.subtract(row[1:], row[:-1], out=between), out=between)",
        "np.subtract(row[1:], row[:-1], out=between)",
    ),
    "certificate: smaller of two sides": (
        "auditors.certificate",
        "np.maximum(north[0], north[1], out=along_y)",
        "np.minimum(north[0], north[1], out=along_y)",
    ),
    "certificate: smaller side to the east": (
        "auditors.certificate",
        "np.maximum(east[:-1], east[1:], out=along_x)",
        "np.minimum(east[:-1], east[1:], out=along_x)",
    ),
    "certificate: p instead of its dual": (
        "auditors.certificate",
        "q = dual_exponent(metric_p)\n    outputs",
        "q = metric_p\n    outputs",
    ),
    "certificate: the first strip left out": (
        "auditors.certificate",
        "for start in range(0, len(step_y), width):",
        "for start in range(width if width < len(step_y) else 0, len(step_y), width):",
    ),
    "certificate: violations counted twice": (
        "auditors.certificate",
        "violations += strip.violations",
        "violations += 2 * strip.violations",
    ),
    "certificate: another cell named": (
        "auditors.certificate",
        "Place(strip.place.i, strip.place.j + start, strip.place.output)",
        "Place(strip.place.i, strip.place.j, strip.place.output)",
    ),
    "certificate: another output named": (
        "auditors.certificate",
        "largest, place = peak, Place(i, j, output)",
        "largest, place = peak, Place(i, j, 0)",
    ),
    "bands: no row in common": (
        "auditors.bands",
        "yield slice(cells * band // bands, cells * (band + 1) // bands + 1)",
        "yield slice(cells * band // bands, max(cells * (band + 1) // bands, cells * band // bands + 2))",
    ),
    "bands: the last one left out": (
        "auditors.bands",
        "for band in range(bands):",
        "for band in range(max(bands - 1, 1)):",
    ),
    "bands: cells of one band named in another": (
        "auditors.bands",
        "Place(found.place.i + first, ",
        "Place(found.place.i, ",
    ),
    "auditors: the best band is the worst": (
        "auditors.methods",
        "worst = max(found, key=lambda part: (part.epsilon, -part.block))",
        "worst = min(found, key=lambda part: (part.epsilon, -part.block))",
    ),
    "report: bound without ε": (
        "auditors.result",
        "bound = promise.epsilon_per_km * distance",
        "bound = distance",
    ),
    "report: log ratio of rows that are not normalised": (
        "auditors.result",
        "return probability_ratio(first, second, triple.output)",
        "return Fraction(ours) / Fraction(theirs)",
    ),
    # --- samples ---
    "sampled: distances in metres": (
        "auditors.pairs.sampled",
        "apart = promise.apart_km(dx, dy)[:, None]",
        "apart = promise.apart_km(dx, dy)[:, None] * 1000",
    ),
    "sampled: sign of log ratios kept": (
        "auditors.pairs.sampled",
        "    np.abs(differences, out=differences)\n",
        "",
    ),
    "sampled: rows that cannot be used are left out": (
        "auditors.pairs.sampled",
        "    tally.violations += unusable * source.outputs\n",
        "",
    ),
    "sampled: shares divided by more than the outputs": (
        "auditors.pairs.sampled",
        "tally.violations / (tally.pairs * outputs)",
        "tally.violations / (tally.pairs * (outputs + 1))",
    ),
    "sampled: another record named": (
        "auditors.pairs.sampled",
        "int(batch.records[there[pair[position]]])",
        "int(batch.records[there[pair[position] - 1]])",
    ),
    "sampled: the least steep triple named": (
        "auditors.pairs.sampled",
        "int(slopes.argmax())",
        "int(slopes.argmin())",
    ),
    "sampled: strata weigh alike": (
        "auditors.pairs.sampled",
        "(mean, weight) for mean, weight in zip(means, weights.tolist(), strict=True)",
        "(mean, 1.0) for mean, weight in zip(means, weights.tolist(), strict=True)",
    ),
}

# Of what only stores go through.
STORE_MUTANTS: dict[str, tuple[str, str, str]] = {
    "source: a block of a store left out": (
        "auditors.source",
        "return len(_pieces(self.url, self.token))\n",
        "return len(_pieces(self.url, self.token)) - 1\n",
    ),
    "source: x and y of a store swapped": (
        "auditors.source",
        "return np.stack([x[i], y[j]], axis=-1)",
        "return np.stack([x[i], y[i]], axis=-1)",
    ),
    "certificate: no halo to the east of a block": (
        "auditors.certificate",
        "rows_of(store, block.closed_x, block.closed_y)",
        "rows_of(store, block.closed_x, block.closed_y)[[*range(len(x) - 1), len(x) - 2]]",
    ),
    "certificate: no halo to the north of a block": (
        "auditors.certificate",
        "rows_of(store, block.closed_x, block.closed_y)",
        "rows_of(store, block.closed_x, block.closed_y)[:, [*range(len(y) - 1), len(y) - 2]]",
    ),
    "certificate: normalisation of stores left out": (
        "auditors.certificate",
        "            np.log(row, out=row)\n            row -= np.log(total, out=total)\n        else:",
        "            np.log(row, out=row)\n        else:",
    ),
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


def check_mutant(mutant: tuple[str, str, str], check: Callable[[], None]) -> None:
    """Check that a mutant fails, by a wrong answer: what crashes says nothing about the answers."""
    module, text, other = mutant
    source = text_of(module)
    assert text in source
    with loaded_anew(module, source.replace(text, other)), pytest.raises(AssertionError):
        check()


# Every time those of the kinds that auditors get wrong most, and one in three of the others.
_ALWAYS = ("reversed", "left out", "skipped", "metres", "pruned")
_EVERY_TIME = {
    name
    for position, name in enumerate(MUTANTS)
    if position % 3 == 0 or any(word in name for word in _ALWAYS)
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _EVERY_TIME else pytest.mark.slow, id=name) for name in MUTANTS],
)
def test_a_mutant_fails(name: str) -> None:
    check_mutant(MUTANTS[name], check_known_answers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STORE_MUTANTS)
def test_a_mutant_fails_on_a_store(name: str, store: str) -> None:
    check_mutant(
        STORE_MUTANTS[name], lambda: check_planted_in_store(store, SEAM, 1e-6, axis=int("north" in name))
    )


def test_everything_is_put_back() -> None:
    before = sys.modules["mdpext_dask.auditors.pairs.compare"]
    with loaded_anew("auditors.pairs.compare", text_of("auditors.pairs.compare")):
        assert sys.modules["mdpext_dask.auditors.pairs.compare"] is not before
    assert sys.modules["mdpext_dask.auditors.pairs.compare"] is before
    assert (
        importlib.import_module("mdpext_dask.auditors.methods") is sys.modules["mdpext_dask.auditors.methods"]
    )
