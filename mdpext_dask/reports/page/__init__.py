"""The report page: its contents as data, its texts, maps and the template.

A new chapter is a part of :mod:`~mdpext_dask.reports.page.contents` and of the template.
"""
