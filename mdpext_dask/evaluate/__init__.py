"""Evaluation: what a finished mechanism costs its users.

``evaluate(STORE)`` is the one call: ``mdpext_dask.evaluate`` as a function. The parts are modules of this
package.
"""

from mdpext_dask.namesake import make_callable

make_callable(__name__, "mdpext_dask.evaluation")
