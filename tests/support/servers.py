"""Servers as processes of their own: an S3 server, a faulty proxy before it, and a server of plain files.

Run as ``python -m tests.support.servers proxy UPSTREAM`` or ``static FOLDER [ranges] [listing] [forbid]``;
both print their port.
"""

import contextlib
import http.client
import http.server
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import free_ports, wait_until

ROOT = Path(__file__).resolve().parents[2]
_FAULTS, _LOG = "/-/faults", "/-/log"


# --- what tests use -------------------------------------------------------------------------------


@contextlib.contextmanager
def s3_server(printed: Path) -> Iterator[str]:
    """Start an S3 server and yield its endpoint."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with printed.open("w") as log, _ended(subprocess.Popen(command, stdout=log, stderr=log)) as process:

        def answers() -> bool:
            assert process.poll() is None, printed.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        wait_until(answers, "an S3 server")
        yield f"http://127.0.0.1:{port}"


class Proxy:
    """A proxy between a client and a server, which misbehaves as it is told."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def misbehave(self, *faults: dict[str, Any]) -> None:
        """Replace its faults, and forget what it has seen.

        A fault has a `kind`: ``status`` (answers `status` with `code`), ``hang``, ``reset`` and ``cut`` (half
        an answer, then a reset or an end), ``lost`` (does what it is asked for and then says nothing),
        ``forbid`` (403 for 404), ``careless`` (drops conditions). It befalls requests whose `method` and
        `path` match the patterns, from number `first`, at most `times` times; with `in_turns`, every other
        request of each kind, beginning with the first.
        """
        _request(self.endpoint + _FAULTS, "POST", json.dumps(faults).encode())

    def log(self) -> list[dict[str, Any]]:
        """Return the requests since then: method, path, and which fault befell them, if any."""
        found: list[dict[str, Any]] = json.loads(_request(self.endpoint + _LOG, "GET"))
        return found


@contextlib.contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    """Start a proxy before a server and yield it."""
    with _own_server("proxy", upstream) as port:
        yield Proxy(port)


@contextlib.contextmanager
def static_server(folder: Path, *options: str) -> Iterator[str]:
    """Start a server of plain files and yield its URL; see the module's text for options."""
    with _own_server("static", str(folder), *options) as port:
        yield f"http://127.0.0.1:{port}"


def make_bucket(endpoint: str, bucket: str) -> None:
    """Create a bucket."""
    _request(f"{endpoint}/{bucket}", "PUT")


@contextlib.contextmanager
def _own_server(*arguments: str) -> Iterator[int]:
    command = [sys.executable, "-m", "tests.support.servers", *arguments]
    with _ended(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        with process.stdout:
            yield int(process.stdout.readline())


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[Any]") -> Iterator["subprocess.Popen[Any]"]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _request(url: str, method: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=30) as answer:
        content: bytes = answer.read()
    return content


# --- the proxy ------------------------------------------------------------------------------------


class _Faults:
    """Which requests are befallen by what."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.replace([])

    def replace(self, faults: list[dict[str, Any]]) -> None:
        with self.lock:
            self.faults = [{"seen": 0, "done": 0, **fault} for fault in faults]
            self.log: list[dict[str, Any]] = []

    def of(self, method: str, path: str) -> dict[str, Any]:
        with self.lock:
            found: dict[str, Any] = {}
            for fault in self.faults:
                of_path = re.search(fault.get("path", ""), path)
                if not (of_path and re.search(fault.get("method", ""), method)):
                    continue
                fault["seen"] += 1
                request = f"{method} {path}"
                fault[request] = fault.get(request, 0) + 1
                due = fault["seen"] >= fault.get("first", 1)
                if fault.get("in_turns") and fault[request] % 2 == 0:
                    due = False
                if due and not found and fault["done"] < fault.get("times", 10**9):
                    fault["done"] += 1
                    found = fault
            self.log.append({"method": method, "path": path, "fault": found.get("kind")})
            return found


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults = _Faults()
    upstream = ""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == _FAULTS:
            self.faults.replace(json.loads(body))
            return self._answer(200, {}, b"")
        if self.path == _LOG:
            return self._answer(200, {}, json.dumps(self.faults.log).encode())
        fault = self.faults.of(self.command, self.path)
        kind = fault.get("kind")
        if kind == "hang":
            time.sleep(3600)
        if kind == "status":
            message = fault.get("message", "Please reduce your request rate.")
            return self._say(fault["status"], fault.get("code", "SlowDown"), message)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "expect")}
        if kind == "careless":
            headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
        connection = http.client.HTTPConnection(self.upstream.removeprefix("http://"), timeout=60)
        connection.request(self.command, self.path, body, headers)
        with contextlib.closing(connection), connection.getresponse() as answer:
            content, status, given = answer.read(), answer.status, dict(answer.getheaders())
        if kind == "lost":
            self.close_connection = True
            return None
        if kind == "forbid" and status == 404:
            return self._say(403, "AccessDenied", "Access Denied")
        if kind in ("cut", "reset"):
            self._answer(status, given, content, half=True)
            self.close_connection = True
            if kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            return None
        return self._answer(status, given, content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle  # noqa: N815

    def _say(self, status: int, code: str, message: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self._answer(status, {"Content-Type": "application/xml"}, text.encode())

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, half: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


# --- plain files ----------------------------------------------------------------------------------


class _StaticHandler(http.server.SimpleHTTPRequestHandler):
    options: tuple[str, ...] = ()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None or "ranges" not in self.options or not path.is_file():
            if "forbid" in self.options and not path.exists():
                return self.send_error(403)
            return super().do_GET()
        content = path.read_bytes()
        first, last = asked.groups()
        begin = int(first) if first else max(len(content) - int(last), 0)
        end = int(last) + 1 if first and last else len(content)
        if begin >= len(content):
            return self.send_error(416)
        part = content[begin:end]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)
        return None

    def list_directory(self, path: Any) -> Any:
        return super().list_directory(path) if "listing" in self.options else self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that have given up."""


def _main(kind: str, where: str, *options: str) -> None:
    def static(*arguments: Any) -> _StaticHandler:
        return _StaticHandler(*arguments, directory=where)

    _StaticHandler.options, _ProxyHandler.upstream = options, where
    handler: Any = _ProxyHandler if kind == "proxy" else static
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    os.close(1)
    server.serve_forever()


if __name__ == "__main__":
    _main(*sys.argv[1:])
