"""The command line: thin commands, progress displays, and jobs handed to clusters.

Imports every room, each inside the command that needs it, so that ``mdpext --help`` answers at once. A new
command goes into :mod:`~mdpext_dask.cli.build_commands` or :mod:`~mdpext_dask.cli.use_commands`.
"""
