"""Tests of ``mdpext_dask.auditors``."""
