"""Tests of ``mdpext_dask.job``."""
