"""Auditors: proofs, counts and estimates of whether a mechanism keeps its promise.

:func:`~mdpext_dask.auditors.audit.audit` is the one call; the certificate over all pairs is here, methods
that look at pairs are in :mod:`~mdpext_dask.auditors.pairs`, readers of mechanisms made elsewhere in
:mod:`~mdpext_dask.auditors.foreign`. Imports the store, exported cities and ``compute``,
never what made the mechanism. A new method goes into :mod:`~mdpext_dask.auditors.methods`. ``PROOF.md`` in
this folder proves what is certified.
"""
