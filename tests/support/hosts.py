"""Machines for tests: this one's loopback, or hosts in network namespaces whose cables can be cut.

All of them see the same files. What was started on them ends with the test, whatever happens.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

DASK_YAML = Path(__file__).resolve().parents[2] / "deploy" / "dask.yaml"
# The product's own bounds are in seconds; these only keep a test from hanging on a busy machine.
PATIENCE = 60.0
PORT = 8786


@dataclass(frozen=True)
class Host:
    """A machine: its address, and what a command line begins with to run there."""

    name: str
    address: str
    prefix: tuple[str, ...] = ()


LOOPBACK = Host("loopback", "127.0.0.1")


@dataclass
class Process:
    """A process that was started on a host, and what it has said."""

    popen: subprocess.Popen[bytes]
    log: Path
    said: Path

    @property
    def text(self) -> str:
        """What it has written to standard error so far."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to it, and not to its children."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """End it and all that it has started."""
        if self.popen.poll() is None or _group_lives(self.popen.pid):
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return its exit code; fail with what it said if it takes longer."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:.0f} s:\n{self.text[-3000:]}")

    def summary(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Return the JSON document of a command that must succeed."""
        assert self.wait(seconds) == 0, self.text
        document: dict[str, Any] = json.loads(self.said.read_text())
        return document

    def refusal(self, seconds: float = PATIENCE) -> tuple[int, str]:
        """Return exit code and message of a command that must fail with one line and no more."""
        code = self.wait(seconds)
        document = json.loads(self.said.read_text())
        assert self.text == f"error: {document['message']}\n", self.text
        assert document["exit_code"] == code
        return code, document["message"]


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Site:
    """Where a test starts its processes; see :func:`site`."""

    folder: Path
    environment: dict[str, str]
    started: list[Process] = field(default_factory=list)

    def start(
        self, arguments: Sequence[str], host: Host = LOOPBACK, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start Python with arguments on a host."""
        number = len(self.started)
        log, said = self.folder / f"{number}.err", self.folder / f"{number}.out"
        with log.open("wb") as err, said.open("wb") as out:
            popen = subprocess.Popen(
                [*host.prefix, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env={**self.environment, **(env or {})},
                start_new_session=True,
            )
        self.started.append(Process(popen, log, said))
        return self.started[-1]

    def scheduler(
        self, host: Host = LOOPBACK, *options: str, port: int = PORT, env: Mapping[str, str] | None = None
    ) -> tuple[Process, str]:
        """Start a scheduler, and return it with its address."""
        arguments = ["-m", "dask", "scheduler", "--host", host.address, "--port", str(port), "--no-dashboard"]
        process = self.start([*arguments, *options], host, env)
        until(lambda: "Scheduler at:" in process.text or not process.running, process)
        protocol = "tls" if "tls" in options else "tcp"
        return process, f"{protocol}://{host.address}:{port}"

    def worker(
        self, address: str, host: Host = LOOPBACK, *options: str, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a worker without waiting for it to be known to the scheduler."""
        where = ("--scheduler-file", address) if address.endswith(".json") else (address,)
        arguments = ["-m", "dask", "worker", *where, "--host", host.address, "--nthreads", "1"]
        return self.start([*arguments, "--no-dashboard", *options], host, env)

    def run(
        self,
        job: Path,
        store: Path,
        *options: str,
        host: Host = LOOPBACK,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start ``mdpext run``."""
        arguments = ["-m", "mdpext_dask.cli", "run", str(job), "--store", str(store), "--json"]
        return self.start([*arguments, "--progress", "none", *options], host, env)


@contextmanager
def site(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Site]:
    """Give a place for processes, which are all killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Site(folder, {**os.environ, "DASK_CONFIG": str(DASK_YAML), **(environment or {})})
    try:
        yield place
    finally:
        for process in reversed(place.started):
            process.kill()


def until(condition: Callable[[], object], process: Process | None = None, seconds: float = PATIENCE) -> None:
    """Wait for something to become true; fail, with what a process said, if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"nothing after {seconds:.0f} s" + (f":\n{process.text[-3000:]}" if process else ""))
        time.sleep(0.02)


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Network:
    """Hosts on a bridge of their own, each in its network namespace with one cable to the bridge."""

    def __init__(self, *names: str) -> None:
        # Unique on this machine, and at most 15 letters for the names of interfaces.
        self._tag = f"mx{os.getpid():x}{time.monotonic_ns() % 4096:03x}"
        self._bridge = f"{self._tag}-lan"
        self.hosts = {
            name: Host(name, f"10.79.0.{number}", ("ip", "netns", "exec", f"{self._tag}-{name}"))
            for number, name in enumerate(names, start=1)
        }

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def build(self) -> None:
        """Make namespaces, bridge and cables."""
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "lan", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "lan", "up")
        for name, host in self.hosts.items():
            space = f"{self._tag}-{name}"
            _ip("netns", "add", space)
            ends = ("eth0", "netns", space), (name, "netns", self._bridge)
            _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            _ip("-n", self._bridge, "link", "set", name, "master", "lan", "up")
            _ip("-n", space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")

    def cut(self, name: str) -> None:
        """Cut a host's cable: nothing goes through any more, and nobody is told."""
        _ip("-n", self._bridge, "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Connect a host again."""
        _ip("-n", self._bridge, "link", "set", name, "up")

    def remove(self) -> None:
        """Remove everything that was made; cables and bridge go with their namespaces."""
        for space in (*(f"{self._tag}-{name}" for name in self.hosts), self._bridge):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Give a network of hosts; skip the test where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no command ip")
    made = Network(*names)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces: {error.stderr.decode(errors='replace').strip()}")
        yield made
    finally:
        made.remove()
