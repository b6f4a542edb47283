"""Cell programs: small programs for the records between seeds; ``README.md`` has the mathematics.

A change of what one patch solves goes into :mod:`~mdpext_dask.pipeline.cells.programs`, of the order of
patches into :mod:`~mdpext_dask.pipeline.cells.improve`.
"""
