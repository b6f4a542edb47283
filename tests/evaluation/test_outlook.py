"""What a job will lose, as it is estimated beforehand, beside what its store loses."""

from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.evaluation import outlook as outlook_module
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.outlook import Outlook, outlook
from mdpext_dask.job.spec import JobSpec, parse_job
from mdpext_dask.pipeline.run import build
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.problem.geometry import RoadGeometry, build_geometry


def job_of(**sections: dict[str, Any]) -> JobSpec:
    job: dict[str, Any] = {
        "domain": {"roads": "builtin:manhattan", "bbox": [-74.003, 40.735, -73.968, 40.762]},
        "privacy": {"epsilon_per_km": 5.0},
        "extension": {"method": "noise"},
        "cluster": {"kind": "inline"},
    }
    for name, keys in sections.items():
        job.setdefault(name, {}).update(keys)
    return parse_job(job)


def outlook_of(spec: JobSpec) -> Outlook:
    geometry = build_geometry(spec)
    assert isinstance(geometry, RoadGeometry)
    return outlook(Problem.of_domain(spec, build_domain(spec, geometry)), geometry)


@pytest.mark.slow
def test_it_is_near_what_the_store_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job_of()
    built = build(spec, tmp_path / "s.zarr")
    sampled = outlook_of(spec)
    assert sampled.loss_km == pytest.approx(built["loss_km"], rel=0.06)
    assert sampled.loss_km < sampled.plain_km
    assert outlook_of(spec) == sampled
    # With all blocks that noise reaches, what is left is the certificate's strictness and the floor.
    monkeypatch.setattr(outlook_module, "_BLOCKS", 10**6)
    assert outlook_of(spec).loss_km == pytest.approx(built["loss_km"], rel=0.01)


def test_distances_in_the_plane_have_no_road_nodes() -> None:
    found = outlook_of(job_of(loss={"kind": "euclidean"}, outputs={"count": 30}))
    assert 0 < found.loss_km < found.plain_km
