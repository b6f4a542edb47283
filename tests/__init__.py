"""Tests of mdpext_dask."""
