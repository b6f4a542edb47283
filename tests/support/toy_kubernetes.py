"""A toy Kubernetes on this machine: an API server that keeps objects, and a node that runs pods as processes.

It is enough for the Dask operator's real controller, for ``kubectl`` and for what they are asked to do here.
It knows nothing of networks, volumes, limits, rights or probes: names of services become loopback addresses,
``/data`` and ``/tmp`` are folders, and containers are processes with this environment's programs. Manifests
of the operator's kinds are refused where they break its schemas or have fields that a real server would drop.
"""

import base64
import contextlib
import copy
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

from tests.support.manifest_checks import complaints
from tests.support.processes import free_ports

Thing = dict[str, Any]
DASK = "kubernetes.dask.org/v1"
# (group/version, plural) -> kind; all are in namespaces.
KINDS = {
    ("v1", "pods"): "Pod", ("v1", "services"): "Service", ("v1", "configmaps"): "ConfigMap",
    ("v1", "events"): "Event", ("apps/v1", "deployments"): "Deployment",
    ("networking.k8s.io/v1", "networkpolicies"): "NetworkPolicy",
    (DASK, "daskjobs"): "DaskJob", (DASK, "daskclusters"): "DaskCluster",
    (DASK, "daskworkergroups"): "DaskWorkerGroup", (DASK, "daskautoscalers"): "DaskAutoscaler",
}  # fmt: skip
GROUPS = sorted({api for api, _ in KINDS if "/" in api})
_EXTENSIONS = "apiextensions.k8s.io/v1"
NAMESPACE = "default"


class Objects:
    """What an API server keeps, and who is told of changes."""

    def __init__(self) -> None:
        self._things: dict[tuple[str, str, str], Thing] = {}
        self.version = 0
        self._history: list[tuple[tuple[str, str], str, Thing]] = []
        self.changed = threading.Condition()

    def all(self, api: str, plural: str) -> list[Thing]:
        with self.changed:
            return [copy.deepcopy(t) for key, t in self._things.items() if key[:2] == (api, plural)]

    def get(self, api: str, plural: str, name: str) -> Thing | None:
        with self.changed:
            return copy.deepcopy(self._things.get((api, plural, name)))

    def put(self, api: str, plural: str, thing: Thing) -> Thing:
        with self.changed:
            key = (api, plural, thing["metadata"]["name"])
            new = key not in self._things
            if new:
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                own = {"uid": str(uuid.uuid4()), "namespace": NAMESPACE, "creationTimestamp": now}
                thing["metadata"] |= own
            elif thing == self._things[key]:
                return copy.deepcopy(thing)
            self._record("ADDED" if new else "MODIFIED", key, thing)
            self._things[key] = thing
            if thing["metadata"].get("deletionTimestamp") and not thing["metadata"].get("finalizers"):
                self._remove(key)
            return copy.deepcopy(thing)

    def delete(self, api: str, plural: str, name: str) -> None:
        """Delete a thing, or mark it where somebody has to finish something first."""
        with self.changed:
            key = (api, plural, name)
            thing = self._things.get(key)
            if thing is not None and not thing["metadata"].get("finalizers"):
                self._remove(key)
            elif thing is not None and not thing["metadata"].get("deletionTimestamp"):
                self.put(
                    api, plural, merged(thing, {"metadata": {"deletionTimestamp": "2000-01-01T00:00:00Z"}})
                )

    def since(self, version: int, api: str, plural: str) -> tuple[int, list[tuple[str, Thing]]]:
        with self.changed:
            found = [(how, t) for of, how, t in self._history[version:] if of == (api, plural)]
            return len(self._history), copy.deepcopy(found)

    def _record(self, how: str, key: tuple[str, str, str], thing: Thing) -> None:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((key[:2], how, copy.deepcopy(thing)))
        self.changed.notify_all()

    def _remove(self, key: tuple[str, str, str]) -> None:
        thing = self._things.pop(key)
        self._record("DELETED", key, copy.deepcopy(thing))
        uid = thing["metadata"]["uid"]
        for other in list(self._things):
            owners = self._things.get(other, {}).get("metadata", {}).get("ownerReferences", [])
            if any(owner["uid"] == uid for owner in owners):
                self.delete(*other)


