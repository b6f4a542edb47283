"""From Python and notebooks: jobs without files, what is shown of values, nothing on standard output."""

import asyncio
import inspect
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import mdpext_dask
from mdpext_dask import (
    AuditReport,
    BoundRequest,
    JobSpec,
    PlainLines,
    Sampling,
    audit,
    build,
    evaluate,
    load_job,
    open_mechanism,
    report,
)  # fmt: skip
from mdpext_dask.errors import SpecError, StoreError
from mdpext_dask.job.spec import parse_job, with_overrides
from tests.support.problems import write_toml
from tests.support.refusals import refusal, refused

NO_BOUND = BoundRequest(seconds=0)
Job = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> str:
    # A name that would be markup, if it were let.
    path = tmp_path_factory.mktemp("interface") / "<b>&'\".zarr"
    build(JobSpec.of(**small_job()), path)
    return str(path)


# --- the package ----------------------------------------------------------------------------------


def test_every_public_name_is_there_and_types_are() -> None:
    assert (Path(mdpext_dask.__file__).parent / "py.typed").is_file()
    for name in mdpext_dask.__all__:
        assert getattr(mdpext_dask, name) is not None
        assert name in dir(mdpext_dask)
    with pytest.raises(AttributeError, match="no_such"):
        _ = mdpext_dask.no_such


def test_packages_are_the_functions_of_their_names(built: str) -> None:
    from mdpext_dask.auditors.audit import audit as audit_function
    from mdpext_dask.evaluation.evaluate import evaluate as evaluate_function
    from mdpext_dask.reports.report import report as report_function

    functions = ((audit, audit_function), (evaluate, evaluate_function), (report, report_function))
    for package, function in functions:
        assert inspect.signature(package) == inspect.signature(function)
    assert audit(built).holds
    facts = evaluate(built, bound=NO_BOUND, attacks=None)
    assert facts["loss_km"] == open_mechanism(built).dataset.attrs["loss_km"]


# --- jobs -----------------------------------------------------------------------------------------


