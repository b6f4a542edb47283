"""What a run does, stage by stage, from a job to a finished store; and what it will take.

:mod:`~mdpext_dask.pipeline.run` is the sequence of stages. Imports every room above; nothing above imports
it. A new stage is a function of store, executor and stages, called in ``run``.
"""
