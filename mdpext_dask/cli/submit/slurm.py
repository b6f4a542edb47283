"""Jobs on Slurm: batch scripts, submitted by ``sbatch`` and followed by ``scontrol``.

Scripts run in their folder, which has the job file and Dask's settings; each resumes from its store when it
is submitted again, or queued again by Slurm. ``deploy/slurm`` has the scripts of the demo. ``sacct`` knows of
jobs for longer than ``scontrol``, but needs a database that many clusters do not have.
"""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mdpext_dask.cli.submit import files
from mdpext_dask.cli.submit.follow import JobState, follow
from mdpext_dask.compute.workers import slurm_time
from mdpext_dask.errors import ClusterError, SpecError, first_line
from mdpext_dask.events import Note, Observer
from mdpext_dask.job.beyond import tell_beyond
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.plan import plan_job

TO = "slurm"
# The cluster section inside the one job. The file has no path: that could hold what an address may not.
ONE_JOB = ClusterSection(kind="address", address="scheduler.json")
# Seed and certificate of an array job run in this many processes of one node, besides the client: few nodes
# have less.
_ONE_NODE = 7
# Array tasks for each that runs at once, so that none waits long for the slowest.
_PARTS = 4
# Slurm's own default for MaxArraySize.
_ARRAY_TASKS = 1001
_MIB_PER_GIB = 1024
_SECONDS = 60
_UNKNOWN = "Invalid job id"
# What Slurm's commands print if they cannot reach its controller.
_AWAY = "Unable to contact slurm controller", "establish a configuration source", "Connection refused"
_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {
    "RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED",
}  # fmt: skip
_DONE = "COMPLETED"
_ADVICE = {
    "TIMEOUT": "its time was up (cluster.walltime_hours)",
    "OUT_OF_MEMORY": "its memory was not enough (cluster.memory_gib)",
    "NODE_FAIL": "its node has failed",
}


def submit(
    spec: JobSpec,
    store_url: str,
    folder: Path,
    *,
    dry_run: bool,
    array: bool,
    detach: bool,
    observer: Observer,
) -> dict[str, Any]:
    """Submit a job to Slurm; see :func:`mdpext_dask.cli.submit.submit`.

    Raises
    ------
    SpecError
        If the job is invalid, is submitted already, or is refused by Slurm, or if there is no Slurm here.
    StoreError
        If the store belongs to another job.
    ClusterError
        If Slurm does not answer.
    """
    complete = files.check_store(spec, store_url, observer)
    python = Path(sys.executable).absolute()
    # An invalid job is refused here, not after hours in a queue; what this machine has plays no part in it.
    blocks = plan_job(spec.model_copy(update={"cluster": ONE_JOB}))["blocks"]
    if array:
        scripts = array_scripts(spec, store_url, python, blocks, _array_tasks())
        cluster = ClusterSection(kind="local", workers=_on_one_node(spec), memory_gib=spec.cluster.memory_gib)
    else:
        scripts, cluster = run_scripts(spec, store_url, python), ONE_JOB
    _refuse_twice(folder)
    texts = {files.JOB_FILE: files.job_text(spec, cluster), files.DASK_FILE: files.dask_text(), **scripts}
    document: dict[str, Any] = {
        "to": TO,
        "store": store_url,
        "folder": str(folder),
        "files": files.write_files(folder, texts),
        "commands": _as_text(folder, list(scripts)),
        "jobs": [],
        "state": "written",
    }
    if dry_run or complete:
        return {**document, "state": "done"} if complete and not dry_run else document
    if shutil.which("sbatch") is None:
        raise SpecError(
            f"--to slurm: there is no sbatch here; {folder} has what to submit from a machine that has it"
        )
    tell_beyond(observer, spec, to=TO)
    document |= {"jobs": _submit_all(folder, list(scripts)), "state": "submitted"}
    files.write_files(folder, {files.RECORD_FILE: json.dumps(document, indent=2, sort_keys=True) + "\n"})
    jobs = SlurmJobs(tuple(document["jobs"]), folder)
    observer(Note(f"submitted {jobs.name}; mdpext status {shlex.quote(store_url)} says how far it is"))
    if detach:
        return document
    follow(jobs.name, jobs.state, store_url, observer)
    return {**document, "state": "done"}


# --- scripts ---------------------------------------------------------------------------------------


def run_scripts(spec: JobSpec, store: str, python: Path) -> dict[str, str]:
    """Return the script of a job that does everything, by name; scheduler and client share one processor.

    Parameters
    ----------
    spec
        The job.
    store
        Absolute path or URL of its store.
    python
        Absolute path of the interpreter that has this package.
    """
    workers, memory = spec.cluster.requested, spec.cluster.memory_gib
    head = _head(spec, store, python, "run", "%j", [f"--ntasks={workers + 1}", "--cpus-per-task=1"])
    given = f"count={workers}\nlimit={'auto' if memory is None else f'{memory:g}GiB'}\n"
    body = resources.files(__package__).joinpath("run.sh").read_text(encoding="utf-8")
    return {"run.sbatch": head + given + body}


