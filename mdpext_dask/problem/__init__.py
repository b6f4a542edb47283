"""What is to be solved: grid, projection, region, outputs, prior and loss, joined in a ``Domain``.

Imports the readers and the job; no store and no solver. A new choice of outputs goes into
:mod:`~mdpext_dask.problem.outputs`, a new prior into :mod:`~mdpext_dask.problem.domain`, a new loss into
:mod:`~mdpext_dask.problem.loss`.
"""
