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

from tests.known_answers import check_known_answers, check_planted_in_store, make_store

_PACKAGE = Path(importlib.import_module("mdpext_dask").__file__ or "").parent
# What the auditors are made of: loaded anew for every mutant.
_AUDITORS = ("audit", "auditing", "auditors", "subjects")
# A record of a store, the first of its block both ways.
SEAM = (2, 4)

# (module, text, what takes its place): one for each way to be wrong.
MUTANTS: dict[str, tuple[str, str, str]] = {
    # --- telling what breaks a promise ---
    "judge: comparison reversed": (
        "audit.judge",
        "violates = differences - error > broken + tolerance",
        "violates = differences - error < broken + tolerance",
    ),
    "judge: what is unsure is let through": (
        "audit.judge",
        "np.flatnonzero((differences + error > kept) &",
        "np.flatnonzero((differences - error > kept) &",
    ),
    "judge: what is unsure is refused": (
        "audit.judge",
        "violates = differences - error > broken + tolerance",
        "violates = differences + error > broken + tolerance",
    ),
    "judge: a tolerance where none is asked for": (
        "audit.judge",
        "tolerance = promise.tolerance",
        "tolerance = max(promise.tolerance, 1e-5)",
    ),
    "judge: hidden is what is not": (
        "audit.judge",
        "hidden = breaks & (differences + error <= kept + tolerance)",
        "hidden = breaks & (differences + error > kept + tolerance)",
    ),
    "judge: near ties decided by rows that are not normalised": (
        "audit.judge",
        "probability_ratio(first, second, output), places",
        '__import__("fractions").Fraction(float(first[output]) / float(second[output])), places',
    ),
    "may_break: comparison reversed": (
        "audit.judge",
        "np.asarray(differences + error > promise",
        "np.asarray(differences + error < promise",
    ),
    "may_break: error subtracted": (
        "audit.judge",
        "np.asarray(differences + error > promise",
        "np.asarray(differences - error > promise",
    ),
    "promise: another ε": (
        "audit.promise",
        "return self.epsilon_per_km\n",
        "return self.epsilon_per_km * (1 + 1e-7)\n",
    ),
    # --- digits beyond float64 ---
    "exact: comparison of pairs reversed": (
        "audit.exact",
        'digits):\n                return excess > 0\n        digits *= 2\n    raise Undecided(f"|ln',
        'digits):\n                return excess < 0\n        digits *= 2\n    raise Undecided(f"|ln',
    ),
    "exact: comparison of cells reversed": (
        "audit.exact",
        'return excess > 0\n        digits *= 2\n    raise Undecided(f"a cert',
        'return excess < 0\n        digits *= 2\n    raise Undecided(f"a cert',
    ),
    "exact: common logarithm": ("audit.exact", "abs(_decimal(ratio).ln())", "abs(_decimal(ratio).log10())"),
    "exact: normalisation left out": (
        "audit.exact",
        "return ours * exact_total(second) / (theirs * exact_total(first))",
        "return ours / theirs",
    ),
    "exact: distances along one axis": (
        "audit.exact",
        "Fraction(y) - Fraction(y_prime)",
        "Fraction(0)",
    ),
    "exact: norms of p = 1 and inf swapped": (
        "audit.exact",
        "return largest\n        if p == 2",
        "return sum(sizes, Decimal(0))\n        if p == 2",
    ),
    "exact: p instead of its dual": (
        "audit.exact",
        "norm(slopes, _dual(p), digits)",
        "norm(slopes, p, digits)",
    ),
    "exact: one side of a cell left out": (
        "audit.exact",
        "east = [probability_ratio(rows[1, j], rows[0, j], output) for j in (0, 1)]",
        "east = [probability_ratio(rows[1, j], rows[0, j], output) for j in (0,)]",
    ),
    "exact: tolerance left out": ("audit.exact", " + Decimal(tolerance)", ""),
    # --- pairs of tiles ---
    "pairs: distances in metres": (
        "audit.pairs",
        "self._promise.apart_km(differences, scratch, out=apart)",
        "np.multiply(self._promise.apart_km(differences, scratch), 1000, out=apart)",
    ),
    "promise: Euclid whatever p is": (
        "audit.promise",
        "lengths(dx, dy, self.metric_p, out=out)",
        "lengths(dx, dy, 2.0, out=out)",
    ),
    "pairs: common logarithm": ("audit.pairs", "np.log(", "np.log10("),
    "pairs: normalisation left out": ("audit.pairs", "    wide -= np.log(total)\n", ""),
    "pairs: sign of log ratios kept in the count": (
        "audit.pairs",
        "np.abs(np.subtract(logs[:, None], logs_prime, out=scratch), out=scratch)",
        "np.subtract(logs[:, None], logs_prime, out=scratch)",
    ),
    "pairs: sign of log ratios kept in the largest": (
        "audit.pairs",
        "    np.abs(out, out=out)\n",
        "",
    ),
    "pairs: sign of other outputs kept in the largest": (
        "audit.pairs",
        "        np.abs(scratch, out=scratch)\n",
        "",
    ),
    "pairs: every ordered pair counts": (
        "audit.pairs",
        "kept_km[np.tril_indices(len(kept_km))] = broken_km[np.tril_indices(len(kept_km))] = math.inf",
        "np.fill_diagonal(kept_km, math.inf), np.fill_diagonal(broken_km, math.inf)",
    ),
    "pairs: hidden is what is not": (
        "audit.pairs",
        "(scratch <= kept_km + promise.tolerance)",
        "(scratch > kept_km + promise.tolerance)",
    ),
    "pairs: what breaks the promise ranks like the rest": (
        "audit.pairs",
        "return Triple(broken, ",
        "return Triple(False, ",
    ),
    "pairs: violations counted twice": (
        "audit.pairs",
        "tally.violations += count",
        "tally.violations += 2 * count",
    ),
    "pairs: sizes of violations lost": (
        "audit.pairs",
        "self.sizes[-1] += count",
        "self.sizes[-1] = count",
    ),
    "pairs: another output named": (
        "audit.pairs",
        "else slope, *records, output)",
        "else slope, *records, 0)",
    ),
    "pairs: another record named": (
        "audit.pairs",
        "records = int(self._first.records[i]), int(self._second.records[j])",
        "records = int(self._first.records[i]), int(self._second.records[j - 1])",
    ),
    "pairs: positions named for records": (
        "audit.pairs",
        "        records=records[order],\n",
        "        records=records,\n",
    ),
    "pairs: the last tile left out": (
        "audit.pairs",
        "for tile in range(len(self._first.tiles.starts) - 1):",
        "for tile in range(len(self._first.tiles.starts) - 2):",
    ),
    "pairs: neighbouring tiles left out": (
        "audit.pairs",
        "different = wanted[0] != wanted[1]",
        "different = wanted[0] + 1 < wanted[1]",
    ),
    "pairs: one pair of tiles left out": (
        "audit.pairs",
        "for position in range(len(some)):",
        "for position in range(1, len(some)):",
    ),
    "pairs: one portion of pairs of tiles left out": (
        "audit.pairs",
        "for start in range(0, len(order), _TILE_PAIRS):",
        "for start in range(_TILE_PAIRS, len(order), _TILE_PAIRS):",
    ),
    "pairs: outputs pruned the wrong way round": (
        "audit.pairs",
        "differences[position] > self._slope * apart[some[position]]",
        "differences[position] < self._slope * apart[some[position]]",
    ),
    "pairs: error subtracted from bounds of tiles": (
        "audit.pairs",
        "differences = largest_differences(*levels, a, b) + self._error",
        "differences = largest_differences(*levels, a, b) - self._error",
    ),
    "pairs: error subtracted before anything is counted": (
        "audit.pairs",
        "np.add(differences, self._error, out=scratch)",
        "np.subtract(differences, self._error, out=scratch)",
    ),
    "pairs: pruned by the steepest, even if it breaks ε": (
        "audit.pairs",
        "return min(self._promise.kept_per_km, max(self._known, self._tally.slope))",
        "return max(self._known, self._tally.slope)",
    ),
    "pairs: same place left out": (
        "audit.pairs",
        "            self._compare_duplicates(rows, columns, apart)\n",
        "",
    ),
    "pairs: same place counted for every ordered pair": (
        "audit.pairs",
        "np.tri(len(apart), k=-1, dtype=bool).T",
        "~np.eye(len(apart), dtype=bool)",
    ),
    "pairs: zeros are small numbers": ("audit.pairs", "wide[zero] = IMPOSSIBLE_LOG", "wide[zero] = -30.0"),
    # --- bounds of tiles ---
    "tiles: smallest and largest swapped": (
        "audit.tiles",
        "least = np.minimum.reduceat(values, starts[:-1])",
        "least = np.maximum.reduceat(values, starts[:-1])",
    ),
    "tiles: largest of a level is its smallest": (
        "audit.tiles",
        "np.maximum(level.most[::2], level.most[1::2])",
        "np.minimum(level.most[::2], level.most[1::2])",
    ),
    "tiles: boxes too small": (
        "audit.tiles",
        "np.minimum(level.low[::2], level.low[1::2])",
        "np.maximum(level.low[::2], level.low[1::2])",
    ),
    "tiles: farthest instead of nearest": (
        "audit.tiles",
        "np.maximum(first.low[a] - second.high[b], second.low[b] - first.high[a])",
        "np.maximum(first.high[a] - second.low[b], second.high[b] - first.low[a])",
    ),
    "tiles: differences one way only": (
        "audit.tiles",
        "return np.maximum(up, down, out=up)",
        "return up",
    ),
    "tiles: pruned the wrong way round": (
        "audit.tiles",
        ".max(axis=1) + errors[0] > reach",
        ".max(axis=1) + errors[0] < reach",
    ),
    "tiles: error subtracted": (
        "audit.tiles",
        ".max(axis=1) + errors[0] > reach",
        ".max(axis=1) - errors[0] > reach",
    ),
    "tiles: half of a set left out": (
        "audit.tiles",
        "a, b = np.concatenate([2 * a, 2 * a + 1]), np.concatenate([b, b])",
        "a, b = np.concatenate([2 * a, 2 * a]), np.concatenate([b, b])",
    ),
    "tiles: distances for p = inf are sums": (
        "audit.tiles",
        "return np.maximum(dx, dy, out=out)",
        "return np.add(dx, dy, out=out)",
    ),
    # --- parts ---
    "exhaustive: the next part left out": (
        "audit.exhaustive",
        "others = np.arange(position + 1, len(filled))",
        "others = np.arange(position + 2, len(filled))",
    ),
    "exhaustive: one portion of parts left out": (
        "audit.exhaustive",
        "for start in range(0, len(others), _PARTNERS)",
        "for start in range(_PARTNERS, len(others), _PARTNERS)",
    ),
    "exhaustive: parts pruned the wrong way round": (
        "audit.exhaustive",
        "wanted = differences > reach * apart",
        "wanted = differences < reach * apart",
    ),
    "exhaustive: error subtracted from bounds of parts": (
        "audit.exhaustive",
        ".max(axis=1) + error",
        ".max(axis=1) - error",
    ),
    "exhaustive: pruned by the steepest, even if it breaks ε": (
        "audit.exhaustive",
        "reach = min(promise.kept_per_km, slope)",
        "reach = slope",
    ),
    "exhaustive: parts compared with themselves again": (
        "audit.exhaustive",
        "others = np.arange(position + 1, len(filled))",
        "others = np.arange(position, len(filled))",
    ),
    "source: the last part left out": (
        "audit.source",
        "return len(self.starts) - 1",
        "return len(self.starts) - 2",
    ),
    "auditors: rows that cannot be used are left out": (
        "auditors",
        "violations = tally.violations + refused",
        "violations = tally.violations",
    ),
    "auditors: only pairs of rows that cannot be used count": (
        "auditors",
        "(exhaustive.pairs_of(source.records) - exhaustive.pairs_of(usable))",
        "exhaustive.pairs_of(source.records - usable)",
    ),
    "auditors: the least steep triple named": (
        "auditors",
        "worst = sorted(tally.worst, reverse=True)",
        "worst = sorted(tally.worst)",
    ),
    # --- the certificate ---
    "certificate: comparison reversed": (
        "audit.certificate",
        "violations += int((rank > limits[1]).sum())",
        "violations += int((rank < limits[1]).sum())",
    ),
    "certificate: limit not lowered by what rounding hides": (
        "audit.certificate",
        "raw_limit = rank_of_norm((limit - allowance)",
        "raw_limit = rank_of_norm((limit + allowance)",
    ),
    "certificate: near ties are violations": (
        "audit.certificate",
        "sure_limit = rank_of_norm((limit + allowance)",
        "sure_limit = rank_of_norm((limit - allowance)",
    ),
    "certificate: ε rounded inward": (
        "audit.certificate",
        "epsilon = norm * (1 + NORM_RELATIVE_ERROR) + allowance",
        "epsilon = norm * (1 - NORM_RELATIVE_ERROR) - allowance",
    ),
    "certificate: distances in metres": (
        "audit.certificate",
        "step_x, step_y = np.diff(x_km), np.diff(y_km)",
        "step_x, step_y = np.diff(x_km * 1000), np.diff(y_km * 1000)",
    ),
    "certificate: common logarithm": ("audit.certificate", "np.log(", "np.log10("),
    "certificate: normalisation left out": (
        "audit.certificate",
        "            row -= np.log(total, out=total)\n            row[impossible]",
        "            row[impossible]",
    ),
    "certificate: sign kept to the east": (
        "audit.certificate",
        "np.abs(np.subtract(logs[0], logs[1], out=east), out=east)",
        "np.subtract(logs[0], logs[1], out=east)",
    ),
    "certificate: sign kept to the north": (
        "audit.certificate",
        "np.abs(np.subtract(row[1:], row[:-1], out=between), out=between)",
        "np.subtract(row[1:], row[:-1], out=between)",
    ),
    "certificate: smaller of two sides": (
        "audit.certificate",
        "np.maximum(north[0], north[1], out=along_y)",
        "np.minimum(north[0], north[1], out=along_y)",
    ),
    "certificate: smaller side to the east": (
        "audit.certificate",
        "np.maximum(east[:-1], east[1:], out=along_x)",
        "np.minimum(east[:-1], east[1:], out=along_x)",
    ),
    "certificate: p instead of its dual": (
        "audit.certificate",
        "q = dual_exponent(metric_p)\n    outputs",
        "q = metric_p\n    outputs",
    ),
    "certificate: the first strip left out": (
        "audit.certificate",
        "for start in range(0, len(step_y), width):",
        "for start in range(width if width < len(step_y) else 0, len(step_y), width):",
    ),
    "certificate: violations counted twice": (
        "audit.certificate",
        "violations += strip.violations",
        "violations += 2 * strip.violations",
    ),
    "certificate: another cell named": (
        "audit.certificate",
        "Place(strip.place.i, strip.place.j + start, strip.place.output)",
        "Place(strip.place.i, strip.place.j, strip.place.output)",
    ),
    "certificate: another output named": (
        "audit.certificate",
        "largest, place = peak, Place(i, j, output)",
        "largest, place = peak, Place(i, j, 0)",
    ),
    "bands: no row in common": (
        "audit.bands",
        "yield slice(cells * band // bands, cells * (band + 1) // bands + 1)",
        "yield slice(cells * band // bands, max(cells * (band + 1) // bands, cells * band // bands + 2))",
    ),
    "bands: the last one left out": (
        "audit.bands",
        "for band in range(bands):",
        "for band in range(max(bands - 1, 1)):",
    ),
    "bands: cells of one band named in another": (
        "audit.bands",
        "Place(found.place.i + first, ",
        "Place(found.place.i, ",
    ),
    "auditors: the best band is the worst": (
        "auditors",
        "worst = max(found, key=lambda part: (part.epsilon, -part.block))",
        "worst = min(found, key=lambda part: (part.epsilon, -part.block))",
    ),
    "report: bound without ε": (
        "audit.report",
        "bound = promise.epsilon_per_km * distance",
        "bound = distance",
    ),
    "report: log ratio of rows that are not normalised": (
        "audit.report",
        "return probability_ratio(first, second, triple.output)",
        "return Fraction(ours) / Fraction(theirs)",
    ),
    # --- samples ---
    "sampled: distances in metres": (
        "audit.sampled",
        "apart = promise.apart_km(dx, dy)[:, None]",
        "apart = promise.apart_km(dx, dy)[:, None] * 1000",
    ),
    "sampled: sign of log ratios kept": (
        "audit.sampled",
        "    np.abs(differences, out=differences)\n",
        "",
    ),
    "sampled: rows that cannot be used are left out": (
        "audit.sampled",
        "    tally.violations += unusable * source.outputs\n",
        "",
    ),
    "sampled: shares divided by more than the outputs": (
        "audit.sampled",
        "tally.violations / (tally.pairs * outputs)",
        "tally.violations / (tally.pairs * (outputs + 1))",
    ),
    "sampled: another record named": (
        "audit.sampled",
        "int(batch.records[there[pair[position]]])",
        "int(batch.records[there[pair[position] - 1]])",
    ),
    "sampled: the least steep triple named": (
        "audit.sampled",
        "int(slopes.argmax())",
        "int(slopes.argmin())",
    ),
    "sampled: strata weigh alike": (
        "audit.sampled",
        "(mean, weight) for mean, weight in zip(means, weights.tolist(), strict=True)",
        "(mean, 1.0) for mean, weight in zip(means, weights.tolist(), strict=True)",
    ),
}

