"""Jobs handed to a cluster: the files it needs, how it is asked to run them, and how the job is followed.

``slurm`` and ``kubernetes`` each offer one function::

    submit(
        spec: JobSpec,
        store_url: str,     # absolute
        folder: Path,       # absolute; the files are written there
        *,
        dry_run: bool,      # write the files, submit nothing; works where there is no such cluster
        array: bool,        # independent tasks on blocks, without Dask
        detach: bool,       # return once the job is submitted
        observer: Observer,
    ) -> dict[str, Any]

which returns the document that ``mdpext submit --json`` prints: ``to``, ``store``, ``folder``, ``files``,
``commands`` (what is run to submit, quoted for a shell), ``jobs`` (their ids), ``state`` (``"written"``,
``"submitted"`` or ``"done"``). A followed job that does not end well is an error, with the exit code of
``run``.
"""
