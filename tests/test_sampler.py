"""The sampler: exactly the stored probabilities, nothing else."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mdpext_dask import sampler
from mdpext_dask.errors import GuaranteeViolation
from mdpext_dask.sampler import integer_weights, sample_outputs, sample_row, uniform_below

stored = st.floats(2.0**-36, 1.0, width=32)


@given(st.lists(stored, min_size=1, max_size=50).filter(lambda row: sum(row) <= 2))
def test_weights_are_the_stored_bytes_exactly(row: list[float]) -> None:
    values = np.array([row], dtype=np.float32)
    weights = integer_weights(values)[0]
    assert [int(w) for w in weights] == [Fraction(float(v)) * 2**60 for v in values[0]]


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, 1.6, 2.0**-37])
def test_damaged_rows_are_refused(value: float) -> None:
    with pytest.raises(GuaranteeViolation, match="damaged"):
        sample_outputs(np.array([[0.5, value]], dtype=np.float32))


def test_every_draw_below_the_total_maps_to_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """All integers below the total of a tiny row: each output gets exactly its weight of them."""
    monkeypatch.setattr(sampler, "_WEIGHT_UNIT", 16.0)
    row = np.array([[0.25, 0.5, 0.0625]], dtype=np.float32)  # weights 4, 8, 1
    counts = np.zeros(3, dtype=int)
    for draw in range(13):
        monkeypatch.setattr(sampler, "uniform_below", lambda _, d=draw: np.array([d], np.uint64))
        counts[sample_outputs(row)[0]] += 1
        assert sample_row(row[0], 1) == sample_outputs(row)
    assert counts.tolist() == [4, 8, 1]


def test_rejection_leaves_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 3/4 of the range, draws from the incomplete copy are thrown away."""
    limit = 3 * 2**62
    draws = iter([2**62 - 1, 2**62, 5, 2**64 - 1])

    def urandom(count: int) -> bytes:
        return b"".join(next(draws).to_bytes(8, "little") for _ in range(count // 8))

    monkeypatch.setattr(sampler.os, "urandom", urandom)
    # 2^64 mod limit = 2^62: the first and third draw are rejected, the others kept.
    first = uniform_below(np.array([limit], dtype=np.uint64))
    second = uniform_below(np.array([limit], dtype=np.uint64))
    assert first.tolist() == [2**62]
    assert second.tolist() == [(2**64 - 1) % limit]


def test_uniform_below_stays_below_and_reaches_everything() -> None:
    limits = np.repeat(np.arange(1, 6, dtype=np.uint64), 400)
    draws = uniform_below(limits)
    assert (draws < limits).all()
    for limit in range(1, 6):
        assert set(draws[limits == limit].tolist()) == set(range(limit))


def test_frequencies_pass_on_the_right_distribution_and_fail_on_a_wrong_one() -> None:
    """Chi-square at a false-alarm rate of 1e-6; a distribution that is 3 % off is told apart."""
    row = np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)
    draws = 400_000
    counts = np.bincount(sample_outputs(np.broadcast_to(row, (draws, 4))), minlength=4)
    right = row.astype(float) / row.astype(float).sum()
    wrong = right * [1.03, 0.97, 1.0, 1.0]
    wrong /= wrong.sum()
    assert stats.chisquare(counts, right * draws).pvalue > 1e-6
    assert stats.chisquare(counts, wrong * draws).pvalue < 1e-6
