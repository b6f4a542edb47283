"""Other people's files: points, polygons, vector layers, CSV tables and road networks.

Readers turn bytes into arrays and name file, line and column where they cannot; they know nothing of grids.
They import :mod:`~mdpext_dask.job` and the top level. A new format goes beside the formats of its kind, into
a module of its own; its library is an extra, imported on first use.
"""
