"""Mechanisms of other people, from NumPy, Zarr, CSV and Parquet files.

A new format writes its rows through ``row_files.RowWriter`` and is named in
:mod:`~mdpext_dask.auditors.foreign.read`.
"""
