"""Other mechanisms on the same problem: planar noise, exponential, linear programs, published ones.

A new baseline is a function from a ``Problem`` to a ``BaselineMechanism``, with its entry in
:mod:`mdpext_dask.reports.compare.methods`.
"""
