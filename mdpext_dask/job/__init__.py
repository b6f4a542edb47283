"""The job file: TOML to a frozen, validated job, with its fingerprint.

Every key is declared in :mod:`~mdpext_dask.job.sections`; what concerns several keys is checked in
:mod:`~mdpext_dask.job.spec`. Imports the top level only. A new key goes into its section, a check across
sections into ``spec``.
"""
