"""Certificate vectors: the certificate's own, with signs and places."""

import itertools
import math

import numpy as np
import pytest

from mdpext_dask.auditors.certificate import certify_source_cells
from mdpext_dask.auditors.certificate_vectors import CORNERS, steepest_slopes
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.seed.budget import dual_exponent, vector_norm
from tests.support.reference import softmax

SIDE = 0.3


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_vectors_are_those_of_the_certificate(p: float, factor: int) -> None:
    scores = np.log(softmax(np.random.default_rng(1).normal(size=(4, 3, 6))))
    fine = extend_log_convex(scores, factor)
    logs = np.log(fine.astype(float))
    logs -= np.log(fine.astype(float).sum(axis=-1, keepdims=True))
    slopes = steepest_slopes(fine, SIDE, factor, p)
    norms = certify_source_cells(fine, SIDE, factor, p)
    q = dual_exponent(p)

    def vectors_at(i: int, j: int, output: int, cell: tuple[int, int]) -> list[tuple[float, float]]:
        """All vectors at record (i, j) in the fine cells around it that belong to one source cell."""
        found = []
        for east, north in itertools.product((-1, 1), repeat=2):
            middle = i + east / 2, j + north / 2
            if all(c * factor < m < (c + 1) * factor for c, m in zip(cell, middle, strict=True)):
                across = (logs[i + east, j, output] - logs[i, j, output]) * east / SIDE
                along = (logs[i, j + north, output] - logs[i, j, output]) * north / SIDE
                found.append((across, along))
        return found

    for a, b, output in itertools.product(range(3), range(2), range(6)):
        for place, (east, north) in enumerate(CORNERS):
            (expected,) = vectors_at((a + east) * factor, (b + north) * factor, output, (a, b))
            assert slopes.vector[a, b, output, place] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        largest = slopes.vector[a, b, output, -1]
        assert vector_norm(*largest, q) == pytest.approx(norms[a, b, output], rel=1e-5)
        i, j = (int(n) + c * factor for n, c in zip(slopes.worst[a, b, output], (a, b), strict=True))
        around = vectors_at(i, j, output, (a, b))
        assert any(largest == pytest.approx(v, rel=1e-4, abs=1e-5) for v in around)
