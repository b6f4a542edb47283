"""Tests of ``mdpext_dask.compute``."""
