"""Auditing any mechanism, ours or anyone's, as people and programs do it."""

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from numpy.typing import NDArray
from pyproj import Geod

from mdpext_dask import audit, open_mechanism
from mdpext_dask.auditors.methods import Sampling, certify, compare_all, sample_pairs
from mdpext_dask.auditors.pairs import exhaustive, sampled
from mdpext_dask.auditors.promise import Promise
from mdpext_dask.auditors.result import VERDICTS, in_words, sentence, table
from mdpext_dask.auditors.source import ArraySource
from mdpext_dask.auditors.subject import store_subject
from mdpext_dask.compute.executor import open_executor
from mdpext_dask.compute.stages import Stages
from mdpext_dask.errors import ClusterError, DataError, IncompleteStoreError, SpecError, StoreError
from mdpext_dask.events import Event, StageStarted, silent
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build, init
from mdpext_dask.store import objects
from mdpext_dask.store.integrity import extra_shards
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.forged import attribute, flip_a_bit
from tests.support.inside import Capture, run_inside
from tests.support.reference import audited_epsilon, softmax, steepest
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
Array = NDArray[np.float64]

# Keys that other programs rely on, and what they may be.
CONTRACT = {
    "method": str, "holds": bool | None, "verdict": str, "epsilon_per_km": float, "triples_checked": int,
    "violations": int, "violation_ratio": float, "worst": dict, "seconds": float,
}  # fmt: skip
# What methods say of a good store, and whether that is a proof.
PASSING = {
    "certificate": ("holds", True), "exhaustive": ("holds", True), "sampled": ("no violation found", None),
    "boundary": ("shared rows agree", None),
}  # fmt: skip
WORST = {"x", "x_prime", "output", "log_ratio", "bound"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small_job: Job) -> Path:
    path = tmp_path_factory.mktemp("auditing") / "s.zarr"
    build(parse_job(small_job(outputs={"count": 6}, store={"block_cells": [1, 2]})), str(path))
    return path


@pytest.fixture(scope="module")
def exponential() -> tuple[Array, Array]:
    """Return the exponential mechanism at ε = 1/km on scattered places: rows and points."""
    rng = np.random.default_rng(7)
    points, outputs = rng.uniform(0, 8, size=(150, 2)), rng.uniform(0, 8, size=(9, 2))
    return softmax(-np.linalg.norm(points[:, None] - outputs, axis=-1) / 2), points


def random_pairs(method: str, pairs: int, **how: Any) -> Sampling | None:
    """Return how pairs are drawn, if they are."""
    return Sampling(pairs=pairs, **how) if method == "sampled" else None


def points_file(folder: Path, lonlat: Array) -> Path:
    pd.DataFrame(lonlat, columns=["lon", "lat"]).to_csv(folder / "p.csv", index=False, float_format="%.17g")
    return folder / "p.csv"