# Of what only stores go through.
STORE_MUTANTS: dict[str, tuple[str, str, str]] = {
    "source: a block of a store left out": (
        "audit.source",
        "return len(_pieces(self.url, self.token))\n",
        "return len(_pieces(self.url, self.token)) - 1\n",
    ),
    "source: x and y of a store swapped": (
        "audit.source",
        "return np.stack([x[i], y[j]], axis=-1)",
        "return np.stack([x[i], y[i]], axis=-1)",
    ),
    "certificate: no halo to the east of a block": (
        "audit.certificate",
        "rows_of(store, block.closed_x, block.closed_y)",
        "rows_of(store, block.closed_x, block.closed_y)[[*range(len(x) - 1), len(x) - 2]]",
    ),
    "certificate: no halo to the north of a block": (
        "audit.certificate",
        "rows_of(store, block.closed_x, block.closed_y)",
        "rows_of(store, block.closed_x, block.closed_y)[:, [*range(len(y) - 1), len(y) - 2]]",
    ),
    "certificate: normalisation of stores left out": (
        "audit.certificate",
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
            if name.startswith("mdpext_dask.") and name.split(".")[1] in _AUDITORS
        }

    parent: Any = sys.modules["mdpext_dask"]
    attributes = {name: importlib.import_module(f"mdpext_dask.{name}") for name in _AUDITORS}
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
        for name, value in attributes.items():
            setattr(parent, name, value)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store whose rows are overwritten."""
    return make_store(tmp_path_factory.mktemp("six"))


def test_the_auditors_pass(store: str) -> None:
    """Loaded anew from their own texts, as mutants are."""
    with loaded_anew("audit.pairs", text_of("audit.pairs")):
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
    before = sys.modules["mdpext_dask.audit.pairs"]
    with loaded_anew("audit.pairs", text_of("audit.pairs")):
        assert sys.modules["mdpext_dask.audit.pairs"] is not before
    assert sys.modules["mdpext_dask.audit.pairs"] is before
    assert importlib.import_module("mdpext_dask.auditors") is sys.modules["mdpext_dask.auditors"]
