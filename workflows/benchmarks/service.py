"""How long users wait for the service of ``workflows/service.py``, which has one core.

    python workflows/benchmarks/service.py CITY.mdp [--users 200] [--seconds 10] [--pauses 1 0.1 0]

CITY.mdp is an exported city. The server has the first core that this process may use, the client (one
process, one connection a user) the others; the ledger is made in ``--folder``, whose disk decides the times.
Each user reports from a new place every time, so that nearly every report is charged and written: repeated
answers are cheaper. After an answer a user pauses, for a time drawn from an exponential distribution with
each of the means ``--pauses``, in seconds: 1 is a user who reports once a second; 0 is as fast as answers
come, so that 200 requests are always waiting, and says how many a second the server answers at most.

Times are those of the client, from before the request is sent until its answer has been read, so that they
contain its own waiting for its core: p50, p99 and the largest. *server* is the share of its core that the
server used, *load* the average load of the machine in the last minute, with that of everybody else on it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import uvloop
from numpy.typing import NDArray

from mdpext_dask.runtime import open_city
from mdpext_dask.runtime.sticky import StickyKey

_SERVICE = Path(__file__).resolve().parents[1] / "service.py"
_LIMIT = 10**9


def places_of(city: str, n: int) -> list[dict[str, float]]:
    """Return places next to outputs drawn at random, as a request has them."""
    opened = open_city(city)
    outputs = opened.output_xy_km if opened.planar else opened.output_lonlat
    names = ("x_km", "y_km") if opened.planar else ("lon", "lat")
    rng = np.random.default_rng()
    # Nobody is where an output is; this is about 20 m.
    near = outputs[rng.integers(len(outputs), size=n)] + rng.normal(size=(n, 2)) * 2e-4
    return [dict(zip(names, place, strict=True)) for place in near.tolist()]


class User(asyncio.Protocol):
    """One user with one connection; as little of an HTTP client as the answers of this service need."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what requests are written to."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on the status once all of an answer is there."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if found and length and len(body) >= int(length[1]) and self._answer:
            self._received = b""
            self._answer.set_result(int(head.split(b" ", 2)[1]))

    def connection_lost(self, error: Exception | None) -> None:
        """Let nobody wait for an answer that will not come."""
        if self._answer and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the server has closed the connection"))

    async def report(self, asked: dict[str, object]) -> int:
        """Ask, and return the status of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        body = json.dumps(asked).encode()
        head = f"POST /report HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        return await self._answer


async def load(
    port: int, users: int, seconds: float, pause: float, places: list[dict[str, float]]
) -> tuple[NDArray[np.float64], Counter[int]]:
    """Return the times of all requests in seconds, and how often there was which status."""
    times: list[float] = []
    statuses: Counter[int] = Counter()
    end = time.perf_counter() + seconds

    async def go_on(name: str) -> None:
        transport, user = await asyncio.get_running_loop().create_connection(User, "127.0.0.1", port)
        while True:
            await asyncio.sleep(random.expovariate(1 / pause) if pause else 0)
            start = time.perf_counter()
            if start >= end:
                break
            statuses[await user.report(random.choice(places) | {"user": name})] += 1
            times.append(time.perf_counter() - start)
        transport.close()

    await asyncio.gather(*(go_on(f"user {k}") for k in range(users)))
    return np.array(times), statuses


def wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server listens.

    Raises
    ------
    SystemExit
        If it does not start.
    """
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise SystemExit("the service has not started")


def measure(given: argparse.Namespace, folder: Path) -> list[str]:
    """Return the lines of the table."""
    StickyKey.generate().write(folder / "key")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    files = ["--ledger", str(folder / "ledger"), "--sticky-key", str(folder / "key")]
    limits = ["--release-limit", str(_LIMIT), "--port", str(port)]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # which the server inherits
    process = subprocess.Popen([sys.executable, str(_SERVICE), given.city, *files, *limits])
    os.sched_setaffinity(0, cores[1:] or cores)
    lines = []
    try:
        wait_for(port, process)
        server = psutil.Process(process.pid)
        places = places_of(given.city, 100_000)
        uvloop.run(load(port, given.users, given.warm, 0.0, places))
        for pause in given.pauses:
            before = sum(server.cpu_times()[:2])
            times, statuses = uvloop.run(load(port, given.users, given.seconds, pause, places))
            used = (sum(server.cpu_times()[:2]) - before) / given.seconds
            p50, p99, most = (1e3 * float(np.quantile(times, q)) for q in (0.5, 0.99, 1))
            other = {status: n for status, n in statuses.items() if status != 200}
            lines.append(
                f"{pause:>7g} {len(times) / given.seconds:>12,.0f} {p50:>8.1f} {p99:>8.1f} {most:>8.1f} "
                f"{used:>7.0%} {os.getloadavg()[0]:>6.1f}{f'  not answered: {other}' if other else ''}"
            )
    finally:
        process.terminate()
        process.wait()
    return lines


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description="How long users wait for the service.")
    parser.add_argument("city")
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds of requests that are not counted")
    parser.add_argument("--pauses", type=float, nargs="+", default=[1.0, 0.1, 0.0])
    parser.add_argument("--folder", help="where the ledger is made; default: that of temporary files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        lines = measure(given, Path(folder))
    print(f"{given.city}, {given.users} users, {given.seconds:g} s each, server on one core")
    titles = f"{'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'server':>7} {'load':>6}"
    print(f"{'pause s':>7} {'reports/s':>12} {titles}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
