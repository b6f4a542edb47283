"""Manifests held against the schemas of what would read them: Kubernetes, and the Dask operator's own.

An API server drops fields that it does not know without a word, so they are looked for here.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import dask_kubernetes
import jsonschema
import kubernetes_validate
import yaml

OPERATOR_CHART = (
    Path(dask_kubernetes.__file__).parent / "operator" / "deployment" / "helm" / "dask-kubernetes-operator"
)
DASK_API = "kubernetes.dask.org/v1"
# Of Kubernetes: what most clusters run, down to the oldest whose schema is at hand.
KUBERNETES_VERSIONS = ("1.27", "1.30", kubernetes_validate.latest_version().rpartition(".")[0])


def complaints(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a manifest, with where."""
    if manifest["apiVersion"] != DASK_API:
        return [said for version in KUBERNETES_VERSIONS for said in _of_kubernetes(manifest, version)]
    schema = _schemas()[manifest["kind"]]
    body = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata")}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(body)
    wrong = [f"{error.json_path}: {error.message}" for error in errors]
    return wrong + [f"{where}: unknown field" for where in _unknown(body, schema, "$")]


def operator_values() -> dict[str, Any]:
    """Return the default values of the operator's chart."""
    values: dict[str, Any] = yaml.safe_load((OPERATOR_CHART / "values.yaml").read_text())
    return values


def unknown_values(given: Any, known: Any, where: str = "") -> list[str]:
    """Return the keys of a chart's values that it does not have; an empty mapping takes anything."""
    if not isinstance(given, Mapping) or not isinstance(known, Mapping) or not known:
        return []
    found = []
    for key, value in given.items():
        found += unknown_values(value, known[key], f"{where}.{key}") if key in known else [f"{where}.{key}"]
    return found


@cache
def _schemas() -> dict[str, Any]:
    found = {}
    for path in (OPERATOR_CHART / "crds").glob("*.yaml"):
        for resource in yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            version = next(v for v in resource["spec"]["versions"] if v["name"] == "v1")
            found[resource["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return found


def _of_kubernetes(manifest: Mapping[str, Any], version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{version}: {'.'.join(map(str, error.path))}: {error.message}"


def _unknown(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, Mapping):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            if key in properties:
                yield from _unknown(item, properties[key], f"{where}.{key}")
            elif isinstance(others, Mapping):
                yield from _unknown(item, others, f"{where}.{key}")
            elif not others:
                yield f"{where}.{key}"
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _unknown(item, schema.get("items", {}), f"{where}[{position}]")
