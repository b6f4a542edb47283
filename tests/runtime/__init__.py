"""Tests of ``mdpext_dask.runtime``."""
