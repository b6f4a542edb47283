"""The seed linear program: privacy budgets, the program as data, and its solvers.

Imports the problem's grid. A new solver takes a :class:`~mdpext_dask.seed.model.SeedProblem`, answers with a
:class:`~mdpext_dask.seed.model.SeedMechanism`, and is chosen in :mod:`~mdpext_dask.seed.solve`.
"""
