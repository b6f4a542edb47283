"""Local rows: near and far outputs, with nothing lost between them."""

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mdpext_dask.auditors.certificate import certify_cells
from mdpext_dask.auditors.directions import largest_steps, steps_of
from mdpext_dask.extend.local_rows import LocalRows

FLOOR = float(np.float32(1e-3))
SHAPES = st.tuples(st.integers(2, 4), st.integers(2, 4), st.integers(1, 7))
ROWS = SHAPES.flatmap(
    lambda shape: arrays.arrays(
        np.float32, shape, elements=st.sampled_from([FLOOR, FLOOR, FLOOR, 0.1, 0.25, 0.5])
    )
)


def with_a_near_output(rows: Any) -> Any:
    rows[..., 0] = np.where((rows == np.float32(FLOOR)).all(axis=-1), np.float32(0.3), rows[..., 0])
    return rows


@given(ROWS)
def test_dense_rows_are_what_was_read(rows: Any) -> None:
    rows = with_a_near_output(rows)
    local = LocalRows.of(rows, FLOOR)
    assert np.array_equal(local.dense(), rows)
    assert local.total_outputs == rows.shape[-1] == local.counts.sum()
    near = (rows != np.float32(FLOOR)).any(axis=(0, 1))
    if local.copies > 1:
        assert list(local.outputs[:-1]) == list(np.flatnonzero(near))
        assert local.copies == np.count_nonzero(~near)
    assert np.array_equal(local.entries[..., local.columns_of(np.arange(rows.shape[-1]))], rows)


@given(ROWS)
def test_without_a_floor_all_are_near(rows: Any) -> None:
    local = LocalRows.of(rows, None)
    assert local.entries is rows
    assert np.shares_memory(local.dense(), rows) or not rows.size


@given(ROWS, st.data())
def test_outputs_that_were_not_read_are_far(rows: Any, data: Any) -> None:
    rows = with_a_near_output(rows)
    near = (rows != np.float32(FLOOR)).any(axis=(0, 1))
    more = data.draw(arrays.arrays(np.bool_, near.shape))
    read = np.flatnonzero(near | more)
    local, whole = LocalRows.of(rows[..., read], FLOOR, read, rows.shape[-1]), LocalRows.of(rows, FLOOR)
    assert np.array_equal(local.entries, whole.entries)
    assert (list(local.outputs), local.copies) == (list(whole.outputs), whole.copies)


def test_rows_of_nothing_but_the_floor_are_lost() -> None:
    rows = np.full((2, 2, 5), FLOOR, dtype=np.float32)
    rows[0, 0, 1] = 0.5
    local = LocalRows.of(rows, FLOOR)
    assert np.array_equal(np.isnan(local.dense()).all(axis=-1), [[False, True], [True, True]])
    assert np.array_equal(local.dense()[0, 0], rows[0, 0])


@given(ROWS, st.sampled_from([1.0, 1.5, 2.0, math.inf]), st.floats(1.0, 8.0))
def test_certificates_are_those_of_all_outputs(rows: Any, p: float, limit: float) -> None:
    rows = with_a_near_output(rows)
    local = LocalRows.of(rows, FLOOR)
    x_km, y_km = np.arange(rows.shape[0]) * 0.5, np.arange(rows.shape[1]) * 0.75
    whole = certify_cells(rows, x_km, y_km, p, limit)
    found = certify_cells(local.entries, x_km, y_km, p, limit, copies=local.copies)
    assert math.isclose(found.epsilon, whole.epsilon, rel_tol=1e-12)
    assert found.violations == whole.violations
    steps, every = steps_of(3, rows.shape[:2]), (slice(0, rows.shape[0]), slice(0, rows.shape[1]))
    expected = largest_steps(rows, every, steps, np.arange(rows.shape[2]))
    columns = largest_steps(local.entries, every, steps, np.arange(len(local.outputs)), local.copies)
    of_output = columns[:, local.columns_of(np.arange(rows.shape[2]))]
    assert np.allclose(of_output, expected, rtol=0, atol=1e-11)
