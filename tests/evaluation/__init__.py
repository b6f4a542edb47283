"""Tests of ``mdpext_dask.evaluation``."""
