"""Attackers: what a report tells about the place.

A new measure is a pass over blocks like :mod:`~mdpext_dask.evaluation.attackers.tallies`, called by
:mod:`~mdpext_dask.evaluation.attackers.measure`.
"""
