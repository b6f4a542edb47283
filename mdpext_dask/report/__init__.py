"""The report on a store: one HTML file that needs nothing else.

``report(STORE)`` is the one call: ``mdpext_dask.report`` as a function. The parts are modules of this
package.
"""

from mdpext_dask.namesake import make_callable

make_callable(__name__, "mdpext_dask.reporting")
