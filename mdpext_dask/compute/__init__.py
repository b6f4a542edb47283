"""Where work runs: in this process, local processes, a scheduler, Slurm or Kubernetes.

The only room that imports Dask. It runs plain functions of a store URL and a block index and knows nothing of
what they do. A new kind of cluster is opened in :mod:`~mdpext_dask.compute.workers` and chosen in
:mod:`~mdpext_dask.compute.executor`.
"""
