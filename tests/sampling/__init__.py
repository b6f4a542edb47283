"""Tests of ``mdpext_dask.sampling``."""
