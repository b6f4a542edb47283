"""Attackers: what somebody who sees a report learns about the place.

A new measure is a pass over blocks like :mod:`~mdpext_dask.evaluation.attackers.tallies`, called by
:mod:`~mdpext_dask.evaluation.attackers.measure`.
"""
