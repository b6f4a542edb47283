"""Tests of ``mdpext_dask.reports``."""
