"""The few commands of ``kubectl`` that are used here, for where it is not; asks ``$KUBECONFIG``'s server."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

PATHS = {
    "ConfigMap": "/api/v1/namespaces/default/configmaps",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
    "DaskJob": "/apis/kubernetes.dask.org/v1/namespaces/default/daskjobs",
    "Pod": "/api/v1/namespaces/default/pods",
}


def ask(method: str, path: str, body: Any = None) -> str | None:
    server = json.loads(Path(os.environ["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]["server"]
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data=data, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        sys.exit(f"error: {json.load(error)['message']}")


def main(arguments: list[str]) -> None:
    words = [word for word in arguments if word not in ("--namespace", "default")]
    match words:
        case ["apply", "--filename", file]:
            for one in yaml.safe_load_all(Path(file).read_text()):
                path = f"{PATHS[one['kind']]}/{one['metadata']['name']}"
                if ask("PATCH", path, one) is None:
                    ask("POST", PATHS[one["kind"]], one)
        case ["get", "daskjob", name, "--ignore-not-found", "--output", "json"]:
            print(ask("GET", f"{PATHS['DaskJob']}/{name}") or "")
        case ["get", "pods", "--selector", selector, "--output", "json"]:
            print(ask("GET", f"{PATHS['Pod']}?labelSelector={selector}"))
        case ["logs", pod, "--container", "runner", _]:
            text = ask("GET", f"{PATHS['Pod']}/{pod}/log")
            sys.exit(f"error: no pod {pod}") if text is None else print(text, end="")
        case ["delete", "daskjob", name, *options]:
            assert set(options) == {"--ignore-not-found", "--wait", "--cascade=foreground"}
            path = f"{PATHS['DaskJob']}/{name}"
            ask("DELETE", path)
            while ask("GET", path) is not None:
                time.sleep(0.1)
        case _:
            sys.exit(f"error: unknown command {arguments}")


if __name__ == "__main__":
    main(sys.argv[1:])
