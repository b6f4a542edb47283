"""What the plain thing loses beside a store: planar Laplace noise, reported at the nearest output."""

from typing import Any

from mdpext_dask.evaluation.baselines.noise import plain_laplace
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.job.sections import NOISE
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import is_noise

# Of a normal distribution: two-sided, 95 %.
_NORMAL_95 = 1.96


def plain_facts(store: MechanismStore, loss_km: float) -> dict[str, Any]:
    """Return what the plain thing loses with the outputs, the prior and the ε of a store, as plain JSON.

    Parameters
    ----------
    store
        The store.
    loss_km
        Its own loss, in km.

    Returns
    -------
    What :func:`~mdpext_dask.evaluation.baselines.noise.plain_laplace` returns, `over_plain`, how much more
    the store loses, relative to that (None if that is nothing), and `plain_in_words`.
    """
    plain_km, error_km = plain_laplace(Problem.of_store(store))
    half, over = _NORMAL_95 * error_km, loss_km / plain_km - 1 if plain_km > 0 else None
    said = f"planar Laplace noise at the nearest output loses {plain_km:.4g} km (± {half:.1g})"
    if over is not None:
        said += f"; this mechanism {abs(over):.1%} {'more' if over > 0 else 'less'}"
        if loss_km - plain_km > half and not is_noise(store.seed_attributes):
            said += f': extension.method = "{NOISE}" loses less'
    return {
        "plain_loss_km": plain_km,
        "plain_standard_error_km": error_km,
        "over_plain": over,
        "plain_in_words": said,
    }
