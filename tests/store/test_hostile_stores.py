"""Stores that anybody may have made: commands refuse them in a line, and read nothing that never ends."""

import contextlib
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.errors import MdpextError, StoreError
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.sampling.mechanism import open_mechanism
from mdpext_dask.store import objects, schema
from mdpext_dask.store.mechanism_store import ROOT_KEY
from tests.support.inside import Capture, run_inside
from tests.support.refusals import refusal

LARGEST_BYTES = 64 * 2**20
# Of messages about what would fill the memory.
SIZES = "bytes; no more than", "grid in its attributes is damaged", "has the shape", "has chunks of"
Harm = Callable[[Path], object]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_job: Callable[..., Any]) -> Path:
    path = tmp_path_factory.mktemp("built") / "s.zarr"
    build(parse_job(small_job()), str(path))
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "s.zarr"))


def put(key: str, *keys: str, value: Any) -> Harm:
    """Return a change of one value of a document."""

    def change(store: Path) -> None:
        document = json.loads((store / key).read_text())
        if keys[0] == "attributes":
            document["attributes"] = schema.as_read(document["attributes"])
        holder = document
        for name in keys[:-1]:
            holder = holder[name]
        if value is None:
            del holder[keys[-1]]
        else:
            holder[keys[-1]] = value
        (store / key).write_text(json.dumps(document))

    return change


def device(key: str) -> Harm:
    def change(store: Path) -> None:
        (store / key).unlink()
        (store / key).symlink_to("/dev/null")

    return change


def long(key: str, size: int) -> Harm:
    # Sparse: it takes no room here, and would take all memory where it is read.
    return lambda store: os.truncate(store / key, size)


def gone(key: str) -> Harm:
    return lambda store: (store / key).unlink()


def grid(name: str, value: Any) -> Harm:
    return put(ROOT_KEY, "attributes", "grid", name, value=value)


def commands(store: Path, folder: Path) -> list[list[object]]:
    points = folder / "points.csv"
    points.write_text("lon,lat\n-73.97,40.78\n")
    quiet = ["--workers", 1, "--progress", "none"]
    return [
        ["status", store, "--json"],
        ["sample", store, points, "-o", folder / "out.csv"],
        ["audit", store, *quiet],
        ["evaluate", store, "--bound-seconds", 0, "--no-attacks", *quiet],
        ["export", store, "-o", folder / "c.mdp"],
    ]


# What is wrong, and words of the message of a command that needs it.
HARMS: dict[str, tuple[Harm, str]] = {
    "a device for rows": (device("probability/c/0/0/0"), "is no file"),
    "a device for the certificate": (device("audit/certificate.json"), "has lost its certificate"),
    "a device for the root": (device(ROOT_KEY), "is no file"),
    "a device for the prior": (device("prior/c/0/0"), "is no file"),
    "endless rows": (long("probability/c/0/0/0", 2**33), "bytes; no more than"),
    "an endless receipt": (long("receipts/00000000.json", 2**27), "bytes; no more than"),
    "endless outputs": (long("output_lon/c/0", 2**34), "bytes; no more than"),
    "more cells than fit": (grid("cells_x", 10**9), "grid in its attributes is damaged"),
    "a row without end": (grid("refine", [10**4, 10**4, 10**4]), "grid in its attributes is damaged"),
    "no spacing": (grid("refine", [10**400]), "grid in its attributes is damaged"),
    "many outputs": (put("probability/zarr.json", "shape", value=[13, 29, 10**9]), "has 1000000000 outputs"),
    "many records": (put("probability/zarr.json", "shape", value=[10**6, 10**6, 8]), "has the shape"),
    "a large prior": (put("prior/zarr.json", "shape", value=[10**6, 10**6]), "has the shape"),
    "many kept cells": (put("kept/zarr.json", "shape", value=[10**6, 10**6]), "has the shape"),
    "large chunks": (
        put("x/zarr.json", "chunk_grid", "configuration", "chunk_shape", value=[10**10]), "has chunks of",
    ),
    "no numbers": (
        put("x/zarr.json", "data_type", value={"name": "null_terminated_bytes",
                                               "configuration": {"length_bytes": 10**9}}), "x",
    ),
    "codecs of others": (
        put("output_x/zarr.json", "codecs", value=[{"name": "transpose", "configuration": {"order": [0]}},
                                                   {"name": "bytes", "configuration": {"endian": "little"}}]),
        "is written with transpose",
    ),
    "no number in the notes": (put(ROOT_KEY, "attributes", "notes", value=[float("nan")]), "no JSON, such"),
    "no number as a figure": (put(ROOT_KEY, "attributes", "loss_km", value=float("inf")), "no JSON, such"),
    "no epsilon": (put(ROOT_KEY, "attributes", "epsilon_per_km", value=0.0), "epsilon_per_km in its"),
    "a job without a name": (put(ROOT_KEY, "attributes", "job", "job", value=None), "job in its attributes"),
    "a job without a method": (
        put(ROOT_KEY, "attributes", "job", "extension", "method", value=7), "job in its attributes",
    ),
    "lost places of nodes": (gone("problem/node_xy/c/0/0"), "problem_sha256"),
    "other copies": (put(ROOT_KEY, "consolidated_metadata", value=[1]), ""),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if number % 3 else ()) for number, name in enumerate(HARMS)],
)
def test_every_command_refuses_in_a_line(name: str, store: Path, tmp_path: Path, capfd: Capture) -> None:
    harm, said = HARMS[name]
    harm(store)
    told = ""
    for command in commands(store, tmp_path):
        outcome = run_inside(capfd, *command)
        assert outcome.returncode in (0, 1, 2, 3), (command, outcome.stderr)
        assert "Traceback" not in outcome.stderr, command
        told += outcome.stderr
    assert said in told


@pytest.mark.parametrize("name", [name for name, (_, said) in HARMS.items() if said in SIZES])
def test_nothing_large_is_made_for_what_a_store_says(name: str, store: Path) -> None:
    HARMS[name][0](store)
    tracemalloc.start()
    try:
        with contextlib.suppress(MdpextError):
            open_mechanism(store, verify=True)
        assert tracemalloc.get_traced_memory()[1] < LARGEST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", ["probability/c/0/0/0", "audit/certificate.json", ROOT_KEY, "kept/c/0/0"])
def test_a_pipe_is_not_waited_for(key: str, store: Path) -> None:
    (store / key).unlink()
    os.mkfifo(store / key)
    found = objects.open_objects(str(store))
    for use in (
        lambda: objects.get_bytes(found, key),
        lambda: objects.get_json(found, key),
        lambda: open_mechanism(store, verify=True).dataset.load(),
    ):
        assert f"{key} is no file" in refusal(use, kind=StoreError)


def test_links_to_files_are_followed(store: Path, tmp_path: Path) -> None:
    shutil.move(store / "probability", tmp_path / "rows")
    (store / "probability").symlink_to(tmp_path / "rows")
    mechanism = open_mechanism(store, verify=True)
    assert mechanism.sample(lon=-73.97, lat=40.78).shape == (1, 2)
    assert float(mechanism.dataset.probability.sum()) == pytest.approx(mechanism.places.grid.records)


def test_not_a_number_is_no_json(store: Path) -> None:
    found = objects.open_objects(str(store))
    for text in (b'{"a": NaN}', b"[-Infinity]", b"NaN", b"[" * 10**5, b"\xff"):
        (store / "x.json").write_bytes(text)
        assert objects.get_json(found, "x.json") is None
