"""What a mechanism costs its users, how far it is from the best, and what attackers learn.

Expected loss here; lower bounds in :mod:`~mdpext_dask.evaluation.bound`, attackers in
:mod:`~mdpext_dask.evaluation.attackers`, other mechanisms in :mod:`~mdpext_dask.evaluation.baselines`.
Imports the store and ``compute``. A new figure of merit is a sum over blocks beside
:mod:`~mdpext_dask.evaluation.loss`.
"""