def array_scripts(spec: JobSpec, store: str, python: Path, blocks: int, most: int) -> dict[str, str]:
    """Return the scripts of a job without Dask, by name; each needs the one before.

    Parameters
    ----------
    spec, store, python
        See :func:`run_scripts`.
    blocks
        Number of blocks to extend.
    most
        Number of tasks that an array may have.
    """
    at_once = spec.cluster.requested
    tasks = min(blocks, _PARTS * at_once, most)
    node = ["--ntasks=1", f"--cpus-per-task={_on_one_node(spec) + 1}"]
    one = [f"--array=0-{tasks - 1}%{at_once}", "--ntasks=1", "--cpus-per-task=1"]
    method = spec.extension.method
    # Blocks are extended by the operator that their reader names, not by the one that their store does.
    command = f'exec "$python" -m mdpext_dask.cli{f" --operator {method}" if ":" in method else ""}'
    whole = f'{files.JOB_FILE} --store "$store" --progress plain\n'
    return {
        "init.sbatch": f"{_head(spec, store, python, 'init', '%j', node)}{command} init {whole}",
        "partition.sbatch": f"""\
{_head(spec, store, python, "partition", "%A_%a", one)}\
# Each task extends its share of the {blocks} blocks; blocks that are done are skipped.
first=$((SLURM_ARRAY_TASK_ID * {blocks} / {tasks}))
last=$(((SLURM_ARRAY_TASK_ID + 1) * {blocks} / {tasks}))
{command} partition "$store" --range "$first:$last" --progress plain
""",
        "finalise.sbatch": f"""\
{_head(spec, store, python, "finalise", "%j", node)}\
# As `mdpext finalise` on this node, whatever workers the store was begun with; damaged blocks are made again.
{command} run {whole}""",
    }


def _on_one_node(spec: JobSpec) -> int:
    return min(spec.cluster.requested, _ONE_NODE)


def _head(spec: JobSpec, store: str, python: Path, part: str, number: str, resources: list[str]) -> str:
    cluster, name = spec.cluster, spec.job.name
    options = [f"--job-name={name}-{part}", *resources]
    if cluster.memory_gib is not None:
        options.append(f"--mem-per-cpu={math.ceil(cluster.memory_gib * _MIB_PER_GIB)}M")
    options.append(f"--time={slurm_time(cluster.walltime_hours)}")
    if cluster.queue is not None:
        options.append(f"--partition={cluster.queue}")
    if cluster.account is not None:
        options.append(f"--account={cluster.account}")
    # A job that Slurm queues again after a node has failed appends to the same file.
    options += [f"--output={part}-{number}.out", "--open-mode=append", "--requeue", *cluster.options]
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    return f"""\
#!/bin/bash
{directives}python={shlex.quote(str(python))}
store={shlex.quote(store)}
export DASK_CONFIG="${{DASK_CONFIG:-$PWD/{files.DASK_FILE}}}"
export DASK_LOGGING__DISTRIBUTED="${{DASK_LOGGING__DISTRIBUTED:-warning}}"
"""


# --- what Slurm says -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmJobs:
    """Submitted jobs, each of which needs the one before.

    Parameters
    ----------
    ids
        Slurm's numbers.
    folder
        Where their output is.
    """

    ids: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        """What people call them."""
        return f"Slurm job{'s' if len(self.ids) > 1 else ''} {', '.join(self.ids)}"

    def state(self) -> JobState:
        """Ask Slurm for the state of all.

        Raises
        ------
        ClusterError
            If it does not answer.
        """
        parts = [part for job in self.ids for part in _parts_of(job)]
        states = {part["JobState"] for part in parts}
        if states & _RUNNING:
            return JobState("running")
        waiting = [part for part in parts if part["JobState"] in _PENDING]
        if waiting:
            # Between two jobs of a chain nothing runs for a moment.
            begun = {part["JobId"] for part in parts} > {part["JobId"] for part in waiting}
            reasons = {part["Reason"] for part in waiting} - {"None", "Dependency", "JobArrayTaskLimit"}
            return JobState("running" if begun else "pending", ", ".join(sorted(reasons)))
        failed = [part for part in parts if part["JobState"] != _DONE]
        if failed:
            return self._failure(failed)
        # Slurm forgets a job some minutes after its end, and the first one ends first.
        last = [part for part in parts if self.ids[-1] in (part["JobId"], part.get("ArrayJobId"))]
        return JobState("done") if last else JobState("gone", "Slurm does not know it any more")

    def _failure(self, failed: Sequence[dict[str, str]]) -> JobState:
        # Jobs that needed the failed one are cancelled.
        first = next((part for part in failed if part["JobState"] != "CANCELLED"), failed[0])
        state, (code, signal) = first["JobState"], map(int, first["ExitCode"].split(":"))
        how = _ADVICE.get(state, state.lower().replace("_", " "))
        if state == "FAILED":
            how = f"killed by signal {signal}" if signal else f"exit code {code}"
        name = first["JobId"]
        if "ArrayTaskId" in first:
            name = f"{first['ArrayJobId']}_{first['ArrayTaskId']}"
        said = self._last_error(name)
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        message = f"{how}{others}{f': {said}' if said else ''}"
        return JobState("failed", message, code if state == "FAILED" and not signal else None)

    def _last_error(self, name: str) -> str:
        """Return the last error in the output of a job or array task."""
        for file in self.folder.glob(f"*-{name}.out"):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("error: ")]
            if errors:
                return errors[-1].removeprefix("error: ")
        return ""


