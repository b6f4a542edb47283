"""Tests of ``mdpext_dask.cli``."""
