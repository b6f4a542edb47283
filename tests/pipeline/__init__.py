"""Tests of ``mdpext_dask.pipeline``."""
