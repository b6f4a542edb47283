"""Finished stores in use: open, sample rows, report whole files, remap, export.

Draws themselves are made in :mod:`mdpext_dask.runtime`; here they get their rows from a store. A new way to
use a finished store goes into a module of its own.
"""