def answer(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Run the command line here; return exit code, the document it prints, and what it complains of."""
    code, out, err = run_inside(capsys, "audit", *arguments, "--json", "--progress", "none")
    return code, json.loads(out), err


# --- stores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["certificate", "exhaustive", "sampled", "boundary"])
def test_a_good_store_passes_every_auditor(finished: Path, method: str) -> None:
    report = audit(finished, method)
    assert (report.verdict, report.holds) == PASSING[method]
    assert report.passed
    assert report.details["receipts_compared"] == MechanismStore.open(str(finished)).plan.blocks
    assert not report.violations
    assert not report.findings
    assert json.loads((finished / "audit" / f"{method}.json").read_text())["holds"] is PASSING[method][1]
    assert open_mechanism(finished, verify=True)


def test_the_exhaustive_audit_of_a_store_is_the_truth(built: Path) -> None:
    store = MechanismStore.open(str(built))
    grid = store.grid
    rows = store.read("probability")
    truth = audited_epsilon(rows, grid.x_km(), grid.y_km(), 2)
    report = audit(built, "exhaustive")
    assert truth <= report.epsilon <= truth * (1 + 1e-9)
    assert report.epsilon <= store.attributes["epsilon_certified"]
    assert report.triples_checked == grid.records * (grid.records - 1) // 2 * store.outputs
    worst = report.worst
    (i, j), (i_prime, j_prime) = worst["record"], worst["record_prime"]
    assert worst["x"] == [grid.x_km()[i], grid.y_km()[j]]
    logs = np.log(rows.astype(float) / rows.sum(axis=-1, keepdims=True, dtype=float))[..., worst["output"]]
    assert worst["log_ratio"] == pytest.approx(abs(logs[i, j] - logs[i_prime, j_prime]), rel=1e-9)
    assert worst["log_ratio"] / worst["distance_km"] == pytest.approx(truth, rel=1e-9)


@pytest.mark.slow
def test_every_executor_gives_the_same_answers(built: Path, any_cluster: ClusterSection) -> None:
    store = MechanismStore.open(str(built))
    subject, sampling = store_subject(store), Sampling(pairs=20_000, random_seed=3)

    def answers(cluster: ClusterSection) -> list[dict[str, Any]]:
        with open_executor(cluster) as executor:
            work = executor, Stages(silent)
            proofs = certify(subject, *work), compare_all(subject, *work)
            reports = *proofs, sample_pairs(subject, sampling, *work)
        # Which pairs are compared besides the steepest depends on what is known when.
        unlike = ("seconds", "worst_triples", "triples_compared")
        return [{k: v for k, v in report.as_json().items() if k not in unlike} for report in reports]

    assert answers(any_cluster) == answers(ClusterSection(kind="inline"))


@pytest.mark.slow
def test_rows_of_a_region_s_skipped_blocks_are_compared_as_well(tmp_path: Path, small_job: Job) -> None:
    """What is not stored is promised all the same: the whole rectangle counts."""
    ring = [[-74.02, 40.70], [-73.97, 40.70], [-73.97, 40.80], [-74.02, 40.70]]
    region = tmp_path / "region.geojson"
    region.write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    job = small_job(domain={"cell_km": 2.0, "region": str(region)}, store={"block_cells": [1, 1]})
    path = tmp_path / "s.zarr"
    summary = build(parse_job(job), str(path))
    assert summary["blocks_skipped"] > 0
    report = audit(path, "exhaustive")
    assert report.holds
    assert report.records == summary["records"] > summary["records_inside"]
    for method in ("sampled", "boundary"):
        assert audit(path, method, sampling=random_pairs(method, 3000)).passed


def test_another_promise_than_the_store_s_own_leaves_the_store_alone(finished: Path) -> None:
    before = (finished / "zarr.json").read_bytes()
    stricter = audit(finished, "exhaustive", epsilon_per_km=0.3)
    assert stricter.verdict == "violated"
    assert stricter.violations > 0
    assert stricter.epsilon_per_km == 0.3
    assert not audit(finished, epsilon_per_km=0.3).holds
    assert audit(finished, "exhaustive", metric_p=1).epsilon < audit(finished, "exhaustive").epsilon
    assert (finished / "zarr.json").read_bytes() == before
    assert open_mechanism(finished)


def test_a_store_that_pairs_refute_is_refused_from_then_on(finished: Path) -> None:
    array = zarr.open_array(str(finished / "probability"), mode="r+")
    array[3, 4, 2] *= np.float32(4)
    report = audit(finished, "exhaustive")
    assert report.verdict == "violated"
    assert report.violations > 0
    assert [3, 4] in (report.worst["record"], report.worst["record_prime"])
    assert len(report.changed) == 1
    assert MechanismStore.open(str(finished)).state == "refused"


def test_a_sample_finds_what_is_common_and_says_so(finished: Path) -> None:
    array = zarr.open_array(str(finished / "probability"), mode="r+")
    array[5] = array[5][:, ::-1]
    report = audit(finished, "sampled", sampling=Sampling(pairs=5000, random_seed=1))
    assert report.verdict == "violated"
    low, high = report.details["violation_ratio_interval"]
    exact = audit(finished, "exhaustive").violation_ratio
    assert 0 < low <= exact <= high
    first = audit(finished, "sampled", sampling=Sampling(random_seed=1, stop_at_first=True))
    assert (first.verdict, first.details["stopped"]) == ("violated", "first violation")
    # And then it estimates nothing.
    assert first.details["violation_ratio_interval"] is None
    assert first.details["pairs"] < 1_000_000


@pytest.mark.parametrize("method", ["certificate", "exhaustive"])
def test_changed_missing_and_extra_shards_are_told_apart(finished: Path, method: str) -> None:
    store = MechanismStore.open(str(finished))
    (changed,), (missing,) = (store.shard_keys(store.plan[index]) for index in (0, 3))
    flip_a_bit(finished / changed)
    (finished / missing).unlink()
    extra = "probability/c/90/0/0"
    (finished / extra).parent.mkdir(parents=True)
    (finished / extra).write_bytes(b"what is this")
    report = audit(finished, method)
    assert not report.holds
    assert changed in report.changed
    assert (report.missing, report.extra) == ((missing,), (extra,))
    assert {0, 3} <= set(report.blocks_at_fault)
    assert all(key in sentence(report) for key in (changed, missing, extra))


def test_a_shard_of_no_block_does_not_stay_in_a_finished_store(tmp_path: Path, small_job: Job) -> None:
    path = tmp_path / "s.zarr"
    init(parse_job(small_job()), str(path))
    (path / "probability/c/90/0").mkdir(parents=True)
    (path / "probability/c/90/0/0").write_bytes(b"left by somebody")
    assert build(parse_job(small_job()), str(path))["state"] == "complete"
    assert not extra_shards(MechanismStore.open(str(path)))


def test_bytes_that_cannot_be_decoded_are_rows_that_cannot_be_used(finished: Path) -> None:
    store = MechanismStore.open(str(finished))
    block = store.plan[2]
    (finished / store.shard_keys(block)[0]).write_bytes(b"nothing")
    lost, records, outputs = math.prod(block.owned_shape), store.grid.records, store.outputs
    report = audit(finished, "exhaustive")
    assert (report.verdict, report.epsilon) == ("not a mechanism", math.inf)
    assert report.violations == (lost * (records - lost) + lost * (lost - 1) // 2) * outputs
    assert report.findings[0].count == lost * outputs
    assert audit(finished, "sampled", sampling=Sampling(pairs=2000)).verdict == "not a mechanism"
    assert audit(finished).verdict == "not a mechanism"


def test_unfinished_stores_are_incomplete(tmp_path: Path, small_job: Job) -> None:
    path = tmp_path / "s.zarr"
    init(parse_job(small_job()), str(path))
    for method in ("certificate", "exhaustive", "sampled", "boundary"):
        refused(IncompleteStoreError, "missing", audit, path, method)


@pytest.mark.slow
def test_a_store_behind_a_url_is_audited_like_any_other(built: Path) -> None:
    url = "memory://auditing/s.zarr"
    target = objects.open_objects(url)
    for path in built.rglob("*"):
        if path.is_file():
            objects.put_bytes(target, str(path.relative_to(built)), path.read_bytes())
    for method in ("certificate", "exhaustive", "sampled", "boundary"):
        assert audit(url, method, sampling=random_pairs(method, 2000)).passed


def test_blocks_of_the_boundary_check_are_chosen(finished: Path) -> None:
    every, some = audit(finished, "boundary"), audit(finished, "boundary", blocks=(1, 2))
    for key in ("boundary_rows_checked", "receipts_compared"):
        assert 0 < some.details[key] < every.details[key]


@pytest.mark.parametrize("method", PASSING)
def test_no_method_passes_changed_bytes(finished: Path, method: str, capsys: Capture) -> None:
    """Changed inside a block, where no row is shared, and back within ε: only the receipt can tell."""
    array = zarr.open_array(str(finished / "probability"), mode="r+")
    array[1, 1, 0] = np.nextafter(array[1, 1, 0], np.float32(0))
    some = ["--pairs", "300", "--random-seed", "1"] if method == "sampled" else []
    code, found, complaint = answer(capsys, finished, "--method", method, *some)
    assert (code, found["holds"], found["verdict"]) == (1, False, "changed since it was written")
    assert (found["changed"], found["blocks_at_fault"]) == (["probability/c/0/0/0"], [0])
    assert "bytes changed since they were written: probability/c/0/0/0" in complaint
    # A triple that keeps its bound is not blamed.
    assert complaint.count("worst triple") == complaint.count("(kept)") == (method != "boundary")
    proof = method in ("certificate", "exhaustive")
    assert ("breaks no bound, but is not what was certified" in complaint) == proof
    assert MechanismStore.open(str(finished)).state == "refused"


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1.05, "what is there now breaks no bound, but is not what was certified"),
        (3.0, "rows with a total above what the sampler can hold: 1, first in record 0"),
        (1e-3, "worst triple: output 0 between records [0, 0] and "),
    ],
)
def test_of_changed_rows_it_is_said_whether_the_worst_pair_breaks_its_bound(
    finished: Path, factor: float, said: str
) -> None:
    rows = MechanismStore.open(str(finished), mode="r+").array("probability")
    output = int(np.asarray(rows[0, 0]).argmax()) if factor > 1 else 0
    rows[0, 0, output] = np.asarray(rows[0, 0])[output] * np.float32(factor)
    report = audit(finished)
    assert said in sentence(report)
    assert "worst triple: output " in sentence(report)
    assert ("(kept)" in sentence(report)) == (factor > 1)
    if factor < 1:
        assert report.worst["log_ratio"] > report.worst["bound"]


def test_the_table_of_verdicts_is_that_of_the_code() -> None:
    page = Path(__file__).parents[2] / "docs" / "auditing.md"
    lines = [one.strip("| ").split(" | ") for one in page.read_text().splitlines() if one.startswith("| *")]
    names = {None: "`null`", True: "`true`", False: "`false`"}
    expected = [
        [f"*{verdict}*", meaning, names[holds], str(int(holds is False))]
        for verdict, (meaning, holds) in VERDICTS.items()
    ]
    assert [[cells[0], cells[-3], *cells[-2:]] for cells in lines] == expected


# --- anyone's -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "npz", "csv", "csv.gz", "parquet", "zarr"])
def test_formats_agree(kind: str, exponential: tuple[Array, Array], tmp_path: Path, capsys: Capture) -> None:
    rows, points = exponential
    frame = pd.DataFrame(rows, columns=[f"y{k}" for k in range(rows.shape[1])])
    path, places = tmp_path / f"mechanism.{kind}", tmp_path / "points.csv"
    pd.DataFrame(points, columns=["x_km", "y_km"]).to_csv(places, index=False)
    if kind == "npy":
        np.save(path, rows)
    elif kind == "npz":
        np.savez(path, probability=rows)
    elif kind == "parquet":
        frame.to_parquet(path)
    elif kind == "zarr":
        zarr.save_array(str(path), rows)
    else:
        frame.to_csv(path, index=False, float_format="%.17g")
    code, found, complaint = answer(
        capsys, path, "--points", places, "--epsilon-per-km", 1, "--metric-p", 2, "--method", "exhaustive"
    )
    assert (code, complaint) == (0, "")
    assert found["epsilon_audited"] == pytest.approx(steepest(rows, points), rel=1e-9)
    assert found["records"] == len(rows)


@pytest.mark.parametrize(
    "method", ["certificate", "exhaustive", pytest.param("sampled", marks=pytest.mark.slow)]
)
def test_json_contract(method: str, built: Path, tmp_path: Path, capsys: Capture) -> None:
    store = shutil.copytree(built, tmp_path / "s.zarr")
    code, found, _ = answer(capsys, store, "--method", method)
    assert code == 0
    for key, kind in CONTRACT.items():
        assert isinstance(found[key], kind), key
    assert isinstance(found["epsilon_certified" if method == "certificate" else "epsilon_audited"], float)
    assert set(found["worst"]) >= WORST
    code, found, complaint = answer(capsys, store, "--method", method, "--epsilon-per-km", 0.05)
    assert (code, found["holds"]) == (1, False)
    assert len(complaint.splitlines()) == 1
    assert found["violations"] > 0


def test_a_lattice_in_any_order_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdpext_dask.auditors.certificate._BAND_BYTES", 1000)
    rng = np.random.default_rng(2)
    x, y = np.sort(rng.uniform(0, 5, 13)), np.sort(rng.uniform(0, 5, 9))
    points = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
    rows = softmax(-np.linalg.norm(points[:, None] - rng.uniform(0, 5, size=(4, 2)), axis=-1) / 2)
    shuffled = rng.permutation(len(points))
    report = audit(rows[shuffled], "certificate", points=points[shuffled], epsilon_per_km=2.0)
    assert report.holds
    assert len(report.details["epsilon_by_block"]) > 3
    assert steepest(rows, points) <= report.epsilon <= 1.3 * steepest(rows, points)
    refused(SpecError, "lattice", audit, rows[:-1], "certificate", points=points[:-1], epsilon_per_km=2.0)


@pytest.mark.parametrize(
    ("where", "factor", "kind"),
    [
        ((3, 1), np.nan, "not finite"), ((3, 1), np.inf, "not finite"), ((3, 1), -1, "negative"),
        ((3,), 0, "rows of zeros"), ((3,), 0.9, "add up to 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["exhaustive", pytest.param("sampled", marks=pytest.mark.slow)])
def test_what_is_no_distribution(
    where: tuple[int, ...], factor: float, kind: str, method: str, exponential: Any
) -> None:
    rows, points = exponential[0].copy(), exponential[1]
    rows[where] *= factor
    report = audit(rows, method, points=points, epsilon_per_km=1.0)
    assert not report.holds
    (finding,) = report.findings
    assert kind in finding.kind
    assert finding.first_record == 3
    assert kind in sentence(report)
    json.dumps(report.as_json(), allow_nan=False)


def test_outputs_impossible_for_some_break_any_promise(exponential: tuple[Array, Array]) -> None:
    rows, points = exponential
    assert audit(np.insert(rows, 2, 0.0, axis=1), points=points, epsilon_per_km=1.0).holds
    sometimes = rows.copy()
    sometimes[5, 1] = 0.0
    sometimes /= sometimes.sum(axis=1, keepdims=True)
    report = audit(sometimes, points=points, epsilon_per_km=1.0)
    assert report.epsilon == math.inf
    assert report.violations >= len(rows) - 1
    assert report.worst["log_ratio"] == "inf"
    assert "possible from one of them only" in in_words(report.worst)


def test_tolerance_is_zero_by_default_and_says_what_it_hides(exponential: tuple[Array, Array]) -> None:
    rows, points = exponential
    strict = audit(rows, points=points, epsilon_per_km=0.4)
    tolerant = audit(rows, points=points, epsilon_per_km=0.4, tolerance=0.05)
    assert 0 < tolerant.violations < strict.violations
    assert tolerant.violations + tolerant.details["hidden_violations"] == strict.violations
    blind = audit(rows, points=points, epsilon_per_km=0.4, tolerance=10.0)
    assert (blind.verdict, blind.holds) == ("within tolerance", False)
    assert blind.epsilon > 0.4
    assert f"hides {strict.violations:,} violations" in sentence(blind)
    assert any("hides" in text for label, text in table(blind) if label == "tolerance")
    needless = audit(rows, points=points, epsilon_per_km=2.0, tolerance=0.05)
    assert (needless.verdict, needless.holds) == ("holds", True)
    drawn = Sampling(pairs=5000, random_seed=1)
    sample = audit(rows, "sampled", points=points, epsilon_per_km=0.4, tolerance=10.0, sampling=drawn)
    assert (sample.verdict, sample.passed) == ("within tolerance", False)
    with pytest.raises(SpecError, match="tolerance"):
        audit(rows, "certificate", points=points, epsilon_per_km=0.4, tolerance=0.1)


# --- on the ground --------------------------------------------------------------------------------


def geodesics(first: Array, second: Array) -> Array:
    """Return lengths in km between places, lon and lat, of shapes (n, 2) and (m, 2)."""
    a, b = np.broadcast_arrays(first[:, None], second)
    return np.asarray(Geod(ellps="WGS84").inv(a[..., 0], a[..., 1], b[..., 0], b[..., 1])[2]) / 1000


@pytest.mark.parametrize("centre", [(12.5, 41.9), (179.9, -17.0), (25.0, 69.0)])
def test_places_in_degrees_are_compared_by_geodesics(centre: tuple[float, float], tmp_path: Path) -> None:
    """A promise that is kept by a hair on the ground is kept, one that is broken by a hair is broken.

    In a plane both would be doubtful: it stretches distances by more than the hair.
    """
    rng = np.random.default_rng(5)
    lonlat = np.array(centre) + rng.uniform(-0.2, 0.2, size=(60, 2))
    lonlat[:, 0] = (lonlat[:, 0] + 180) % 360 - 180
    rows = softmax(-geodesics(lonlat, lonlat[:7]) / 2)
    logs = np.log(rows)
    apart = geodesics(lonlat, lonlat) + np.diag(np.full(60, np.inf))
    truth = (np.abs(logs[:, None] - logs).max(axis=-1) / apart).max()
    points = points_file(tmp_path, lonlat)
    kept, broken = (audit(rows, points=points, epsilon_per_km=truth * f) for f in (1 + 1e-9, 1 - 1e-9))
    assert kept.holds
    assert kept.recomputed >= 1
    assert truth <= kept.epsilon <= truth * (1 + 1e-9)
    assert (broken.violations, broken.verdict) == (1, "violated")
    assert broken.worst["log_ratio"] / broken.worst["distance_km"] == pytest.approx(truth, rel=1e-9)
    assert "x_lonlat" in broken.worst


def test_places_too_far_apart_for_one_plane_are_refused(tmp_path: Path) -> None:
    points = points_file(tmp_path, np.array([[0, 0], [60, 50], [120, 10]]))
    refused(SpecError, "x_km,y_km", audit, np.full((3, 2), 0.5), points=points, epsilon_per_km=1.0)


# --- what would mislead an auditor ----------------------------------------------------------------


def test_a_store_does_not_choose_who_audits_it(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that a store names could answer anything; it is not even called."""
    monkeypatch.setattr("mdpext_dask.compute.executor.CONNECT_SECONDS", 1)
    store = MechanismStore.open(str(finished), mode="r+")
    cluster = {"kind": "address", "address": "tcp://127.0.0.1:1", "workers": 1}
    store.update(job={**store.attributes["job"], "cluster": cluster})
    assert audit(finished, workers=1).holds
    refused(ClusterError, r"127\.0\.0\.1:1", audit, finished, scheduler="tcp://127.0.0.1:1")


@pytest.mark.parametrize("method", ["certificate", pytest.param("exhaustive", marks=pytest.mark.slow)])
def test_a_store_that_was_refused_does_not_hold_the_second_time(finished: Path, method: str) -> None:
    (finished / "seed/cost/zarr.json").unlink()
    assert not audit(finished).holds
    assert MechanismStore.open(str(finished)).state == "refused"
    assert not audit(finished, method).holds


def test_what_a_store_was_made_of_must_not_change(finished: Path) -> None:
    shutil.rmtree(finished / "prior" / "c")
    assert "problem_sha256" in audit(finished).changed


@pytest.mark.parametrize("method", ["sampled", "boundary"])
def test_attributes_are_held_against_the_rest_by_every_auditor(finished: Path, method: str) -> None:
    attribute(finished, epsilon_certified=0.1)
    report = audit(finished, method, sampling=random_pairs(method, 500))
    assert report.verdict == "changed since it was written"
    assert "epsilon_certified" in report.changed
    # An attribute is no byte of a row.
    assert sentence(report) == "does not hold: not what was certified: epsilon_certified"


@pytest.mark.parametrize("p", [1.0, math.inf])
def test_another_metric_is_no_tampering(finished: Path, p: float) -> None:
    report = audit(finished, metric_p=p, epsilon_per_km=5.0)
    assert not report.changed
    assert report.holds


def test_what_only_the_charge_for_the_plane_forbids_is_not_called_violated(built: Path) -> None:
    """Between ε in the plane and ε on the ground nothing is proved, and nothing is broken."""
    store = MechanismStore.open(str(built))
    assert store.attributes["distortion"] > 1e-7
    steepest = audit(built, "exhaustive").epsilon
    for method in ("certificate", "exhaustive"):
        report = audit(built, method, epsilon_per_km=steepest * (1 + store.attributes["distortion"] / 50))
        assert report.verdict == "not proved"
        assert not report.holds
    assert audit(built, "exhaustive", epsilon_per_km=steepest * 0.99).verdict == "violated"


@pytest.mark.parametrize("apart_deg", [1e-9, 1e-8, 1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("factor", [1 - 1e-4, 1 + 1e-4])
def test_places_a_hair_apart_need_the_geodesic(apart_deg: float, factor: float, tmp_path: Path) -> None:
    """A plane's rounding is more than the difference there; the geodesic decides, or nobody does."""
    lonlat = np.array([[-73.9, 40.7], [-73.9 + apart_deg, 40.7], [-73.7, 40.9], [-74.1, 40.5]])
    rows = np.full((4, 2), 0.5)
    rows[1] = [0.5 * math.exp(-0.5), 1 - 0.5 * math.exp(-0.5)]
    largest = np.abs(np.log(rows[1]) - np.log(rows[0])).max()
    epsilon = largest / geodesics(lonlat[:1], lonlat[1:2])[0, 0] * factor
    verdict = audit(rows, points=points_file(tmp_path, lonlat), epsilon_per_km=epsilon).verdict
    assert verdict in (("holds", "not proved") if factor > 1 else ("violated", "not proved"))
    assert apart_deg < 1e-6 or verdict != "not proved"


def test_places_next_to_the_middle_are_not_taken_for_one_place(tmp_path: Path) -> None:
    points = points_file(tmp_path, np.array([[10.0, 50.0], [10.000000003, 50.0]]))
    rows = np.array([[0.5, 0.5], [0.50000000001, 0.49999999999]])
    assert audit(rows, points=points, epsilon_per_km=1.0).holds


def test_numbers_that_float64_cannot_compare_are_refused() -> None:
    rows = np.array([[0.5, 0.5], [0.1, 0.9]])
    refused(SpecError, "no coordinate", audit, rows, points=[[0, 0], [1e200, 0]], epsilon_per_km=1e-300)
    refused(SpecError, "promises nothing", audit, rows, points=[[0, 0], [1, 0]], epsilon_per_km=2e12)


def test_distances_that_have_no_square_are_decided_exactly() -> None:
    rows, points = np.array([[0.5, 0.5], [0.55, 0.45]]), np.array([[0.0, 0.0], [1e-170, 0.0]])
    assert audit(rows, points=points, epsilon_per_km=1e171).holds
    assert audit(rows, points=points, epsilon_per_km=1e169).verdict == "violated"


@pytest.mark.slow
def test_large_exponents_of_the_metric_end() -> None:
    rng = np.random.default_rng(0)
    points, rows = rng.uniform(0, 0.1, size=(2000, 2)), rng.dirichlet(np.ones(3), size=2000)
    report = audit(
        rows, "sampled", points=points, epsilon_per_km=1e6, metric_p=1000, sampling=Sampling(pairs=900)
    )
    assert report.details["pairs"] >= 900


def test_lists_of_numbers_are_mechanisms_as_well() -> None:
    assert audit([[0.5, 0.5], [0.6, 0.4]], points=[[0, 0], [1, 0]], epsilon_per_km=1).holds
    for wrong in ([[0.5, "x"]], [[0.5], [0.4, 0.6]], np.array([object(), None])):
        refused(DataError, "", audit, wrong, points=[[0, 0], [1, 0]], epsilon_per_km=1)


def test_an_audit_without_end_is_stopped_by_the_clock(exponential: tuple[Array, Array]) -> None:
    rows, points = exponential
    sampling = Sampling(pairs=10**15, seconds=0.2, random_seed=5)
    report = audit(rows, "sampled", points=points, epsilon_per_km=1.0, sampling=sampling)
    assert report.details["stopped"] == "time"
    assert report.seconds < 30
    again = Sampling(pairs=report.details["pairs"], random_seed=5)
    repeated = audit(rows, "sampled", points=points, epsilon_per_km=1.0, sampling=again)
    assert repeated.details["strata"] == report.details["strata"]


def test_coordinates_of_outputs_that_are_lost_are_changes_not_crashes(finished: Path) -> None:
    (finished / "output_lon" / "c" / "0").unlink()
    report = audit(finished)
    assert "projection" in report.changed
    json.dumps(report.as_json(), allow_nan=False)


# --- careless users -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("none.npy --epsilon-per-km 1", "no such file"), ("none.zarr", "no such store"),
        ("rows.npy", "--epsilon-per-km"), ("rows.npy --epsilon-per-km 1", "--points"),
        ("rows.npy --epsilon-per-km -1 --points p.csv", "--epsilon-per-km"),
        ("rows.npy --epsilon-per-km nan --points p.csv", "--epsilon-per-km"),
        ("rows.npy --epsilon-per-km 1 --points short.csv", "2"),
        ("rows.npy --epsilon-per-km 1 --points p.csv --metric-p 0.5", "--metric-p"),
        ("rows.npy --epsilon-per-km 1 --points p.csv --metric-p two", "--metric-p"),
        ("rows.npy --epsilon-per-km 1 --points p.csv --tolerance -1", "--tolerance"),
        ("rows.npy --epsilon-per-km 1 --points p.csv --method boundary", "store"),
        ("rows.npy --epsilon-per-km 1 --points p.csv --method guess", "--method"),
        ("rows.npy --epsilon-per-km 1 --points p.csv --pairs 9", "--pairs"),
        ("s.zarr --points p.csv", "--points"), ("s.zarr --method sampled --pairs 0", "--pairs"),
        ("s.zarr --method sampled --seconds -3", "--seconds"),
        ("s.zarr --method sampled --design clever", "--design"),
        ("s.zarr --method sampled --confidence 95", "--confidence"),
        ("s.zarr --method boundary --blocks 3", "A:B"),
        ("s.zarr --method boundary --blocks 1:300", "there are no blocks"),
        ("s.zarr --blocks 0:1", "--blocks"),
        ("p.csv --epsilon-per-km 1", "p.csv"),
    ],
)  # fmt: skip
def test_careless_audits_get_one_line(
    arguments: str,
    complaint: str,
    built: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.full((4, 3), 1 / 3))
    Path("p.csv").write_text("x_km,y_km\n0,0\n1,0\n0,1\n3,4\n")
    Path("short.csv").write_text("x_km,y_km\n0,0\n1,0\n")
    Path("s.zarr").symlink_to(built)
    code, found, line = answer(capsys, *arguments.split())
    assert code == 2
    assert len(line.splitlines()) == 1
    assert complaint in line
    assert found["exit_code"] == 2


def test_a_folder_that_is_nothing_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused((DataError, StoreError), "", audit, tmp_path / "empty", epsilon_per_km=1.0)


# --- around ---------------------------------------------------------------------------------------


def test_people_read_where_and_how_much(built: Path, capsys: Capture) -> None:
    texts = dict(table(audit(built, "exhaustive", epsilon_per_km=0.3)))
    assert "does not hold" in texts["verdict"]
    assert "(lat, lon)" in texts["worst"]
    assert "km apart" in texts["worst"]
    assert "as likely from one as from the other" in texts["worst"]
    said = run_inside(capsys, "audit", built, "--epsilon-per-km", "0.3", "--progress", "none").stdout
    assert "km apart" in " ".join(said.split())


def test_progress_is_told_by_stage(built: Path) -> None:
    events: list[Event] = []
    audit(built, "exhaustive", epsilon_per_km=1.0, observer=events.append)
    stages = [event for event in events if isinstance(event, StageStarted)]
    assert [stage.stage for stage in stages] == ["bytes", "near", "far"]
    assert stages[1].total == MechanismStore.open(str(built)).plan.blocks


@pytest.mark.parametrize(
    "outputs", [pytest.param(outputs, marks=pytest.mark.slow) for outputs in (200, 50, 20, 3)]
)
def test_tasks_need_the_memory_that_is_predicted(outputs: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 30, size=(1_000_000 // outputs, 2))
    centres = rng.uniform(0, 30, size=(outputs, 2))
    rows = softmax(-np.linalg.norm(points[:, None] - centres, axis=-1) / 2).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    source = ArraySource.of(tmp_path / "rows.npy", points, tmp_path)
    promise = Promise(1.0, 2.0)

    def measured(task: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            task()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    near = measured(lambda: [exhaustive.compare_within(source, n, promise) for n in range(source.parts)])
    assert near == pytest.approx(exhaustive.peak_bytes(source), rel=0.3)
    pairs = sampled.batch_pairs(outputs)
    for kind in sampled.DESIGNS:
        drawn = measured(lambda kind=kind: sampled.sample_batch(source, promise, kind, 0, 0, pairs))
        assert drawn == pytest.approx(sampled.peak_bytes(source, kind, pairs), rel=0.3)
