"""The mechanism store: layout, blocks, receipts, integrity, locks and remote storage.

Imports the problem, the seed and the operators (a skipped block is extended again when it is needed). The
only room that reads and writes Zarr stores. A new array is declared in :mod:`~mdpext_dask.store.schema`; a
new kind of remote storage goes into :mod:`~mdpext_dask.store.remote_drivers`.
"""