def test_a_job_from_python_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "points.csv").write_text("lon,lat\n-73.98,40.75\n")
    domain = {"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2, 2], "metric_p": "inf"}
    domain["bbox"] = [-74.03, 40.69, -73.9, 40.88]
    outputs = {"choose": "file", "file": "points.csv"}
    job = {"domain": domain, "privacy": {"epsilon_per_km": 1}, "outputs": outputs}
    write_toml(tmp_path / "job.toml", job)
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.of(
        domain={
            "roads": "builtin:manhattan", "cell_km": np.float64(3), "refine": (np.int64(2), 2),
            "bbox": (-74.03, 40.69, -73.9, 40.88), "metric_p": math.inf,
        },
        privacy={"epsilon_per_km": 1},
        outputs={"choose": "file", "file": Path("points.csv")},
    )  # fmt: skip
    assert (spec, spec.fingerprint()) == (load_job(tmp_path / "job.toml"), load_job("job.toml").fingerprint())
    assert JobSpec.of(domain=spec.domain, privacy=spec.privacy, outputs=spec.outputs) == spec


@pytest.mark.parametrize(
    "sections",
    [{"privacy": {"epsilon_per_km": -1.0}}, {"privacy": {"epsilon": 1.0}}, {"outputs": {"choose": "prior"}},
     {"privacy": {"epsilon_per_km": True}}, {"domain": {"cell_km": "3"}}, {"nothing": {"a": 1}}],
)  # fmt: skip
def test_errors_are_those_of_a_file(small_job: Job, sections: dict[str, Any]) -> None:
    job = {**small_job(), **sections}
    expected = refusal(lambda: parse_job(job), kind=SpecError)
    assert refusal(lambda: JobSpec.of(**job), kind=SpecError) == expected


def test_a_section_has_keys(small_job: Job) -> None:
    with pytest.raises(SpecError, match=r"^job: privacy: must be keys and values, got 1.0$"):
        JobSpec.of(**{**small_job(), "privacy": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "overrides"),
    [
        *(({section: {key: value}}, [f"{section}.{key}={value}"]) for section, key, value in (
            ("privacy", "epsilon_per_km", 2), ("outputs", "choose", "seeds"), ("domain", "place", "Rome"))),
        ({"loss": {"kind": "file", "file": "a.npz"}}, ["loss.kind=file", "loss.file=a.npz"]),
        ({"domain": {"metric_p": math.inf}, "job": {"name": "x"}}, ["domain.metric_p=inf", "job.name=x"]),
        ({"privacy": {"epsilon_per_km": 9.0}, "extension": {}}, ["privacy.epsilon_per_km=9.0"]),
    ],
)  # fmt: skip
def test_another_job_by_overrides(small_job: Job, sections: dict[str, Any], overrides: list[str]) -> None:
    job = small_job()
    del job["extension"]  # so that the job chooses for itself, and again
    spec = JobSpec.of(**job)
    before = spec.canonical()
    assert (spec.replace(**sections), spec.canonical()) == (with_overrides(spec, overrides), before)
    assert spec.replace() == spec


def test_another_job_that_is_none_is_one_line(small_job: Job) -> None:
    spec = JobSpec.of(**small_job())
    said = refusal(lambda: spec.replace(privacy={"epsilom_per_km": 1}), kind=SpecError)
    assert said.startswith("small: privacy.epsilom_per_km: unknown key; did ")
    refusal(lambda: spec.replace(nowhere={"a": 1}), "nowhere", kind=SpecError)


# --- calls ----------------------------------------------------------------------------------------


def test_calls_write_nothing(built: str, small_job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert build(JobSpec.of(**small_job()), built)["state"] == "complete"
    open_mechanism(built, verify=True).sample(lon=-73.98, lat=40.75)
    audit(built)
    evaluate(built, bound=NO_BOUND, attacks=None)
    assert capfd.readouterr() == ("", "")


def test_progress_on_standard_error(small_job: Job, tmp_path: Path, capfd: Any) -> None:
    build(JobSpec.of(**small_job()), tmp_path / "m.zarr", observer=PlainLines())
    out, err = capfd.readouterr()
    assert out == ""
    assert "seed: " in err
    assert "extend: " in err


@pytest.mark.slow
def test_local_processes_start_inside_a_running_event_loop(small_job: Job, tmp_path: Path) -> None:
    """As a notebook's kernel is one."""

    async def cell() -> dict[str, Any]:
        return build(JobSpec.of(**small_job(cluster={"kind": "local", "workers": 1})), tmp_path / "m.zarr")

    assert asyncio.run(cell())["state"] == "complete"


_UNGUARDED = """
import sys
from mdpext_dask import JobSpec, build
build(JobSpec.of(domain={"roads": "builtin:manhattan", "cell_km": 3.0, "refine": [2]},
                 privacy={"epsilon_per_km": 1.0, "budget": "bound"}, outputs={"count": 8}), sys.argv[1])
"""


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_UNGUARDED)
    command = [sys.executable, str(script), str(tmp_path / "m.zarr")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert 'a script needs if __name__ == "__main__": around what it calls' in last
    script.write_text(script.read_text().replace("\nbuild(", '\nif __name__ == "__main__":\n  build('))
    subprocess.run(command, check=True)
    assert open_mechanism(tmp_path / "m.zarr").epsilon_per_km == 1


# --- what notebooks show --------------------------------------------------------------------------


def text_of(html: str) -> str:
    """Return the text of HTML that is well-formed, or fail."""
    return " ".join(ElementTree.fromstring(html).itertext())


def test_a_mechanism_is_shown_as_a_card(built: str) -> None:
    mechanism = open_mechanism(built)
    html = mechanism._repr_html_()
    assert built in text_of(html)
    assert "<b>" not in html
    for said in ("ε = 1 per km", f"{mechanism.epsilon_certified:.6g}", "expected loss"):
        assert said in text_of(html)
    tree = ElementTree.fromstring(html)
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}circle")) == len(mechanism.output_lonlat)
    assert repr(mechanism).startswith("<Mechanism ")


@pytest.mark.parametrize("method", ["certificate", "exhaustive", "sampled", "boundary"])
def test_an_audit_is_shown_and_read_back(built: str, method: str) -> None:
    sampling = Sampling(pairs=100, random_seed=1) if method == "sampled" else None
    report = audit(built, method, sampling=sampling)
    shown = text_of(report._repr_html_())
    assert report.verdict in shown
    assert built in shown
    again = AuditReport.from_json(json.loads(json.dumps(report.as_json())))
    assert (again.as_json(), again.holds, again.worst) == (report.as_json(), report.holds, report.worst)
    # As older versions left them, with one word for all that passed.
    verdict = "holds" if method == "boundary" else report.verdict
    assert AuditReport.from_json({**report.as_json(), "verdict": verdict}) == again


def test_a_broken_promise_is_shown_with_its_triple() -> None:
    rows, points = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 0.0], [1.0, 0.0]])
    report = audit(rows, points=points, epsilon_per_km=1)
    assert "log ratio inf against bound 1" in text_of(report._repr_html_())
    again = AuditReport.from_json(json.loads(json.dumps(report.as_json())))
    assert again == report
    assert math.isinf(again.epsilon)
    for broken in (
        {},
        {**report.as_json(), "findings": [1]},
        {**report.as_json(), "method": "?"},
        {**report.as_json(), "verdict": "fine"},
    ):
        refused(StoreError, "not an audit report", AuditReport.from_json, broken)


def test_a_card_survives_what_is_no_text(built: str, tmp_path: Path) -> None:
    odd = tmp_path / "a\udcff.zarr"
    try:
        shutil.copytree(built, odd)
    except OSError:
        pytest.skip("this file system has names of text only")
    assert r"a\udcff.zarr" in text_of(open_mechanism(odd)._repr_html_())


def test_a_mechanism_stands_for_its_store(built: str, tmp_path: Path) -> None:
    mechanism = open_mechanism(built)
    assert audit(mechanism).epsilon == audit(built).epsilon
    few = {"bound": BoundRequest(0), "attacks": None}
    assert evaluate(mechanism, **few) == evaluate(built, **few)
    assert report(mechanism, tmp_path / "r.html", bound_seconds=0)["store"] == built
