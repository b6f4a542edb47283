"""Auditors that look at pairs of records: every pair, or a sample of them.

:mod:`~mdpext_dask.auditors.pairs.judge` decides a pair; the others choose pairs and count. A new design of
samples goes beside :mod:`~mdpext_dask.auditors.pairs.designs`.
"""
