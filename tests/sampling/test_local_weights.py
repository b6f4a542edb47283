"""Drawing from local rows: every number picks what it picks from the whole row."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mdpext_dask.errors import GuaranteeViolation
from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.runtime.integer_sampling import cumulative_weights, pick
from mdpext_dask.sampling.local_weights import LocalWeights

FLOOR = float(np.float32(1e-3))
ROWS = st.tuples(st.integers(1, 5), st.integers(1, 9)).flatmap(
    lambda shape: arrays.arrays(
        np.float32, (shape[0], 1, shape[1]), elements=st.sampled_from([FLOOR, FLOOR, FLOOR, 2e-3, 0.03, 0.2])
    )
)


def numbers_of(whole: Any, fractions: list[float]) -> Any:
    """Return numbers around every weight's end, and some between, below the total."""
    total = int(whole[-1])
    found = {0, total - 1, *(int(fraction * (total - 1)) for fraction in fractions)}
    found |= {int(end) + step for end in whole[:-1] for step in (-1, 0, 1)}
    return np.array(sorted(number for number in found if number < total), dtype=np.uint64)


@given(ROWS, st.lists(st.floats(0, 1), max_size=20), st.booleans())
def test_every_number_picks_what_it_picks_from_the_whole_row(
    rows: Any, fractions: list[float], local: bool
) -> None:
    rows[..., 0] = np.where((rows == np.float32(FLOOR)).all(axis=-1), np.float32(0.3), rows[..., 0])
    weights = LocalWeights.of(LocalRows.of(rows, FLOOR if local else None))
    for row, whole in enumerate(cumulative_weights(rows[:, 0])):
        assert weights.cumulative[row, -1] == whole[-1]
        below = numbers_of(whole, fractions)
        drawn = weights.pick(np.full(len(below), row), below)
        assert np.array_equal(drawn, pick(whole, below))


@pytest.mark.parametrize("damage", [np.nan, 1e-12, 0.9, 2.5])
def test_damaged_rows_are_refused(damage: float) -> None:
    """Far outputs count as often as there are, and not once."""
    rows = np.full((1, 1, 40_000), FLOOR if damage == 0.9 else np.float32(1e-6), dtype=np.float32)
    rows[0, 0, 7] = damage
    with pytest.raises(GuaranteeViolation, match="damaged"):
        LocalWeights.of(LocalRows.of(rows, float(rows[0, 0, 0])))
