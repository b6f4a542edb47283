"""The certificate: never below the truth over all pairs, close to it, and deaf to nothing."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.auditors import certificate
from mdpext_dask.extend.log_convex import extend_log_convex
from mdpext_dask.seed.budget import dual_exponent, vector_norm
from tests.support.reference import audited_epsilon, random_mechanism, softmax

EXPONENTS = (1.0, 1.0001, 1.5, 2.0, 4.0, math.inf)


@pytest.mark.parametrize("p", EXPONENTS)
@given(
    shape=st.tuples(st.integers(2, 6), st.integers(2, 6)), outputs=st.integers(1, 5),
    roughness=st.floats(1e-3, 3), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_every_pair(p: float, shape: tuple[int, int], outputs: int, roughness: float, seed: int) -> None:
    """Brute force over all pairs never exceeds it, on any rectangular lattice, even an uneven one."""
    rng = np.random.default_rng(seed)
    x, y = (np.cumsum(rng.uniform(0.05, 2, size=n)) for n in shape)
    probability = random_mechanism(rng, shape, outputs, roughness)
    epsilon, place, _, _ = certificate.certify_cells(probability, x, y, p)
    assert audited_epsilon(probability, x, y, p) <= epsilon
    assert 0 <= place.i < shape[0] - 1
    assert 0 <= place.j < shape[1] - 1


@pytest.mark.parametrize("p", EXPONENTS)
def test_it_is_tight_on_smooth_mechanisms(p: float) -> None:
    probability = extend_log_convex(np.log(softmax(np.random.default_rng(4).normal(size=(2, 2, 4)))), 16)
    x = y = np.arange(17) / 16
    epsilon, _, _, _ = certificate.certify_cells(probability, x, y, p)
    assert audited_epsilon(probability, x, y, p) <= epsilon
    # Along one axis alone the two agree; in general the certificate pays for the worst corner.
    assert epsilon <= audited_epsilon(probability, x, y, p) * 1.1


@pytest.mark.parametrize(("p", "expected"), [(1.0, 2.0), (2.0, math.sqrt(5)), (math.inf, 3.0)])
def test_a_plane_by_hand(p: float, expected: float) -> None:
    """Scores that rise by 1/km east and 2/km north: the dual norm of (1, 2), from a single cell on."""
    x = y = np.linspace(0, 0.5, 6)
    rise = (1.0 * x[:, None] + 2.0 * y[None, :])[:, :, None]
    # Two outputs that differ in little but this keep the normaliser from moving: it is divided out.
    weight = np.concatenate([1e-4 * np.exp(rise), np.ones((6, 6, 1))], axis=-1)
    probability = (weight / weight.sum(axis=-1, keepdims=True)).astype(np.float32)
    epsilon, place, _, _ = certificate.certify_cells(probability, x, y, p)
    assert epsilon == pytest.approx(expected, rel=2e-3)
    assert place.output == 0


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf, 2.5, 2.0**-40])
def test_what_is_no_probability_is_infinite(value: float) -> None:
    probability = np.full((4, 4, 2), 0.5, dtype=np.float32)
    probability[3, 1, 1] = value
    x = y = np.arange(4.0)
    epsilon, place, violations, _ = certificate.certify_cells(probability, x, y, 2.0)
    assert epsilon == math.inf
    assert place == certificate.Place(2, 1, 1)
    assert violations == 1


def test_a_row_that_the_sampler_s_integers_cannot_add_up_is_infinite() -> None:
    """Constant rows of ones have no log ratio at all, but 20 of them overflow 64-bit weights."""
    probability = np.ones((3, 3, 20), dtype=np.float32)
    epsilon, _, violations, _ = certificate.certify_cells(probability, np.arange(3.0), np.arange(3.0), 2.0)
    assert epsilon == math.inf
    assert violations > 0


@pytest.mark.parametrize("axis", [[0.0, 1.0, 1.0], [0.0, 2.0, 1.0], [0.0, math.nan, 1.0]])
def test_broken_coordinates_are_infinite(axis: list[float]) -> None:
    probability = np.full((3, 3, 2), 0.5, dtype=np.float32)
    good = np.arange(3.0)
    assert certificate.certify_cells(probability, np.array(axis), good, 2.0)[0] == math.inf
    assert certificate.certify_cells(probability, good, np.array(axis), 2.0)[0] == math.inf


def test_constant_mechanisms_reveal_nothing_but_rounding() -> None:
    probability = np.full((3, 3, 4), 0.25, dtype=np.float32)
    epsilon, _, _, _ = certificate.certify_cells(probability, np.arange(3.0), np.arange(3.0), 2.0)
    assert 0 < epsilon < 1e-11


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_vectors_are_those_of_the_certificate(p: float, factor: int) -> None:
    """With signs and places."""
    side = 0.3
    fine = extend_log_convex(np.log(softmax(np.random.default_rng(1).normal(size=(4, 3, 6)))), factor)
    logs = np.log(fine.astype(float))
    logs -= np.log(fine.astype(float).sum(axis=-1, keepdims=True))
    slopes = certificate.steepest_slopes(fine, side, factor, p)
    norms = certificate.certify_source_cells(fine, side, factor, p)
    q = dual_exponent(p)

    def vectors_at(i: int, j: int, output: int, cell: tuple[int, int]) -> list[tuple[float, float]]:
        """All vectors at record (i, j) in the fine cells around it that belong to one source cell."""
        found = []
        for east, north in itertools.product((-1, 1), repeat=2):
            middle = i + east / 2, j + north / 2
            if all(c * factor < m < (c + 1) * factor for c, m in zip(cell, middle, strict=True)):
                across = (logs[i + east, j, output] - logs[i, j, output]) * east / side
                found.append((across, (logs[i, j + north, output] - logs[i, j, output]) * north / side))
        return found

    for a, b, output in itertools.product(range(3), range(2), range(6)):
        for place, (east, north) in enumerate(certificate.CORNERS):
            (expected,) = vectors_at((a + east) * factor, (b + north) * factor, output, (a, b))
            assert slopes.vector[a, b, output, place] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        largest = slopes.vector[a, b, output, -1]
        assert vector_norm(*largest, q) == pytest.approx(norms[a, b, output], rel=1e-5)
        i, j = (int(n) + c * factor for n, c in zip(slopes.worst[a, b, output], (a, b), strict=True))
        around = vectors_at(i, j, output, (a, b))
        assert any(largest == pytest.approx(v, rel=1e-4, abs=1e-5) for v in around)
