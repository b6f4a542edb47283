"""Pages, plots and comparisons for people.

:func:`~mdpext_dask.reports.report.report` writes the report page from :mod:`~mdpext_dask.reports.page`;
:mod:`~mdpext_dask.reports.plots` draws into the caller's axes; :mod:`~mdpext_dask.reports.compare` runs many
mechanisms on one problem. Imports every room above but no command line. A new figure goes into ``plots``.
"""
