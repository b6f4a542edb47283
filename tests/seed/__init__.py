"""Tests of ``mdpext_dask.seed``."""
