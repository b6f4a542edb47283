"""Jobs on Slurm: submitted by ``sbatch``, followed by ``scontrol``.

``sacct`` would know of them for longer, but needs a database that many clusters do not have.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdpext_dask.cli.submit.files import (
    DASK_FILE,
    JOB_FILE,
    check_store,
    dask_text,
    job_text,
    read_record,
    write_files,
    write_record,
)
from mdpext_dask.cli.submit.follow import JobState, follow
from mdpext_dask.cli.submit.slurm_scripts import (
    Setting,
    array_cluster,
    array_scripts,
    run_cluster,
    run_scripts,
)
from mdpext_dask.errors import ClusterError, SpecError, first_line
from mdpext_dask.events import Note, Observer
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.pipeline.cost_model import plan_job

TO = "slurm"
# Slurm's own default for MaxArraySize.
_ARRAY_TASKS = 1001
_SECONDS = 60
_UNKNOWN = "Invalid job id"
# What it complains of where its controller is not reached.
_AWAY = "Unable to contact slurm controller", "establish a configuration source", "Connection refused"
_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
}
_DONE = "COMPLETED"
# What can be done about an end.
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
    """Hand a job to Slurm; see :mod:`mdpext_dask.submit`.

    Raises
    ------
    SpecError
        If the job is bad, is there already, or is refused by Slurm, or if there is no Slurm here.
    StoreError
        If the store belongs to another job.
    ClusterError
        If Slurm does not answer.
    """
    complete = check_store(spec, store_url, observer)
    setting = Setting(spec, store_url, Path(sys.executable).absolute())
    # A bad job shall not wait in a queue before it is told. What it needs here is not what it needs there.
    blocks = plan_job(spec.model_copy(update={"cluster": run_cluster()}))["blocks"]
    if array:
        cluster, scripts = array_cluster(setting), array_scripts(setting, blocks, _array_tasks())
    else:
        cluster, scripts = run_cluster(), run_scripts(setting)
    _refuse_twice(folder)
    texts = {JOB_FILE: job_text(spec, cluster), DASK_FILE: dask_text(), **scripts}
    files = write_files(folder, texts)
    document: dict[str, Any] = {
        "to": TO,
        "store": store_url,
        "folder": str(folder),
        "files": files,
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
    document |= {"jobs": _submit_all(folder, list(scripts)), "state": "submitted"}
    write_record(folder, document)
    jobs = SlurmJobs(tuple(document["jobs"]), folder)
    observer(Note(f"submitted {jobs.name}; mdpext status {shlex.quote(store_url)} says how far it is"))
    if detach:
        return document
    follow(jobs, store_url, observer)
    return {**document, "state": "done"}


@dataclass(frozen=True)
class SlurmJobs:
    """Jobs that were submitted, each needing the one before.

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
        return f"Slurm job {self.ids[0]}" if len(self.ids) == 1 else f"Slurm jobs {', '.join(self.ids)}"

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
            # Between the jobs of a chain nothing runs for a moment.
            begun = len({part["JobId"] for part in parts} - {part["JobId"] for part in waiting}) > 0
            reasons = {part["Reason"] for part in waiting} - {"None", "Dependency", "JobArrayTaskLimit"}
            return JobState("running" if begun else "pending", ", ".join(sorted(reasons)))
        failed = [part for part in parts if part["JobState"] != _DONE]
        if failed:
            return self._failure(failed)
        # Slurm forgets what has ended some minutes ago, and the first ends first.
        last = [part for part in parts if self.ids[-1] in (part["JobId"], part.get("ArrayJobId"))]
        return JobState("done") if last else JobState("gone", "Slurm does not know it any more")

    def _failure(self, failed: Sequence[dict[str, str]]) -> JobState:
        # Whatever needed the one that has failed is cancelled.
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
        return JobState(
            "failed",
            f"{how}{others}{f': {said}' if said else ''}",
            code if state == "FAILED" and not signal else None,
        )

    def _last_error(self, name: str) -> str:
        """Return the last error that the output of a job or array task tells."""
        for file in self.folder.glob(f"*-{name}.out"):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("error: ")]
            if errors:
                return errors[-1].removeprefix("error: ")
        return ""


def _parts_of(job: str) -> list[dict[str, str]]:
    """Return what Slurm says of a job, or of each task of an array; nothing, if it does not know it."""
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
    record = read_record(folder) or {}
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
    """Return the lines that submit scripts one after the other, for a shell."""
    lines, needed = [], None
    for number, name in enumerate(names, start=1):
        line = " ".join(
            # What the shell puts in is no word to quote.
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
    """Return the last line of what a command complains of, without its own name."""
    lines = [line for line in answer.stderr.splitlines() if line.strip()] or ["no reason given"]
    return re.sub(r"^\w+: (error|fatal): ", "", lines[-1]).strip()