def merged(thing: Any, patch: Any) -> Any:
    """Return a thing after a merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    old = thing if isinstance(thing, dict) else {}
    new = {key: merged(old.get(key), value) for key, value in patch.items() if value is not None}
    return {**{key: value for key, value in old.items() if key not in patch}, **new}


def edited(thing: Any, steps: list[Thing]) -> Any:
    """Return a thing after a JSON patch (RFC 6902), of the steps that clients here use."""
    result = copy.deepcopy(thing)
    for step in steps:
        *way, last = [p.replace("~1", "/").replace("~0", "~") for p in step["path"].split("/")[1:]]
        place = result
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            last = len(place) if last == "-" else int(last)
        if step["op"] == "remove":
            del place[last]
        elif step["op"] == "add" and isinstance(place, list):
            place.insert(last, step["value"])
        elif step["op"] in ("add", "replace"):
            place[last] = step["value"]
    return result


class Request(NamedTuple):
    """What is asked of one kind of thing; `name` is empty where all of them are meant."""

    api: str
    plural: str
    name: str
    part: str | None
    query: dict[str, str]
    body: Any


class Refusal(Exception):
    """An answer that is an error: code, reason and message."""


def selects(selector: str, labels: dict[str, str]) -> bool:
    parts = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(name) == value.lstrip("=") for name, _, value in parts)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects
    log_of: Callable[[str], str | None]
    port_of: Callable[[str, str], int]

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: Any, code: int = 200, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self._head(code, Content_Type=kind, Content_Length=str(len(data)))
        self.wfile.write(data)

    def _head(self, code: int, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _handle(self) -> None:
        url = urlparse(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        found = re.fullmatch(
            r"/(?:api/(v1)|apis/([^/]+/[^/]+))(?:/namespaces/[^/]+)?/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?",
            url.path,
        )
        try:
            if found is not None and (found[1] or found[2], found[3]) in KINDS:
                request = Request(found[1] or found[2], found[3], found[4] or "", found[5], query, body)
                getattr(self, f"_{self.command.lower()}")(request)
            elif self.command != "GET" or (answer := discovery(url.path)) is None:
                raise Refusal(404, "NotFound", f"no {url.path}")
            elif query.get("watch"):
                self._watch("", "", query)
            else:
                self._answer(answer)
        except Refusal as error:
            code, reason, message = error.args
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
            self._answer({**status, "reason": reason, "message": message, "code": code}, code)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815

    def _found(self, asked: Request) -> Thing:
        thing = self.objects.get(asked.api, asked.plural, asked.name)
        if thing is None:
            raise Refusal(404, "NotFound", f'{asked.plural} "{asked.name}" not found')
        return thing

    def _get(self, asked: Request) -> None:
        api, plural, name, part, query, _ = asked
        if part == "portforward":
            self._forward(type(self).port_of(name, query["ports"]))
        elif part == "log":
            text = type(self).log_of(name)
            if text is None:
                raise Refusal(400, "BadRequest", f"container of {name} is waiting to start")
            self._answer(text, kind="text/plain")
        elif name:
            self._answer(self._found(asked))
        elif query.get("watch") in ("true", "1", "True"):
            self._watch(api, plural, query)
        else:
            with self.objects.changed:
                items = [thing for thing in self.objects.all(api, plural) if self._asked(thing, query)]
                version = str(self.objects.version)
            self._answer(_list(f"{KINDS[api, plural]}List", items, version) | {"apiVersion": api})

    @staticmethod
    def _asked(thing: Thing, query: dict[str, str]) -> bool:
        named = re.search(r"metadata\.name=([^,]+)", query.get("fieldSelector", ""))
        if named is not None and named[1] != thing["metadata"]["name"]:
            return False
        return selects(query.get("labelSelector", ""), thing["metadata"].get("labels") or {})

    def _watch(self, api: str, plural: str, query: dict[str, str]) -> None:
        self._head(200, Content_Type="application/json", Transfer_Encoding="chunked")
        until = time.monotonic() + float(query.get("timeoutSeconds", 60))
        position = int(query.get("resourceVersion") or 0)
        try:
            while time.monotonic() < until:
                position, changes = self.objects.since(position, api, plural)
                for how, thing in changes:
                    if self._asked(thing, query):
                        line = json.dumps({"type": how, "object": thing}).encode() + b"\n"
                        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                        self.wfile.flush()
                with self.objects.changed:
                    self.objects.changed.wait_for(lambda at=position: self.objects.version > at, timeout=0.5)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _forward(self, port: int) -> None:
        """Pass bytes on to a port here: messages of a websocket (RFC 6455), each after a channel's number."""
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self._head(101, Upgrade="websocket", Connection="Upgrade", Sec_WebSocket_Accept=accept)
        self.close_connection = True
        with socket.create_connection(("127.0.0.1", port)) as there:

            def send(data: bytes, opcode: int = 2) -> None:
                # The shortest form of the length that fits, as the standard wants it.
                length = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
                self.wfile.write(bytes([128 | opcode]) + length + data)
                self.wfile.flush()

            def back() -> None:
                with contextlib.suppress(OSError, ValueError):
                    while data := there.recv(32768):
                        send(b"\0" + data)
                    send(b"", 8)

            # Each channel begins with its port.
            send(b"\0" + port.to_bytes(2, "little"))
            send(b"\1" + port.to_bytes(2, "little"))
            threading.Thread(target=back, daemon=True).start()
            with contextlib.suppress(OSError):
                while head := self.rfile.read(2):
                    length = head[1] & 127
                    if length > 125:
                        length = int.from_bytes(self.rfile.read(2 if length == 126 else 8), "big")
                    mask, data = self.rfile.read(4), self.rfile.read(length)
                    if head[0] & 15 == 8:
                        break
                    times = -(-length // 4)
                    plain = int.from_bytes(data, "big") ^ int.from_bytes((mask * times)[:length], "big")
                    if head[0] & 15 in (0, 2):
                        there.sendall(plain.to_bytes(length, "big")[1:])

    def _post(self, asked: Request) -> None:
        api, plural, thing = asked.api, asked.plural, asked.body
        meta = thing.setdefault("metadata", {})
        meta.setdefault("name", meta.get("generateName", "") + uuid.uuid4().hex[:5])
        if self.objects.get(api, plural, meta["name"]) is not None:
            raise Refusal(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
        thing |= {"apiVersion": api, "kind": KINDS[api, plural]}
        if plural != "events" and (wrong := complaints(thing)):
            raise Refusal(422, "Invalid", f"{plural}: {wrong[0]}")
        self._answer(self.objects.put(api, plural, thing), 201)

    def _patch(self, asked: Request) -> None:
        with self.objects.changed:
            change = edited if isinstance(asked.body, list) else merged
            changed = self.objects.put(asked.api, asked.plural, change(self._found(asked), asked.body))
        self._answer(changed)

    def _delete(self, asked: Request) -> None:
        self._found(asked)
        self.objects.delete(*asked[:3])
        left = self.objects.get(*asked[:3])
        self._answer(left or {"kind": "Status", "apiVersion": "v1", "status": "Success"})


def _list(kind: str, items: list[Thing], version: str = "0") -> Thing:
    return {"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}


def discovery(path: str) -> Thing | None:
    """Return what an API server says of itself, or the few lists that are always empty here."""
    path = path.rstrip("/")
    namespace = {"metadata": {"name": NAMESPACE, "uid": "0", "resourceVersion": "1"}}
    versions = [{"groupVersion": api, "version": api.split("/")[1]} for api in [*GROUPS, _EXTENSIONS]]
    named = ((one["groupVersion"].split("/")[0], one) for one in versions)
    groups = [{"name": name, "versions": [one], "preferredVersion": one} for name, one in named]
    paths = [f"apis/{api}" if "/" in api else f"api/{api}" for api in ("v1", *GROUPS)]
    known: dict[str, Thing] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/openapi/v3": {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in paths}},
        "/api/v1/namespaces": _list("NamespaceList", [namespace]),
        f"/api/v1/namespaces/{NAMESPACE}": {"kind": "Namespace", "apiVersion": "v1", **namespace},
        f"/apis/{_EXTENSIONS}/customresourcedefinitions": _list("CustomResourceDefinitionList", []),
    }
    if path in known:
        return known[path]
    if path.startswith("/openapi/v3/"):
        # All that kubectl looks for: that the server looks for misspelt fields itself.
        found = {}
        for (api, plural), kind in KINDS.items():
            if path.endswith(f"/{api}"):
                group, _, version = api.rpartition("/")
                said = {"parameters": [{"name": "fieldValidation", "in": "query"}]}
                said["x-kubernetes-group-version-kind"] = {"group": group, "version": version, "kind": kind}
                found[f"/{plural}/{{name}}"] = {"patch": said}
        return {"openapi": "3.0.0", "info": {"title": "toy", "version": "1"}, "paths": found}
    asked = re.fullmatch(r"/(?:api/(v1)|apis/([^/]+/[^/]+))", path)
    if asked is None:
        return None
    api = asked[1] or asked[2]
    look = ["get", "list", "watch"]
    verbs = [*look, "create", "delete", "patch", "update"]
    resources = [
        {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for (of, plural), kind in KINDS.items()
        if of == api
        for name in (plural, f"{plural}/status")
    ]
    wide = {"v1": "Namespace", _EXTENSIONS: "CustomResourceDefinition"}.get(api)
    if wide is not None:
        entry = {"name": f"{wide.lower()}s", "singularName": wide.lower(), "namespaced": False}
        resources.append({**entry, "kind": wide, "verbs": look})
    return {"kind": "APIResourceList", "groupVersion": api, "resources": resources}


class Node:
    """Runs pods as processes, and makes the pods of deployments."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects, self._folder = objects, folder
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._ports: dict[tuple[str, str], int] = {}
        self._choosing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        for name in ("data", "tmp", "job", "log"):
            (folder / name).mkdir()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        for name in list(self.processes):
            self._kill(name)

    def log_of(self, pod: str) -> str | None:
        path = self._folder / "log" / f"{pod}.txt"
        return path.read_text() if path.exists() else None

    def kill(self, component: str) -> None:
        """Kill the processes of a component's pods, without a word."""
        for pod in self._objects.all("v1", "pods"):
            if pod["metadata"]["labels"]["dask.org/component"] == component:
                for process in self.processes.get(pod["metadata"]["name"], []):
                    _end(process)

    def port_of(self, pod: str, number: str) -> int:
        """Return the port of this machine that stands for one of a pod of a scheduler."""
        found: Any = self._objects.get("v1", "pods", pod)
        listens = f":{number}" if number == "8787" else number
        return self.port(found["metadata"]["labels"]["dask.org/cluster-name"], listens)

    def port(self, pod: str, number: str) -> int:
        """Return the port of this machine that stands for a container's."""
        with self._choosing:  # pods start at the same time
            if (pod, number) not in self._ports:
                (self._ports[pod, number],) = free_ports(1)
            return self._ports[pod, number]

    def _work(self) -> None:
        while not self._stop.wait(0.1):
            for deployment in self._objects.all("apps/v1", "deployments"):
                self._keep_up(deployment)
            self._open_services()
            pods = {pod["metadata"]["name"]: pod for pod in self._objects.all("v1", "pods")}
            for name in set(self.processes) - set(pods):
                self._kill(name)
            for name, pod in pods.items():
                if name not in self.processes:
                    self.processes[name] = []
                    threading.Thread(target=self._run, args=(name, pod), daemon=True).start()

    def _open_services(self) -> None:
        """Give services a status, once the operator is done with their cluster.

        They have it from the start on real servers. But the operator calls a cluster running when it sees it,
        and pending when it has made the last part; on a slow machine the one may come before the other.
        """
        clusters = self._objects.all(DASK, "daskclusters")
        if all(cluster.get("status", {}).get("phase") in ("Pending", "Running") for cluster in clusters):
            for service in self._objects.all("v1", "services"):
                if "status" not in service:
                    self._objects.put("v1", "services", {**service, "status": {"loadBalancer": {}}})

    def _keep_up(self, deployment: Thing) -> None:
        meta, template = deployment["metadata"], deployment["spec"]["template"]
        mine = [pod for pod in self._objects.all("v1", "pods") if _owner(pod) == meta["uid"]]
        alive = [pod for pod in mine if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")]
        for pod in mine:
            if pod not in alive:
                self._objects.delete("v1", "pods", pod["metadata"]["name"])
        if not alive:
            owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": meta["name"], "uid": meta["uid"]}
            name = f"{meta['name']}-{uuid.uuid4().hex[:5]}"
            labels = template["metadata"]["labels"]
            pod_meta = {"name": name, "labels": labels, "ownerReferences": [{**owner, "controller": True}]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": pod_meta, "spec": template["spec"]}
            self._objects.put("v1", "pods", pod)

    def _run(self, name: str, pod: Thing) -> None:
        self._say(name, {"phase": "Pending"})
        containers = [("init", one) for one in pod["spec"].get("initContainers", [])]
        containers += [("main", one) for one in pod["spec"]["containers"]]
        for when, container in containers:
            log = self._folder / "log" / (f"{name}.txt" if when == "main" else f"{name}-init.txt")
            with log.open("wb") as file:
                command, env = self._command(name, pod, container), self._environment(name, pod, container)
                how: dict[str, Any] = {"cwd": self._folder / "tmp", "start_new_session": True}
                process = subprocess.Popen(command, env=env, stdout=file, stderr=file, **how)
            self.processes.setdefault(name, []).append(process)
            if when == "main":
                well = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
                self._say(name, {"phase": "Running", "conditions": well})
            code = process.wait()
            # As a shell would say it.
            code = 128 - code if code < 0 else code
            state = {"name": container["name"], "state": {"terminated": {"exitCode": code}}}
            if when == "main" or code:
                key = "containerStatuses" if when == "main" else "initContainerStatuses"
                self._say(name, {"phase": "Failed" if code else "Succeeded", key: [state]})
                return

    def _say(self, name: str, status: Thing) -> None:
        with self._objects.changed:
            pod = self._objects.get("v1", "pods", name)
            if pod is not None:
                self._objects.put("v1", "pods", merged(pod, {"status": status}))

    def _kill(self, name: str) -> None:
        for process in self.processes.pop(name, []):
            _end(process)
            process.wait()

    def _here(self, text: str, name: str, pod: Thing) -> str:
        """Return a text with places of this machine instead of the container's."""
        cluster = pod["metadata"]["labels"]["dask.org/cluster-name"]
        service = f"tcp://{cluster}-scheduler.{NAMESPACE}.svc.cluster.local:8786"
        text = text.replace(service, f"tcp://127.0.0.1:{self.port(cluster, '8786')}")
        text = text.replace("/job/job.toml", str(self._folder / "job" / name / "job.toml"))
        return text.replace("/data/", f"{self._folder}/data/")

    def _command(self, name: str, pod: Thing, container: Thing) -> list[str]:
        labels = pod["metadata"]["labels"]
        for volume in pod["spec"]["volumes"]:
            if "configMap" in volume:
                config: Any = self._objects.get("v1", "configmaps", volume["configMap"]["name"])
                for file, text in config["data"].items():
                    path = self._folder / "job" / name / file
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(self._here(text, name, pod))
        values = {item["name"]: item["value"] for item in container["env"]}
        words = []
        for given in [*container["command"], *container.get("args", [])]:
            word = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], given)
            word = self._here(word, name, pod)
            words.append(str(self._folder / "tmp") if word == "/tmp" else word)
        if words[0] == "dask":
            # Pods have addresses of their own; here all share one.
            own = labels["dask.org/cluster-name"] if words[1] == "scheduler" else name
            words = [str(self.port(own, w)) if w == "8786" else w for w in words]
            at = words.index("--dashboard-address") + 1
            words[at] = f"127.0.0.1:{self.port(own, words[at])}"
            words += ["--host", "127.0.0.1"]
        programs = Path(sys.executable).parent
        return [str(programs / words[0]) if words[0] in ("dask", "python") else words[0], *words[1:]]

    def _environment(self, name: str, pod: Thing, container: Thing) -> dict[str, str]:
        values = {item["name"]: self._here(item["value"], name, pod) for item in container["env"]}
        values["HOME"] = str(self._folder / "tmp")
        # The same kernels of linear algebra as in this process, or the last bits of a seed differ.
        same = {name: value for name, value in os.environ.items() if name == "OPENBLAS_CORETYPE"}
        return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **same, **values}


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _owner(thing: Thing) -> str | None:
    owners = thing["metadata"].get("ownerReferences") or [{}]
    uid: str | None = owners[0].get("uid")
    return uid


class ToyKubernetes:
    """An API server and a node, for as long as the context lasts; ``kubeconfig`` says how to reach it."""

    def __init__(self, folder: Path) -> None:
        self.objects = Objects()
        self.node = Node(self.objects, folder)
        members = {"objects": self.objects, "log_of": self.node.log_of, "port_of": self.node.port_of}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler_", (Handler,), members))
        self._server.daemon_threads = True
        self.kubeconfig = folder / "kubeconfig"
        own = {
            "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"},
            "user": {"token": "toy"},
            "context": {"cluster": "toy", "user": "toy", "namespace": NAMESPACE},
        }
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "toy"}
        parts = {f"{name}s": [{"name": "toy", name: part}] for name, part in own.items()}
        self.kubeconfig.write_text(json.dumps({**config, **parts}))

    def __enter__(self) -> "ToyKubernetes":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.node.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()
        self._server.shutdown()
        self._server.server_close()
