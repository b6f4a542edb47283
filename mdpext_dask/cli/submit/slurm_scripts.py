"""The text of batch scripts for Slurm; ``deploy/slurm`` has those of the demo.

They are submitted in their folder, which has the job file and Dask's settings. Submitted again, or queued
again by Slurm, each goes on where its store is.
"""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from mdpext_dask.cli.submit.files import DASK_FILE, JOB_FILE
from mdpext_dask.compute.workers import slurm_time
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec

# In the folder. Without a path: that may hold what an address may not.
SCHEDULER_FILE = "scheduler.json"
# The seed and the certificate of an array job run in processes of one node: with the client, on no more
# processors than most nodes have.
_ONE_NODE = 7
# Parts of an array for each that runs at once, so that none waits long for the slowest.
_PARTS = 4
_MIB_PER_GIB = 1024


@dataclass(frozen=True)
class Setting:
    """What scripts need to know.

    Parameters
    ----------
    spec
        The job.
    store
        Address of its store, absolute.
    python
        The interpreter that has this package, by its absolute path.
    """

    spec: JobSpec
    store: str
    python: Path

    @property
    def cluster(self) -> ClusterSection:
        """Section of the job."""
        return self.spec.cluster

    def on_one_node(self) -> int:
        """Return how many local processes parts of an array job have that are no array."""
        return min(self.cluster.workers, _ONE_NODE)


def run_cluster() -> ClusterSection:
    """Return what the job's section is inside the one job."""
    return ClusterSection(kind="address", address=SCHEDULER_FILE)


def array_cluster(setting: Setting) -> ClusterSection:
    """Return what the job's section is for the parts of an array job that are no array."""
    memory = setting.cluster.memory_gib
    return ClusterSection(kind="local", workers=setting.on_one_node(), memory_gib=memory)


def run_scripts(setting: Setting) -> dict[str, str]:
    """Return the script that does all in one job, by name.

    Scheduler and client have one processor together; they wait most of the time.
    """
    workers, memory = setting.cluster.workers, setting.cluster.memory_gib
    limit = "auto" if memory is None else f"{memory:g}GiB"
    text = f"""\
{_head(setting, "run", "%j", [f"--ntasks={workers + 1}", "--cpus-per-task=1"])}
# Nobody else needs to reach workers on one node. Between nodes they listen on the interface that
# MDPEXT_INTERFACE names, as in ib0, or else on the one by which this node reaches others.
listen=()
if [ "${{SLURM_JOB_NUM_NODES:-1}}" -eq 1 ]; then
  listen=(--host 127.0.0.1)
elif [ -n "${{MDPEXT_INTERFACE:-}}" ]; then
  listen=(--interface "$MDPEXT_INTERFACE")
fi
# Workers end with their scheduler.
end() {{
  kill "$scheduler"
  timeout 20 tail --pid="$workers" -f /dev/null || kill "$workers"
  wait
}} 2>/dev/null
trap end EXIT

# An earlier attempt may have left its own.
rm -f {SCHEDULER_FILE}
"$python" -m dask scheduler "${{listen[@]}}" --port 0 --dashboard-address 127.0.0.1:0 \\
  --scheduler-file {SCHEDULER_FILE} &
scheduler=$!
while [ ! -s {SCHEDULER_FILE} ] && kill -0 "$scheduler" 2>/dev/null; do sleep 0.2; done

srun --ntasks={workers} --cpus-per-task=1 --kill-on-bad-exit=0 --input=none --mpi=none \\
  --output=run-%j-workers.out --open-mode=append \\
  "$python" -m dask worker --scheduler-file {SCHEDULER_FILE} "${{listen[@]}}" --nthreads 1 \\
  --memory-limit {limit} --no-dashboard --death-timeout 60 &
workers=$!

"$python" -m mdpext_dask.cli run {JOB_FILE} --store "$store" --progress plain &
client=$!
wait -n "$scheduler" "$workers" "$client"
if kill -0 "$client" 2>/dev/null; then
  # Once it has seen that for itself, or is told.
  timeout 30 tail --pid="$client" -f /dev/null || kill "$client"
fi
wait "$client"
code=$?
if [ "$code" -gt 128 ]; then
  echo "error: scheduler, workers or client were killed; what is done is kept, submit again" >&2
  code=3
fi
exit "$code"
"""
    return {"run.sbatch": text}


def array_scripts(setting: Setting, blocks: int, most: int) -> dict[str, str]:
    """Return the scripts that work without Dask, by name, in the order in which each needs the one before.

    Parameters
    ----------
    setting
        The job.
    blocks
        How many there are to extend.
    most
        How many tasks an array may have.
    """
    at_once = setting.cluster.workers
    tasks = min(blocks, _PARTS * at_once, most)
    node = ["--ntasks=1", f"--cpus-per-task={setting.on_one_node() + 1}"]
    one = [f"--array=0-{tasks - 1}%{at_once}", "--ntasks=1", "--cpus-per-task=1"]
    return {
        "init.sbatch": f"""\
{_head(setting, "init", "%j", node)}
exec "$python" -m mdpext_dask.cli init {JOB_FILE} --store "$store" --progress plain
""",
        "partition.sbatch": f"""\
{_head(setting, "partition", "%A_%a", one)}
# Each task extends its share of the {blocks} blocks; those that are done are left as they are.
first=$((SLURM_ARRAY_TASK_ID * {blocks} / {tasks}))
last=$(((SLURM_ARRAY_TASK_ID + 1) * {blocks} / {tasks}))
exec "$python" -m mdpext_dask.cli partition "$store" --range "$first:$last" --progress plain
""",
        "finalise.sbatch": f"""\
{_head(setting, "finalise", "%j", node)}
# What `mdpext finalise` does, here, whatever workers the store was begun with; and any block that is damaged.
exec "$python" -m mdpext_dask.cli run {JOB_FILE} --store "$store" --progress plain
""",
    }


def _head(setting: Setting, part: str, number: str, resources: list[str]) -> str:
    cluster, name = setting.cluster, setting.spec.job.name
    directives = [f"--job-name={name}-{part}", *resources]
    if cluster.memory_gib is not None:
        directives.append(f"--mem-per-cpu={math.ceil(cluster.memory_gib * _MIB_PER_GIB)}M")
    directives.append(f"--time={slurm_time(cluster.walltime_hours)}")
    if cluster.queue is not None:
        directives.append(f"--partition={cluster.queue}")
    if cluster.account is not None:
        directives.append(f"--account={cluster.account}")
    # A job that Slurm queues again, after a node has failed, writes on in the same file.
    directives += [f"--output={part}-{number}.out", "--open-mode=append", "--requeue", *cluster.options]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {directive}" for directive in directives),
            f"python={shlex.quote(str(setting.python))}",
            f"store={shlex.quote(setting.store)}",
            f'export DASK_CONFIG="${{DASK_CONFIG:-$PWD/{DASK_FILE}}}"',
            'export DASK_LOGGING__DISTRIBUTED="${DASK_LOGGING__DISTRIBUTED:-warning}"',
        ]
    )
