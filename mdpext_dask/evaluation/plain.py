"""What the plain thing loses beside a store: planar Laplace noise, reported at the nearest output."""

from typing import Any

from mdpext_dask.evaluation.baselines.noise import plain_laplace
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.words import NORMAL_95, metres, plain_advice
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import extension_of_store


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
    the store loses, relative to that (None if that is nothing), `plain_advice`, what to set in the job so
    that it does not lose more (None where it does not, or nothing helps), and `plain_in_words`.
    """
    plain_km, error_km = plain_laplace(Problem.of_store(store))
    half, over = NORMAL_95 * error_km, loss_km / plain_km - 1 if plain_km > 0 else None
    said = f"planar Laplace noise at the nearest output loses {metres(plain_km)} (± {metres(half)})"
    budget = store.attributes["job"]["privacy"]["budget"]
    advice = plain_advice(extension_of_store(store).method, budget, loss_km, plain_km, half)
    if over is not None:
        said += f"; this mechanism {abs(over):.1%} {'more' if over > 0 else 'less'}"
        said += "" if advice is None else f": {advice} loses less"
    return {
        "plain_loss_km": plain_km,
        "plain_standard_error_km": error_km,
        "over_plain": over,
        "plain_advice": advice,
        "plain_in_words": said,
    }
