"""Tests of ``mdpext_dask.store``."""
