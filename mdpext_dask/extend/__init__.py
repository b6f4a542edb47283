"""Extension operators, from the rows of corners to the rows of records, and the extension graph.

Imports seed budgets and the grid; nothing here reads or writes a store. A new operator is a subclass of
:class:`~mdpext_dask.extend.operator.Operator`, in a module of its own, named in
:mod:`~mdpext_dask.extend.choose`.
"""
