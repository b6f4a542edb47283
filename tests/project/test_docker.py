"""The image and the compose file, as far as it goes where no engine is: parsed strictly, and run without it.

The image's steps are one script, which is run here; the compose file's commands are run as processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyOptions
from dask.utils import parse_bytes
from dockerfile_parse import DockerfileParser

from mdpext_dask import load_job, open_mechanism
from mdpext_dask.compute.dask_settings import DASK_CONFIG
from tests.support.commands import parse
from tests.support.inside import Outcome
from tests.support.processes import free_ports, wait_until
from tests.support.refusals import refused

Services = dict[str, dict[str, Any]]
PROJECT = Path(__file__).resolve().parents[2]
DOCKER = PROJECT / "deploy" / "docker"
# So that a run takes seconds.
SMALLER = ["domain.cell_km=3.0", "domain.refine=[2, 2]", "outputs.choose=road-nodes", "outputs.count=8"]
SMALLER += ["loss.tasks=5", "privacy.budget=bound", "extension.method=log-convex"]


def compose_text(**variables: str) -> str:
    """Return the compose file with variables filled in, as an engine does before it reads it."""
    text = (DOCKER / "compose.yaml").read_text()
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), text)


def read_compose(text: str) -> dict[str, Any]:
    """Return the services of a compose file, all keys known and all values of the types that they must be."""
    # The parser does not know how often, which the specification of `restart` allows to be said.
    spec = PyOptions(apply_merge=True).from_yaml(text.replace("on-failure:3", "on-failure"))
    spec.validate()
    read: dict[str, Any] = spec.to_dict()
    return read


@pytest.fixture(scope="module")
def services() -> Services:
    read_compose(compose_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(compose_text())["services"]
    return found


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    # The parser writes where it reads.
    copy = tmp_path_factory.mktemp("docker") / "Dockerfile"
    shutil.copy(DOCKER / "Dockerfile", copy)
    return [line for line in DockerfileParser(str(copy)).structure if line["instruction"] != "COMMENT"]


# --- the compose file -----------------------------------------------------------------------------


def test_the_compose_file_is_valid() -> None:
    assert set(read_compose(compose_text())["services"]) == {"scheduler", "worker", "client"}
    assert read_compose(compose_text(MDPEXT_WORKERS="7"))["services"]["worker"]["deploy"]["replicas"] == 7


def test_services_refer_to_what_is_there(services: Services) -> None:
    volumes = yaml.safe_load(compose_text())["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in volumes or (DOCKER / source).is_dir()
        build = service["build"]
        assert (DOCKER / build["context"]).resolve() == PROJECT
        assert (PROJECT / build["dockerfile"]).is_file()
    hosts = re.findall(r"tcp://(\w+):(\d+)", compose_text())
    assert set(hosts) == {("scheduler", str(parse(services["scheduler"]["command"])["port"]))}


def test_services_are_bounded_have_few_rights_and_are_reached_from_here_only(services: Services) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:8786:8786", "127.0.0.1:8787:8787"]
    for name, service in services.items():
        assert parse_bytes(service["mem_limit"].replace("g", "GiB")) == 2**31
        assert service["restart"] == ("on-failure:3" if name == "client" else "unless-stopped")
        assert service["read_only"]
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert "privileged" not in service
    # The nanny ends a worker before the engine does.
    limit = parse(services["worker"]["command"])["memory_limit"]
    assert parse_bytes(limit) <= 2**31


def test_commands_are_those_of_the_programs(services: Services) -> None:
    assert parse(services["scheduler"]["command"])["dashboard_address"] == ":8787"
    worker = parse(services["worker"]["command"])
    assert (worker["scheduler"], worker["nthreads"]) == ("tcp://scheduler:8786", 1)
    client = parse(services["client"]["command"])
    job = PROJECT / "workflows" / client["job"].name
    assert load_job(job, client["override"]).cluster.address == "tcp://scheduler:8786"
    for name in ("worker", "client"):
        refused(Exception, "no-such", parse, [*services[name]["command"], "--no-such"])


# --- the image ------------------------------------------------------------------------------------


def _is_sent(path: str) -> bool:
    """Whether a file is part of what an engine is sent: the last line of .dockerignore that fits decides."""
    sent = True
    for line in (PROJECT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern, fits = line.removeprefix("!"), False
        parts = Path(path).parts
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            fits |= fnmatch(part, pattern) or fnmatch("/" + part, pattern.replace("**/", "*/"))
        if fits:
            sent = line.startswith("!")
    return sent


def test_the_image_is_made_of_what_is_there(dockerfile: list[dict[str, str]]) -> None:
    copied = set()
    for line in dockerfile:
        if line["instruction"] == "COPY" and not line["value"].startswith("--from"):
            *sources, _ = line["value"].split()
            for source in sources:
                assert (PROJECT / source).exists(), source
                assert _is_sent(source), source
                copied.add(source)
    # What `pip install` of the project needs, by its pyproject.toml.
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "mdpext_dask", project["readme"], *project["license-files"]} <= copied
    for unwanted in ("tests/conftest.py", ".git/config", "a.zarr/zarr.json", "mdpext_dask/__pycache__"):
        assert not _is_sent(unwanted)


def test_the_image_runs_the_script_and_nobody_is_root(dockerfile: list[dict[str, str]]) -> None:
    steps = [(line["instruction"], line["value"]) for line in dockerfile]
    bases = {value.split()[0] for instruction, value in steps if instruction == "FROM"}
    # One and the same, or the environment would have no Python.
    assert bases == {"python:3.12-slim"}
    (script,) = [v for i, v in steps if i == "RUN" and "install.sh" in v]
    shell, path, prefix = script.split()
    assert shell == "sh"
    assert (PROJECT / path).is_file()
    last = dict(steps)
    assert (last["USER"], last["HEALTHCHECK"]) == ("1000:1000", "NONE")
    assert last["ENV"].startswith(f"PATH={prefix}/bin:")
    assert f"--from=build {prefix} {prefix}" in [v for i, v in steps if i == "COPY"]
    assert json.loads(last["CMD"]) == ["mdpext", "--help"]
    subprocess.run([sys.executable, "-m", "mdpext_dask.cli", "--help"], check=True, capture_output=True)


def test_the_script_is_one_for_any_shell_and_its_extras_are_there() -> None:
    script = DOCKER / "install.sh"
    subprocess.run(["sh", "-n", script], check=True)
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "usage" in done.stderr
    found = re.search(r"\$\{2-([\w,]+)\}", script.read_text())
    assert found is not None
    known = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(found[1].split(",")) <= set(known)


# --- run ------------------------------------------------------------------------------------------


class Host:
    """Takes the place of an engine on this machine: its own ports, folders and programs."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.port, self.dashboard, self.of_worker = free_ports(3)
        (folder / "tmp").mkdir()

    def command(self, words: Sequence[str]) -> list[str]:
        here, folder = "127.0.0.1", str(self.folder)
        exactly = {"8786": f"{self.port}", ":8787": f"{here}:{self.dashboard}", "/tmp": f"{folder}/tmp"}
        jobs, scheduler = str(PROJECT / "workflows"), f"tcp://{here}:{self.port}"
        said = []
        for word in words:
            elsewhere = word.replace("tcp://scheduler:8786", scheduler).replace("/data", folder)
            said.append(exactly.get(word, elsewhere.replace("/jobs", jobs)))
        if said[0] != "mdpext":
            # Inside a container, whatever is bound is the container's own.
            said += ["--host", "127.0.0.1"]
        if "--no-dashboard" in said:
            said += ["--dashboard-address", f"127.0.0.1:{self.of_worker}"]
        return [str(self.programs / said[0]), *said[1:]]

    @contextmanager
    def running(self, words: Sequence[str]) -> Iterator[None]:
        command, env = self.command(words), self.environment
        with (self.folder / f"{words[1]}.log").open("wb") as log:
            how: dict[str, Any] = {"env": env, "cwd": self.folder, "start_new_session": True}
            process = subprocess.Popen(command, stdout=log, stderr=log, **how)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.folder / "tmp")}

    def wait_for(self, port: int) -> None:
        def answers() -> bool:
            url = f"http://127.0.0.1:{port}/health"
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.read() == b"ok")
            return False

        wait_until(answers, f"an answer at {port}")


