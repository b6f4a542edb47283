"""Certified lower bounds: no mechanism that keeps ε loses less.

A new bound competes in :func:`~mdpext_dask.evaluation.bound.lower_bound.lower_bound`.
"""
