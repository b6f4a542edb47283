"""Engines that run the reader in JavaScript: Node, and real browsers, each with a page and a server."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.browsers import ARGUMENTS, BROWSER
from tests.support.city_vectors import STICKY_KEY

# Cryptography is global from this version on.
LEAST_NODE = 20
PROJECT = Path(__file__).resolve().parents[2]
READER = PROJECT / "deploy" / "browser" / "mdpext.js"
MINIFIED = READER.with_name("mdpext.min.js")
PROGRAM = PROJECT / "tests" / "support" / "read_cities.mjs"
_SECONDS = 120
_IN_NODE = """
import { readFile, writeFile } from "node:fs/promises";
import { text } from "node:stream/consumers";
const request = JSON.parse(await text(process.stdin));
const [program, reader] = process.argv.slice(1);
const { answers } = await import(program);
const save = async (path, blob) => writeFile(path, new Uint8Array(await blob.arrayBuffer()));
process.stdout.write(JSON.stringify(await answers(await import(reader), request, readFile, save)));
"""
_PAGE = """<!doctype html><title>Cities</title><script type="module">
const send = (where, body) => fetch(where, { method: "POST", body });
try {
  const { answers } = await import("/program.mjs");
  const request = await (await fetch("/request")).json();
  const load = async (path) => (await fetch(`/file${path}`)).arrayBuffer();
  const save = (path, blob) => send(`/file${path}`, blob);
  await send("/answers", JSON.stringify(await answers(await import("/reader.mjs"), request, load, save)));
} catch (error) {
  await send("/answers", JSON.stringify({ page: { crashed: `${error} ${error.stack}` } }));
}
</script>"""

Asked = Mapping[str, Any]


@cache
def node() -> str | None:
    """Return Node's path, if it is there and new enough."""
    path = shutil.which("node")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    number = version.strip().removeprefix("v").split(".")[0]
    return path if number.isdigit() and int(number) >= LEAST_NODE else None


def _firefox(profile: str) -> list[str] | None:
    path = shutil.which("firefox-esr") or shutil.which("firefox")
    return path and [path, "--headless", "--no-remote", "--profile", profile]


def _chromium(profile: str) -> list[str] | None:
    return BROWSER and [BROWSER, "--headless", *ARGUMENTS, f"--user-data-dir={profile}"]


def _webkit(_: str) -> list[str] | None:
    # The engine of Safari, in Debian's package webkit2gtk-driver; it wants a screen.
    browsers = sorted(Path("/usr/lib").glob("*/webkit2gtk-4.*/MiniBrowser"))
    screen = shutil.which("xvfb-run")
    return [screen, "-a", str(browsers[-1]), "--private"] if browsers and screen else None


BROWSERS: dict[str, Callable[[str], list[str] | None]] = {
    "chromium": _chromium,
    "firefox": _firefox,
    "webkit": _webkit,
}

# Of a test that takes an engine's name; browsers take seconds to start.
every_engine = pytest.mark.parametrize(
    "engine", ["node", *(pytest.param(name, marks=pytest.mark.slow) for name in BROWSERS)]
)


def read(cities: Mapping[str, Asked], module: Path = READER, engine: str = "node") -> dict[str, Any]:
    """Return what the reader answers in an engine, all in one process; without the engine, skip the test."""
    key = {"secret": STICKY_KEY.secret.hex(), "epoch": STICKY_KEY.epoch}
    request = json.dumps({"sticky_key": key, "cities": cities})
    found = json.loads(
        _in_node(request, module) if engine == "node" else _in_browser(request, module, BROWSERS[engine])
    )
    assert not {name: answer["crashed"] for name, answer in found.items() if "crashed" in answer}
    answers: dict[str, Any] = found
    return answers


def _in_node(request: str, module: Path) -> str:
    path = node()
    if path is None:
        pytest.skip(f"Node {LEAST_NODE} or newer is not installed")
    command = [path, "--input-type=module", "-e", _IN_NODE, PROGRAM.as_uri(), module.as_uri()]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _in_browser(request: str, module: Path, command_of: Callable[[str], list[str] | None]) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = command_of(profile)
        if command is None:
            pytest.skip("this browser is not installed")
        with (
            _served(request, module) as (address, answered, answers),
            _started([*command, address], profile) as log,
        ):
            assert answered.wait(_SECONDS), log.read_text(errors="replace")[-2000:]
        return answers[0]


@contextlib.contextmanager
def _served(request: str, module: Path) -> Iterator[tuple[str, threading.Event, list[str]]]:
    answered, answers = threading.Event(), []
    own = {
        "/": ("text/html", _PAGE.encode()),
        "/program.mjs": ("text/javascript", PROGRAM.read_bytes()),
        "/reader.mjs": ("text/javascript", module.read_bytes()),
        "/request": ("application/json", request.encode()),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send(self, kind: str, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def file(self) -> Path:
            return Path(urllib.parse.unquote(self.path).removeprefix("/file"))

        def do_GET(self) -> None:
            if self.path in own:
                self.send(*own[self.path])
            elif self.path.startswith("/file/"):
                self.send("application/octet-stream", self.file().read_bytes())
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/answers":
                answers.append(content.decode())
            else:
                self.file().write_bytes(content)
            self.send("text/plain", b"")
            if answers:
                answered.set()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", answered, answers
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def _started(command: list[str], home: str) -> Iterator[Path]:
    """Start a browser in a session of its own, and end it with all of its processes."""
    log = Path(home) / "log"
    environment = os.environ | {"HOME": home, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home}
    with log.open("w") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=printed, env=environment, start_new_session=True
        )
    try:
        yield log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
