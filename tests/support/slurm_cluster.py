"""A real Slurm on this machine: two nodes, which are both this machine, for as long as it is used.

All that it needs and leaves is in one folder. No other Slurm or munge of the machine is touched.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import free_ports, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
NODES, PROCESSORS = ("node1", "node2"), 6
_SECONDS = 60
_CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text()


class CannotStartError(Exception):
    """No Slurm can be started on this machine, and why."""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm, all of it in one folder."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What its commands need to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: object) -> str:
        """Run one of its commands."""
        how: dict[str, Any] = {"env": {**os.environ, **self.environment}, "timeout": _SECONDS}
        done = subprocess.run([*map(str, command)], **how, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def stop_controller(self) -> None:
        """End what answers its commands; jobs go on."""
        pid = int((self.folder / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: _has_ended(pid), "the controller to end")

    def start_controller(self) -> None:
        """Start it, at first or again."""
        _start(self, "slurmctld")

    def jobs(self) -> dict[str, str]:
        """Return the states of all jobs and tasks that it knows, by number."""
        lines = self.call("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for(self, state: str, job: str) -> None:
        """Wait until a job is in a state."""
        wait_until(lambda: self.jobs().get(job) == state, f"job {job} to be {state}")


@contextlib.contextmanager
def running(folder: Path, array: int = 1001) -> Iterator[Slurm]:
    """Start a Slurm in a folder, and end it and all that it has started.

    Parameters
    ----------
    folder
        Empty, with a short path: a socket in it must not be longer than about 100 characters.
    array
        How many tasks an array may have.

    Raises
    ------
    CannotStartError
        If the machine is not one for it.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise CannotStartError(f"no {', '.join(missing)} here (Debian: slurm-wlm, munge)")
    if os.geteuid() != 0:
        raise CannotStartError("only root can start Slurm for all its purposes")
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    values = {"folder": folder, "host": host, "nodes": NODES, "processors": PROCESSORS, "array": array}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(**values, ports=free_ports(3)))
    slurm = Slurm(folder)
    munged = ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
    try:
        _start(slurm, *munged)
        slurm.start_controller()
        for node in NODES:
            _start(slurm, "slurmd", "-N", node)
        try:
            wait_until(lambda: _nodes(slurm) == {"idle"}, "the nodes")
        except AssertionError as error:
            raise CannotStartError(f"Slurm does not get its nodes: {error}") from None
        yield slurm
    finally:
        _end(slurm)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _nodes(slurm: Slurm) -> set[str]:
    return set(slurm.call("sinfo", "--noheader", "--Node", "--format=%t").split())


def _start(slurm: Slurm, *command: str) -> None:
    """Start a program that goes into the background once it is up."""
    with (slurm.folder / "start.log").open("a") as log:
        how: dict[str, Any] = {"env": {**os.environ, **slurm.environment}, "timeout": _SECONDS}
        done = subprocess.run(command, **how, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if done.returncode:
        said = (slurm.folder / "start.log").read_text().splitlines()[-1:]
        raise CannotStartError(f"{command[0]} does not start: {' '.join(said)}")


def _end(slurm: Slurm) -> None:
    """End the programs, and every process whose environment names this Slurm."""
    with contextlib.suppress(OSError, AssertionError, subprocess.SubprocessError):
        slurm.call("scancel", "--user=root")
        wait_until(lambda: not slurm.call("squeue", "--noheader").strip(), "jobs to end", 20)
    for file in slurm.folder.glob("*.pid"):
        with contextlib.suppress(ValueError, ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGTERM)
    configuration = slurm.environment["SLURM_CONF"]

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                named = process.environ().get("SLURM_CONF") == configuration
                if process.pid != os.getpid() and named and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), "Slurm to end", 5)
    for process in left():
        with contextlib.suppress(psutil.Error):
            process.kill()