def _run_services(
    host: Host, services: Services, *, wait: Sequence[str] = (), changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Start what the compose file starts, in its order, and return what the client answers."""
    overrides = [word for change in changes for word in ("--set", change)]
    with host.running(services["scheduler"]["command"]):
        host.wait_for(host.dashboard)
        with host.running(services["worker"]["command"]):
            if wait:
                words = [*wait[:-1], f"tcp://127.0.0.1:{host.port}"]
                subprocess.run(words, check=True, env=host.environment, timeout=100, capture_output=True)
            host.wait_for(host.of_worker)
            command = [*host.command(services["client"]["command"]), *overrides, "--json"]
            how: dict[str, Any] = {"env": host.environment, "cwd": host.folder, "timeout": 200}
            done = subprocess.run(command, **how, capture_output=True, text=True, check=False)
            return Outcome(done.returncode, done.stdout, done.stderr).document()


def _waiting() -> list[str]:
    """Return what a job's pod on Kubernetes does before it starts."""
    from mdpext_dask.compute.kubernetes import _runner
    from mdpext_dask.job.sections import ClusterSection

    (container,) = _runner(ClusterSection(image="image"), "name", "s3://store")["initContainers"]
    command: list[str] = container["command"]
    return [sys.executable, *command[1:]]


@pytest.mark.slow
def test_the_services_do_a_job_together(tmp_path: Path, services: Services) -> None:
    """With what is installed here, and on a smaller job than the demo.

    The way a job's pod on Kubernetes waits for workers is tried on the way.
    """
    host = Host(tmp_path, Path(sys.executable).parent)
    answer = _run_services(host, services, wait=_waiting(), changes=SMALLER)
    assert (answer["state"], answer["store"]) == ("complete", str(tmp_path / "manhattan.zarr"))
    open_mechanism(answer["store"], verify=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_image_and_services(tmp_path: Path, services: Services, dockerfile: list[dict[str, str]]) -> None:
    """From a copy of only what the image gets, with nothing of this environment."""
    source, prefix = tmp_path / "source", tmp_path / "opt"
    source.mkdir()
    for line in dockerfile:
        if line["instruction"] == "COPY" and not line["value"].startswith("--from"):
            *names, to = line["value"].split()
            for name in names:
                target = source / (f"{to}{name}" if to.endswith("/") else to)
                target.parent.mkdir(parents=True, exist_ok=True)
                if (PROJECT / name).is_dir():
                    shutil.copytree(PROJECT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(PROJECT / name, target)
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    script = ["sh", str(source / "deploy" / "docker" / "install.sh"), str(prefix)]
    subprocess.run(script, check=True, env={**plain, "PYTHON": sys.executable}, timeout=900)

    host = Host(tmp_path, prefix / "bin")

    def answer_of(*words: str) -> str:
        command = [str(prefix / "bin" / words[0]), *words[1:]]
        return subprocess.check_output(command, env=host.environment, cwd=tmp_path, text=True)

    assert answer_of("python", "-c", "import mdpext_dask as m; print(m.__file__)").startswith(str(prefix))
    code = "import dask, distributed, json; print(json.dumps(dask.config.get('distributed')))"
    settings = json.loads(answer_of("python", "-c", code))
    for key, value in DASK_CONFIG.items():
        found = settings
        for name in key.split(".")[1:]:
            found = found[name]
        assert found == value, key
    # The pages of the scheduler need a library that the package does not.
    answer_of("python", "-c", "import bokeh")
    # Names by which charts may call the programs.
    for program in ("dask-scheduler", "dask-worker"):
        answer_of(program, "--help")

    job = str(PROJECT / "workflows" / "manhattan.toml")
    planned = json.loads(answer_of("mdpext", "plan", job, "--json"))
    assert planned["records"] == 99_169
    answer = _run_services(host, services, changes=[])
    assert (answer["state"], answer["records"]) == ("complete", planned["records"])
