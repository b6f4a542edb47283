"""Windows lie apart, cover all records in the end, and are laid over rows as they say."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.extend.local_rows import LocalRows
from mdpext_dask.extend.windows import WindowRows, Windows, laid_over

SIZES = st.integers(1, 40)
ANY = st.builds(Windows, st.tuples(SIZES, SIZES), st.integers(5, 12), st.integers(1, 4), st.just(4))


def records(x: slice, y: slice) -> set[tuple[int, int]]:
    return set(itertools.product(range(x.start, x.stop), range(y.start, y.stop)))


@given(ANY)
def test_no_step_goes_from_one_window_of_a_turn_to_another(windows: Windows) -> None:
    for turn in range(windows.turns):
        for one, other in itertools.combinations(windows.of(turn), 2):
            apart = [
                max(b.start - (a.stop - 1), a.start - (b.stop - 1)) for a, b in zip(one, other, strict=True)
            ]
            assert max(apart) > windows.gap


@given(ANY)
def test_every_record_is_in_some_window(windows: Windows) -> None:
    found = set().union(*(records(*window) for turn in range(windows.turns) for window in windows.of(turn)))
    assert found == records(*(slice(0, side) for side in windows.shape))


@given(ANY, st.data())
def test_windows_that_touch_a_rectangle_are_those_with_records_in_it(
    windows: Windows, data: st.DataObject
) -> None:
    x, y = (
        slice(first := data.draw(st.integers(0, side - 1)), data.draw(st.integers(first + 1, side)))
        for side in windows.shape
    )
    for turn in range(windows.turns):
        expected = [
            (number, *window)
            for number, window in enumerate(windows.of(turn))
            if records(*window) & records(x, y)
        ]
        assert list(windows.touching(turn, x, y)) == expected


@given(st.integers(0, 2**32 - 1))
def test_the_last_window_counts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    total, x, y = 12, slice(3, 9), slice(2, 7)
    near = np.sort(rng.choice(total, rng.integers(0, 13), replace=False))
    rows = LocalRows.floor((6, 5), near, 0.01, total)
    rows.entries[..., : len(rows.near)] = rng.random((6, 5, len(rows.near)))
    expected = rows.dense().copy()
    windows = []
    for _ in range(rng.integers(0, 4)):
        first, last = np.sort(rng.integers(0, 12, (2, 2)), axis=0)
        across, along = (slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True))
        if not records(across, along) & records(x, y):
            continue
        outputs = np.sort(rng.choice(total, rng.integers(0, 6), replace=False))
        made = rng.random((across.stop - across.start, along.stop - along.start, len(outputs)))
        windows.append(WindowRows(across, along, outputs, made.astype(np.float32)))
        for i, j in records(across, along) & records(x, y):
            expected[i - 3, j - 2, outputs] = windows[-1].rows[i - across.start, j - along.start]
    assert np.array_equal(laid_over(rows, x, y, windows).dense(), expected)


def test_what_is_stored_is_read_again_or_refused() -> None:
    x, y, rows = slice(0, 2), slice(4, 7), np.full((2, 3, 2), 0.5, dtype=np.float32)
    window = WindowRows(x, y, np.array([1, 4]), rows)
    again = WindowRows.unpacked(x, y, window.packed(), 5)
    assert np.array_equal(again.rows, rows)
    assert np.array_equal(again.outputs, window.outputs)
    none = replace(window, outputs=window.outputs[:0], rows=rows[..., :0])
    assert WindowRows.unpacked(x, y, none.packed(), 5).rows.shape == (2, 3, 0)
    packed = window.packed()
    wrong = [packed.astype(np.float64), packed[1:], packed[:, ::-1], -packed, packed * np.float32(np.nan)]
    for damaged in [*wrong, np.vstack([[0, 5], packed[1:]]).astype(np.float32)]:
        with pytest.raises(ValueError, match=r"window|damaged"):
            WindowRows.unpacked(x, y, damaged, 5)
