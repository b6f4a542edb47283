"""Windows: programs that lower the loss of noise, a window of records at a time, as tasks.

What a window solves is :mod:`mdpext_dask.seed.window_program`; how windows lie, and that their rows are laid
over noise, :mod:`mdpext_dask.extend.windows`.
"""