def _parts_of(job: str) -> list[dict[str, str]]:
    """Return what Slurm says of a job, or of each task of an array; nothing if it does not know it."""
    answer = _call(["scontrol", "show", "job", job, "--oneliner"])
    if answer.returncode and _UNKNOWN in answer.stderr:
        return []
    if answer.returncode:
        raise ClusterError(f"Slurm does not answer: {_said(answer)}")
    wanted = ("JobId", "ArrayJobId", "ArrayTaskId", "JobState", "Reason", "ExitCode")
    found = []
    for line in answer.stdout.splitlines():
        pairs = {key: re.search(rf"(?:^|\s){key}=(\S+)", line) for key in wanted}
        found.append({key: match[1] for key, match in pairs.items() if match})
    return [part for part in found if "JobState" in part]


def _array_tasks() -> int:
    """Return how many tasks an array may have."""
    if shutil.which("scontrol") is None:
        return _ARRAY_TASKS
    said = re.search(r"MaxArraySize\s*=\s*(\d+)", _call(["scontrol", "show", "config"]).stdout)
    return max(int(said[1]), 1) if said else _ARRAY_TASKS


def _refuse_twice(folder: Path) -> None:
    record = files.read_record(folder) or {}
    ids, store = record.get("jobs"), record.get("store")
    if record.get("to") != TO or not isinstance(ids, list) or not ids or shutil.which("scontrol") is None:
        return
    jobs = SlurmJobs(tuple(map(str, ids)), folder)
    now = jobs.state()
    if not now.ended:
        raise SpecError(
            f"{folder}: {jobs.name} of an earlier submit is still {now.state}; follow it by mdpext status "
            f"{shlex.quote(str(store))}, or end it by scancel {' '.join(jobs.ids)}"
        )


def _as_text(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the lines of shell that submit scripts one after the other."""
    lines, needed = [], None
    for number, name in enumerate(names, start=1):
        line = " ".join(
            # The shell must replace the variable in this word.
            word if word.startswith("--dependency=") else shlex.quote(word)
            for word in _sbatch(folder, name, None if needed is None else f"${needed}")
        )
        needed = name.removesuffix(".sbatch")
        lines.append(f"{needed}=$({line})" if number < len(names) else line)
    return lines


def _submit_all(folder: Path, names: Sequence[str]) -> list[str]:
    """Submit scripts, each to begin when the one before has ended well; all or none. Return their numbers."""
    jobs: list[str] = []
    for name in names:
        answer = _call(_sbatch(folder, name, jobs[-1] if jobs else None))
        number = answer.stdout.strip().partition(";")[0]
        if answer.returncode or not number:
            if jobs:
                _call(["scancel", *jobs])
            if any(text in answer.stderr for text in _AWAY):
                raise ClusterError(f"Slurm does not answer: {_said(answer)}")
            raise SpecError(f"{folder / name}: refused by Slurm: {_said(answer)}")
        jobs.append(number)
    return jobs


def _sbatch(folder: Path, name: str, after: str | None) -> list[str]:
    needs = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    return ["sbatch", "--parsable", f"--chdir={folder}", *needs, str(folder / name)]


def _call(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(  # noqa: S603 Slurm's own commands, and no shell
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"Slurm does not answer: {first_line(error)}") from None


def _said(answer: "subprocess.CompletedProcess[str]") -> str:
    """Return a command's last line of error, without the command's name."""
    lines = [line for line in answer.stderr.splitlines() if line.strip()] or ["no reason given"]
    return re.sub(r"^\w+: (error|fatal): ", "", lines[-1]).strip()
