"""Auditors that look at pairs of records: every pair, or a sample of them.

:func:`~mdpext_dask.auditors.promise.judge` decides a pair; the modules here choose pairs and count. A new
design of samples goes beside :mod:`~mdpext_dask.auditors.pairs.designs`.
"""
