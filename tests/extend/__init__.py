"""Tests of ``mdpext_dask.extend``."""
