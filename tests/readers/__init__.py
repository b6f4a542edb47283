"""Tests of ``mdpext_dask.readers``."""
