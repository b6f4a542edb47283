"""Commands, schedulers and workers as processes: started here or on hosts, killed, frozen, waited for."""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from mdpext_dask.errors import StoreError
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.problems import write_toml

# The package's own limits are in seconds; this only keeps a test from hanging on a loaded machine.
PATIENCE = 120.0
# What `run` says when it is interrupted.
INTERRUPTED = (
    "error: interrupted; finished blocks are kept, and the seed once it is solved; what was under way is "
    "not; run again to go on"
)


def wait_until(met: Callable[[], Any], what: object, patience: float = PATIENCE) -> None:
    """Wait until a condition holds; fail with `what` was waited for, or what a command has printed."""
    deadline = time.monotonic() + patience
    while not met():
        assert time.monotonic() < deadline, f"waited {patience:.0f} s in vain: {what}"
        time.sleep(0.004)


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


@dataclass(frozen=True)
class Host:
    """A machine: its address, and what a command line begins with to run there."""

    name: str
    address: str
    prefix: tuple[str, ...] = ()


LOOPBACK = Host("loopback", "127.0.0.1")


@dataclass(frozen=True)
class Command:
    """A process that leads a group of its own, with what it prints in files."""

    process: subprocess.Popen[bytes]
    printed: Path

    def __str__(self) -> str:
        return self.stderr[-3000:]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return self.printed.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self.printed.with_suffix(".err").read_text(errors="replace")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def code(self, patience: float = PATIENCE) -> int:
        """Wait for the end and return the exit code."""
        wait_until(self.ended, self, patience)
        return self.process.wait()

    def document(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Return the JSON document of a command that must succeed."""
        assert self.code(patience) == 0, self.stderr
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    def refusal(self, patience: float = PATIENCE) -> tuple[int, str]:
        """Return exit code and message of a command that must fail with one line and no more."""
        code = self.code(patience)
        document = json.loads(self.stdout)
        assert self.stderr == f"error: {document['message']}\n", self.stderr
        assert document["exit_code"] == code
        return code, document["message"]

    def kill(self) -> None:
        """Kill the process alone, and wait until it is dead."""
        self.process.kill()
        self.process.wait()

    def kill_group(self) -> None:
        """Kill the process and all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def members(self) -> list[psutil.Process]:
        """Return the living processes of the group."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes that this one has started, oldest first."""
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                if any("spawn_main" in part for part in process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: (process.create_time(), process.pid))


class Processes:
    """Starts processes in a folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.started: list[Command] = []

    def start(
        self,
        *command: object,
        host: Host = LOOPBACK,
        env: dict[str, str] | None = None,
        stdout: BinaryIO | None = None,
    ) -> Command:
        """Start any program on a host."""
        printed = self.folder / f"printed-{len(self.started)}"
        words, whole = [*host.prefix, *map(str, command)], {**os.environ, **self.environment, **(env or {})}
        how: dict[str, Any] = {"cwd": self.folder, "env": whole, "start_new_session": True}
        with printed.with_suffix(".out").open("wb") as out, printed.with_suffix(".err").open("wb") as err:
            how |= {"stdin": subprocess.DEVNULL, "stdout": stdout or out, "stderr": err}
            process = subprocess.Popen(words, **how)
        self.started.append(Command(process, printed))
        return self.started[-1]

    def mdpext(self, *arguments: object, **options: Any) -> Command:
        """Start a command of the package."""
        return self.start(sys.executable, "-m", "mdpext_dask.cli", *arguments, **options)

    def done(self, *arguments: object, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a command of the package to its end, which must be a good one, and return its document."""
        return self.mdpext(*arguments, "--json", env=env).document()

    def scheduler(
        self, *options: object, host: Host = LOOPBACK, port: int = 0, env: dict[str, str] | None = None
    ) -> tuple[Command, str]:
        """Start a scheduler and return it with its address, which is in ``scheduler.json`` as well."""
        file = self.folder / "scheduler.json"
        file.unlink(missing_ok=True)
        command = self.start(
            sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host.address, "--port", port,
            "--no-dashboard", "--scheduler-file", file, *options, host=host, env=env,
        )  # fmt: skip

        def address() -> str:
            assert not command.ended(), command.stderr
            with contextlib.suppress(OSError, ValueError):
                return str(json.loads(file.read_text())["address"])
            return ""

        wait_until(address, "a scheduler")
        return command, address()

    def worker(
        self, address: str, *options: object, host: Host = LOOPBACK, env: dict[str, str] | None = None
    ) -> Command:
        """Start a worker with one thread; it comes when it comes."""
        where = ("--scheduler-file", address) if address.endswith(".json") else (address,)
        return self.start(
            sys.executable, "-m", "distributed.cli.dask_worker", *where, "--nthreads", "1", "--no-dashboard",
            "--host", host.address, "--local-directory", self.folder / "scratch", "--death-timeout", "30",
            *options, host=host, env=env,
        )  # fmt: skip

    def end(self) -> None:
        """Kill whatever is left."""
        for command in reversed(self.started):
            command.kill_group()


@contextlib.contextmanager
def processes_in(folder: Path, environment: dict[str, str] | None = None) -> Iterator[Processes]:
    """Yield a starter of processes, none of which is left in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = Processes(folder, environment or {})
    try:
        yield processes
    finally:
        processes.end()


def job_file(folder: Path, job: dict[str, dict[str, Any]]) -> Path:
    """Write a job file."""
    path = folder / "job.toml"
    write_toml(path, job)
    return path


# --- moments --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """When to strike: some seconds after the start, or after a number of receipts."""

    seconds: float
    receipts: int | None = None

    def wait(self, store: Path, *commands: Command) -> None:
        """Wait for it, or for the end of one of the commands."""

        def until(met: Callable[[], bool], what: str) -> None:
            wait_until(lambda: any(command.ended() for command in commands) or met(), what)

        if self.receipts is not None:
            until(lambda: len(receipt_files(store)) >= (self.receipts or 0), f"{self.receipts} receipts")
        deadline = time.monotonic() + self.seconds
        until(lambda: time.monotonic() >= deadline, "the moment to strike")


def moments(random_seed: int, count: int, seconds: float, blocks: int) -> list[Moment]:
    """Draw moments: half of them spread over the whole run, half of them while blocks are written."""
    draw = random.Random(random_seed)
    spread = [Moment(seconds * (k + draw.random()) / (count // 2)) for k in range(count // 2)]
    amid = [Moment(0.04 * draw.random(), draw.randrange(1, blocks)) for _ in range(count - len(spread))]
    print(f"moments drawn with random seed {random_seed}: {spread + amid}")
    return spread + amid


# --- what is in a store ---------------------------------------------------------------------------


def receipt_files(store: Path) -> list[Path]:
    return list(store.glob("receipts/0*.json"))


def valid_receipts(store: Path) -> dict[str, bytes]:
    """Return the receipts of the present seed as they are on disk, by name."""
    try:
        found = MechanismStore.open(str(store))
        blocks = found.read_receipts() if found.has_seed() else {}
    except StoreError:  # not yet a store
        return {}
    return {f"{block:08d}.json": (store / "receipts" / f"{block:08d}.json").read_bytes() for block in blocks}


def digests(store: Path) -> dict[str, str]:
    """Return the SHA-256 of every shard and of every chunk of the seed."""
    found = (*store.glob("probability/c/**/*"), *store.glob("seed/*/c/**/*"))
    files = [file for file in found if file.is_file()]
    return {str(f.relative_to(store)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
