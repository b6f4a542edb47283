"""Hosts in network namespaces whose cables can be cut; all of them see the same files."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.processes import Host


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

    def cut_for(self, seconds: float, name: str) -> None:
        """Cut a host's cable for a while."""
        self.cut(name)
        time.sleep(seconds)
        self.mend(name)

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
