"""Tests of ``mdpext_dask.problem``."""
