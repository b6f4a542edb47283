"""Comparison: many mechanisms on one problem, each in a process of its own, in one table.

A new method is an entry of :mod:`~mdpext_dask.reports.compare.methods`.
"""
