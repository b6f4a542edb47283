"""Reports: they say what the store says, fetch nothing, escape everything, and hide no failure."""

import base64
import hashlib
import itertools
import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from mdpext_dask import AttackRequest, BoundRequest, evaluate
from mdpext_dask.errors import IncompleteStoreError, SpecError
from mdpext_dask.evaluation import plain
from mdpext_dask.evaluation.baselines.noise import exponential_mechanism, plain_laplace, planar_laplace
from mdpext_dask.evaluation.baselines.problem import Problem
from mdpext_dask.evaluation.bound import lower_bound
from mdpext_dask.evaluation.bound.kept import BOUND
from mdpext_dask.job.spec import parse_job
from mdpext_dask.pipeline.run import build, init, partition
from mdpext_dask.problem.grid import Grid
from mdpext_dask.reports.evaluated import read_kept_bound
from mdpext_dask.reports.page import costs, html, maps, thinned, words
from mdpext_dask.reports.page.provenance import job_toml
from mdpext_dask.reports.page.thinned import Thinned, gathered, positions, quantised, step_for
from mdpext_dask.reports.report import SECTIONS, report
from mdpext_dask.store import receipts
from mdpext_dask.store.local_chunks import floor_of
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.remap import Remap, content_of, merge_columns, write_remap
from mdpext_dask.store.rows import rows_of
from tests.support import pages
from tests.support.forged import attribute, flip_a_bit, shard_of
from tests.support.inside import run_inside
from tests.support.loss_files import job as loss_job
from tests.support.loss_files import write as write_loss_file
from tests.support.pages import Page
from tests.support.regions import u_job

Job = Callable[..., dict[str, dict[str, Any]]]
Command = Callable[..., Any]
Made = tuple[dict[str, Any], Page]
MEGABYTE = 1e6
NOISE: dict[str, dict[str, Any]] = {
    "privacy": {"epsilon_per_km": 4.0, "budget": "certified"}, "extension": {"method": "noise"},
    "outputs": {"count": 40},
}  # fmt: skip
FEW_NUMBERS = 3000


@pytest.fixture(scope="module")
def built(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished store of several blocks."""
    path = tmp_path_factory.mktemp("report") / "small.zarr"
    build(parse_job(small_job(store={"block_cells": [2, 2]})), str(path))
    return path


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be spoilt."""
    return shutil.copytree(built, tmp_path / "copy.zarr")


@pytest.fixture(scope="module")
def whole(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return what is said of the report on it, and the report."""
    return made(built, tmp_path_factory.mktemp("whole") / "r.html", bound_seconds=2)


@pytest.fixture(scope="module")
def noise(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished store of noise, most of whose 40 outputs are far from a record."""
    path = tmp_path_factory.mktemp("noise") / "noise.zarr"
    build(parse_job(small_job(**NOISE, store={"block_cells": [2, 2]})), str(path))
    return path


def made(url: Path, file: Path, bound_seconds: float = 0, **options: Any) -> Made:
    said = report(str(url), file, bound_seconds=bound_seconds, overwrite=True, **options)
    return said, Page(file.read_text(encoding="utf-8"))


# --- what it says ---------------------------------------------------------------------------------


def test_it_says_what_the_store_and_the_evaluation_say(built: Path, whole: Made) -> None:
    said, found = whole
    opened, cost = (
        MechanismStore.open(str(built)),
        evaluate(str(built), bound=BoundRequest(seconds=0), attacks=AttackRequest(releases=0)),
    )
    attributes = opened.attributes
    assert said["sections"] == list(SECTIONS)
    assert set(SECTIONS) <= set(found.texts)
    assert (said["holds"], said["state"]) == (True, "complete")
    assert said["epsilon_certified"] == attributes["epsilon_certified"]
    assert said["bytes"] == len(found.html.encode()) < 5 * MEGABYTE
    assert "Holds" in found.texts["verdict"]
    certified = words.rounded_up(attributes["epsilon_certified"])
    assert f"ε = {certified}/km in the plane" in found.texts["promise"]
    certificate = found.texts["certificate"]
    assert attributes["chunk_hashes"]["digest"] in certificate
    assert attributes["fingerprint"] in certificate
    pairs = opened.grid.records * (opened.grid.records - 1) // 2
    assert f"{pairs * opened.outputs:,}" in certificate
    assert f"{cost['loss_km']:.4g}" in found.texts["losses"]
    bound = re.search(r"\(certified\)([\d.]+)", found.texts["losses"])
    assert bound is not None
    assert 0 < float(bound[1]) < cost["loss_km"]
    for value in cost["loss_quantiles_km"].values():
        assert f"{value:.4g}" in found.texts["quantiles"]
    assert f"{cost['adversary']['inference_error_km']:.4g} km" in found.texts["adversary"]
    for package, version in attributes["software"].items():
        assert package in found.texts["software"]
        assert version in found.texts["software"]
    assert "OpenStreetMap" in found.texts["making"]
    assert found.html.count("OpenStreetMap contributors") >= 6  # beside every map, and once more


def test_rows_in_the_page_are_those_of_the_store(built: Path, whole: Made) -> None:
    opened = MechanismStore.open(str(built))
    stored = rows_of(opened, slice(0, opened.grid.shape[0]), slice(0, opened.grid.shape[1])).astype(float)
    stored /= stored.sum(axis=-1, keepdims=True)
    shown, data = whole[1].rows(), whole[1].data
    assert base64.b64decode(data["codes"]) == quantised(stored)[0].tobytes()
    assert not {"starts", "numbers", "far"} & set(data)
    assert "from far away" not in whole[1].html
    assert shown.shape == stored.shape
    most = math.expm1(data["step_log"] / 2) * (1 + 1e-9)
    assert (np.abs(shown / stored - 1) <= most).all()
    a, b = data["typical"]
    likeliest = int(stored[a, b].argmax())
    first = re.search(r'<tr data-output="(\d+)">.*?class="number">([^<]*)<', whole[1].html)
    assert first is not None
    assert (int(first[1]), first[2]) == (likeliest, html.percent(stored[a, b, likeliest]))


def test_the_job_can_be_read_again_and_names_no_folders(built: Path, whole: Made) -> None:
    job = MechanismStore.open(str(built)).attributes["job"]
    assert parse_job(tomllib.loads(whole[1].texts["job"])).canonical() == parse_job(job).canonical()
    assert str(built.parent) not in whole[1].html
    secret = {"domain": {"roads": "/home/ada/secret/rome", "cell_km": 1.0}, "job": {"name": "x"}}
    text = job_toml(secret, {"domain": {"roads": "sha256:12ab"}})
    assert "ada" not in text
    assert "sha256:12ab" in text
    assert tomllib.loads(text) == {"job": {"name": "x"}, "domain": {"roads": "rome", "cell_km": 1.0}}
    assert list(tomllib.loads(text)) == ["job", "domain"]
    assert "C:" not in job_toml({"loss": {"file": "C:\\Users\\ada\\loss.npz"}}, {})


def test_a_planar_store_has_no_degrees(tmp_path: Path) -> None:
    write_loss_file(tmp_path / "loss.npz", (5, 7))
    build(parse_job(loss_job(tmp_path / "loss.npz")), str(tmp_path / "p.zarr"))
    said, found = made(tmp_path / "p.zarr", tmp_path / "r.html")
    assert said["holds"]
    assert found.data["lonlat"] is None
    assert "straight-line distance in the plane" in found.html
    assert "latitude" not in found.html.split("<script")[0]
    assert re.search(r"\d at x -?\d+\.\d{3}, y -?\d+\.\d{3} km", found.texts["from-rows"])
    assert "nowhere on Earth" in found.texts["layout"]
    assert "does not say whose data" in found.texts["making"]
    assert ">N</text>" not in found.html  # there is no north


@pytest.mark.slow
def test_rows_that_are_not_stored_are_shown_as_well(tmp_path: Path) -> None:
    build(parse_job(u_job(tmp_path)), str(tmp_path / "u.zarr"))
    opened = MechanismStore.open(str(tmp_path / "u.zarr"))
    assert opened.plan.skipped
    said, found = made(tmp_path / "u.zarr", tmp_path / "r.html")
    assert said["holds"]
    assert np.isfinite(found.rows()).all()
    inside = np.frombuffer(base64.b64decode(found.data["inside"]), dtype=np.uint8).astype(bool)
    np.testing.assert_array_equal(inside.reshape(found.data["shape"]), opened.read("inside"))
    assert "Darkened cells are outside the region" in found.html
    assert [image["id"] for image in found.all("image") if "id" in image].count("cover") == 1


# --- what it must not do --------------------------------------------------------------------------


def test_nothing_is_fetched_and_only_our_own_scripts_and_styles_run(whole: Made) -> None:
    found = whole[1]
    for tag, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "poster", "data"):
            value = attributes.get(name, "")
            fetched = not value.startswith(("#", "data:")) and value != ""
            assert not fetched or tag == "a", (tag, value)
        assert not any(name.startswith("on") or name == "style" for name in attributes), attributes
    style, script = found.texts["style-1"], found.texts["script-2"]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(m["content"] for m in found.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'; img-src data:;")
    for text in (style, script):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_texts_are_escaped_wherever_they_come_from(store: Path, tmp_path: Path) -> None:
    evil = "</p></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
    job = MechanismStore.open(str(store)).attributes["job"]
    job["job"]["name"] = job["domain"]["roads"] = evil
    attribute(store, attribution=evil, notes=[evil], job=job, software={evil: evil, "numpy": evil})
    said, found = made(store.rename(tmp_path / "<script>alert(3)<&.zarr"), tmp_path / "r.html")
    assert not said["holds"]  # somebody has changed it, and that is noticed
    assert [s.get("type") for s in found.all("script")] == ["application/json", None]
    assert not found.all("img")
    assert evil in found.texts["making"]
    assert found.data["outputs"] == 8
    assert "'<script>alert(3)<&.zarr'" in found.texts["commands"]


def test_it_is_well_formed_and_can_be_read_aloud(whole: Made) -> None:
    found = whole[1]
    assert found.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h[1-6]", tag)]
    assert (levels.count(1), levels[0]) == (1, 1)
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for svg in found.all("svg"):
        assert svg.get("aria-hidden") == "true" or svg.get("aria-label"), svg
    for attributes in found.all("a"):
        if attributes["href"].startswith("#"):
            assert attributes["href"][1:] in found.texts
    referred = set(
        re.findall(r'(?:href="#|url\(#|for="|aria-labelledby="|aria-describedby=")([\w-]+)', found.html)
    )
    assert referred <= set(found.texts)
    assert found.html.count("<label>") == len(found.all("input")) + len(found.all("select"))
    assert all("scope" in th for th in found.all("th"))


def _colours(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))


def _luminance(colour: str) -> float:
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours by WCAG 2.2."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_enough_in_light_and_in_dark() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    css = html.own_file("report.css")
    light = _colours(css.split("@media screen and (prefers-color-scheme: dark)", 1)[0])
    dark = _colours(css.split("@media screen and (prefers-color-scheme: dark)", 1)[1].split("* {", 1)[0])
    assert set(light) == set(dark)
    for colours in (light, dark):
        for text, ground in (
            ("ink", "page"), ("ink", "card"), ("ink", "map"), ("ink", "code"), ("ink", "track"),
            ("soft", "page"), ("soft", "card"), ("link", "page"), ("link", "card"),
            ("good-ink", "good-fill"), ("bad-ink", "bad-fill"),
        ):  # fmt: skip
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        # What is drawn, against what it is drawn on.
        drawn = (("bar-own", "track"), ("bar-bound", "track"), ("mark", "map"), ("bar-own", "map"))
        for shape, ground in drawn:
            assert contrast(colours[shape], colours[ground]) >= 3, (shape, ground)
    shades = re.findall(r"\.(?:h\d|beyond) \{ background: (#\w{6}); color: (#\w{6}); \}", css)
    assert len(shades) == 11
    assert all(contrast(*shade) >= 4.5 for shade in shades)


# --- stores that do not hold, or are not finished -------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs ``mdpext report`` in a folder of its own: exit code, output, error."""
    monkeypatch.chdir(tmp_path)
    return partial(run_inside, capfd, "report")


def test_on_the_command_line(store: Path, tmp_path: Path, command: Command) -> None:
    code, out, _ = command(store, "--json", "--progress", "none", "--bound-seconds", "0")
    said = json.loads(out)
    assert code == 0
    assert Path(said["file"]) == Path("copy-report.html")
    assert (tmp_path / "copy-report.html").stat().st_size == said["bytes"]
    assert "No lower bound was computed" in (tmp_path / "copy-report.html").read_text()


def test_changed_bytes_are_said_in_red_on_top(store: Path, tmp_path: Path, command: Command) -> None:
    flip_a_bit(shard_of(store))
    code, _, err = command(store, "-o", tmp_path / "r.html", "--progress", "none", "--bound-seconds", "0")
    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    found = Page((tmp_path / "r.html").read_text())
    assert "Does not hold" in found.texts["verdict"]
    assert "probability/c/0/0/0" in found.texts["verdict"]
    verdict = next(a for tag, a in found.tags if a.get("id") == "verdict")
    assert (verdict["class"], verdict["role"]) == ("verdict bad", "alert")


def test_a_shard_that_is_gone_costs_figures_but_not_the_report(store: Path, tmp_path: Path) -> None:
    shard_of(store, 1).unlink()
    said, found = made(store, tmp_path / "r.html")
    assert not said["holds"]
    assert said["epsilon_certified"] == "inf"
    assert "Does not hold" in found.texts["verdict"]
    assert "Not computed" in found.texts["loss"]
    missing = ~np.isfinite(found.rows()).all(axis=-1)
    block = MechanismStore.open(str(store)).plan[1]
    expected = np.zeros_like(missing)
    expected[block.owned_x, block.owned_y] = True
    np.testing.assert_array_equal(missing, expected)


def test_a_refused_store_stays_refused(store: Path, tmp_path: Path, command: Command) -> None:
    opened = MechanismStore.open(str(store), mode="r+")
    receipts.void(opened.objects, {0})  # as where a job is refused: blocks at fault are to be done anew
    attribute(store, state="refused")
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    code, _, err = command(store, "-o", tmp_path / "r.html", "--progress", "none", "--bound-seconds", "0")
    assert code == 1
    assert "refused" in err
    assert "Do not use this store" in Page((tmp_path / "r.html").read_text()).texts["verdict"]
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before

    whole = shutil.copytree(store, tmp_path / "w.zarr")  # refused for what is no longer so
    receipts.write_receipt(MechanismStore.open(str(whole), mode="r+").objects, _receipt(opened, tmp_path))
    said, found = made(whole, tmp_path / "w.html")
    assert not said["holds"]
    assert "Refused" in found.texts["verdict"]


def _receipt(store: MechanismStore, folder: Path) -> receipts.Receipt:
    """Return the receipt of block 0, made again by extending it again."""
    fresh = shutil.copytree(store.url, folder / "again.zarr")
    partition(str(fresh), 0, 1)
    return MechanismStore.open(str(fresh)).read_receipts()[0]


def test_there_is_no_report_on_what_is_not_finished(small_job: Job, tmp_path: Path, command: Command) -> None:
    url = tmp_path / "half.zarr"
    init(parse_job(small_job(store={"block_cells": [2, 2]})), str(url))
    code, _, err = command(url, "--progress", "none")
    assert code == 3
    assert re.fullmatch(r"error: .*blocks are missing.*run the job again, or mdpext partition .*\n", err)
    partition(str(url), 0, MechanismStore.open(str(url)).plan.blocks)
    with pytest.raises(IncompleteStoreError, match="its certificate is missing; run the job again"):
        report(str(url), tmp_path / "r.html")
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "r.pdf"], "must end in .html or .htm"),
        (["-o", "no/such/r.html"], "there is no folder no/such"),
        (["-o", "copy.zarr/r.html"], "lies inside the store"),
        (["--bound-seconds", "-1"], "--bound-seconds: must be at least 0"),
        (["--evaluation", "none.json"], "--evaluation: none.json: cannot be read"),
    ],
)
def test_bad_input(store: Path, tmp_path: Path, command: Command, arguments: list[str], message: str) -> None:
    code, out, err = command(store.name, *arguments, "--progress", "none")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("*.htm*"))


# --- an evaluation that was made before -----------------------------------------------------------


def test_an_earlier_evaluation_is_taken_if_it_is_about_these_bytes(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    document = evaluate(str(store), bound=BoundRequest(0), attacks=AttackRequest(releases=0))
    # As if it had been given some time.
    bound = {"lower_bound_km": 0.98765, "lower_bound_certified_km": 0.98765, "lower_bound_certified": True}
    document.update(bound, lower_bound_stride=9, offsets_used=81, offsets_total=81, gap=0.7)
    document["adversary"]["leakage_bits"] = 1.2345
    document["lower_bound_certified_km"] = 0.98765
    file.write_text(json.dumps(document))
    _, found = made(store, tmp_path / "r.html", evaluation=file)
    assert "0.9876" in found.texts["losses"]  # 0.98765, rounded down
    assert "1.234 bits" in found.texts["adversary"]

    without = {key: value for key, value in document.items() if key != "gap"}
    for text, message in (
        (json.dumps({**document, "content_sha256": "0" * 64}), "is about other bytes"),
        (json.dumps({**document, "content_sha256": None}), "is about other bytes"),
        (json.dumps({**document, "adversary": {"no": "such"}}), "is damaged"),
        (json.dumps({**document, "lower_bound_certified_km": None}), "is damaged"),
        (json.dumps(without), "gap missing"),
        ("[1]", "is not what `mdpext evaluate --json` prints"),
        ("{", "is no JSON; give what `mdpext evaluate --json` prints"),
    ):
        file.write_text(text)
        with pytest.raises(SpecError, match=message):
            report(str(store), tmp_path / "s.html", evaluation=file)
    assert not (tmp_path / "s.html").exists()


@pytest.mark.slow
def test_the_best_bound_of_evaluations_is_kept_for_the_page(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_km = evaluate(str(store), bound=BoundRequest(stride=3), attacks=None, workers=1)["loss_km"]
    kept = json.loads((store / BOUND).read_text())
    evaluate(str(store), bound=BoundRequest(stride=9), attacks=None, workers=1)
    assert json.loads((store / BOUND).read_text()) == kept  # a worse one
    monkeypatch.setattr(lower_bound, "lower_bound", None)  # none is computed
    report(str(store), tmp_path / "r.html")
    said = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert words.rounded_down(kept["lower_bound_certified_km"], 4) in said.texts["losses"]
    assert f"an evaluation has left it there on {kept['computed']}" in said.html
    # Of other bytes, damaged, or more than the mechanism loses: none of it is shown.
    opened = MechanismStore.open(str(store))
    assert read_kept_bound(opened, loss_km) is not None
    for wrong in (
        {"content_sha256": "0" * 64}, {"lower_bound_km": "1"}, {"lower_bound_certified_km": 1e3},
        {"computed": "yesterday"}, {"lower_bound_certified_km": None},
    ):  # fmt: skip
        (store / BOUND).write_text(json.dumps({**kept, **wrong}))
        assert read_kept_bound(opened, loss_km) is None


# --- few enough to be looked at -------------------------------------------------------------------


def test_a_large_store_is_thinned(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = MechanismStore.open(str(built))
    monkeypatch.setattr(thinned, "MOST_NUMBERS", opened.grid.records * opened.outputs // 8)
    _, found = made(built, tmp_path / "r.html")
    step = step_for(opened.grid.shape, opened.outputs)
    assert step > 1
    i, j = (positions(n, step) for n in opened.grid.shape)
    assert found.data["shape"] == [len(i), len(j)]
    every = f"every {words.ordinal(step)} record along both axes"
    assert f"{every}, {len(i) * len(j)} of {opened.grid.records}" in found.html
    stored = rows_of(opened, slice(0, opened.grid.shape[0]), slice(0, opened.grid.shape[1])).astype(float)
    stored = (stored / stored.sum(axis=-1, keepdims=True))[np.ix_(i, j)]
    most = math.expm1(found.data["step_log"] / 2) * (1 + 1e-9)
    assert (np.abs(found.rows() / stored - 1) <= most).all()
    prior = np.frombuffer(base64.b64decode(found.data["prior"]), dtype="<f4").reshape(len(i), len(j))
    expected = np.zeros((len(i), len(j)))
    # Of two that are as near, the later one.
    near_x, near_y = (
        len(at) - 1 - np.abs(np.arange(n)[:, None] - at[::-1]).argmin(axis=1)
        for n, at in zip(opened.grid.shape, (i, j), strict=True)
    )
    np.add.at(expected, (near_x[:, None], near_y), opened.read("prior"))
    np.testing.assert_allclose(prior, expected, rtol=1e-6)
    np.testing.assert_allclose(found.data["x_km"], opened.read("x")[i], atol=1e-4)


# Every fourth record along both axes, 32 of them, holds less than the others: a step for these is too small.
@pytest.mark.slow
@pytest.mark.parametrize("sample", [32, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("remapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_of_noise_near_outputs_are_held_and_nothing_else(
    noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int, remapped: bool
) -> None:
    monkeypatch.setattr(thinned, "MOST_NUMBERS", FEW_NUMBERS)
    monkeypatch.setattr(thinned, "_SAMPLE", sample)
    if remapped:
        noise = shutil.copytree(noise, tmp_path / "noise.zarr")
        opened = MechanismStore.open(str(noise), mode="r+")
        write_remap(opened, Remap(content_of(opened), [k // 4 * 4 for k in range(opened.outputs)], 1, 1, []))
    _, found = made(noise, tmp_path / "r.html")
    opened = MechanismStore.open(str(noise))
    table = np.arange(opened.outputs) // 4 * 4 if remapped else np.arange(opened.outputs)
    far = merge_columns(np.full(opened.outputs, floor_of(opened)), table)
    step = Thinned.of(opened, table).step
    assert step < step_for(opened.grid.shape, opened.outputs)
    stored = rows_of(opened, slice(0, opened.grid.shape[0]), slice(0, opened.grid.shape[1])).astype(float)
    stored = merge_columns(stored / stored.sum(axis=-1, keepdims=True), table)
    stored = stored[np.ix_(*(positions(n, step) for n in opened.grid.shape))]
    near = (stored >= thinned.NEAR * far) & (stored > 0)
    assert len(base64.b64decode(found.data["codes"])) == near.sum() <= FEW_NUMBERS
    shown = found.rows()
    most = math.expm1(found.data["step_log"] / 2) * (1 + 1e-9)
    assert (np.abs(shown[near] / stored[near] - 1) <= most).all()
    np.testing.assert_allclose(shown[~near], np.broadcast_to(far, near.shape)[~near], rtol=1e-6)
    assert "at least 10 times as likely as from far away" in found.html
    # What is shown without scripts is what all entries would show.
    expected = maps.dots_of(stored[tuple(found.data["typical"])])
    dots = [one for one in found.all("circle") if one.get("class") == "dot"]
    assert [(float(one["r"]), float(one["fill-opacity"])) for one in dots] == [
        (one["radius"], one["opacity"]) for one in expected
    ]


def test_of_noise_lost_rows_are_shown_as_lost(
    noise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thinned, "MOST_NUMBERS", FEW_NUMBERS)
    opened = MechanismStore.open(str(shutil.copytree(noise, tmp_path / "noise.zarr")))
    shard_of(Path(opened.url), 1).unlink()
    _, found = made(Path(opened.url), tmp_path / "r.html")
    assert "starts" in found.data
    expected = np.zeros(opened.grid.shape, dtype=bool)
    expected[opened.plan[1].owned_x, opened.plan[1].owned_y] = True
    at = (positions(n, Thinned.of(opened).step) for n in opened.grid.shape)
    np.testing.assert_array_equal(~np.isfinite(found.rows()).all(axis=-1), expected[np.ix_(*at)])


@given(st.tuples(st.integers(2, 10**5), st.integers(2, 10**5)), st.integers(2, 10**5))
def test_the_step_is_the_least_that_fits(shape: tuple[int, int], outputs: int) -> None:
    def count(step: int) -> int:
        return math.prod(len(range((n - 1) % step // 2, n, step)) for n in shape)

    step = step_for(shape, outputs)
    fits = count(step) * outputs <= thinned.MOST_NUMBERS and count(step) <= thinned.MOST_ALONG**2
    assert fits or step >= max(shape)
    if step > 1:
        assert count(step - 1) * outputs > thinned.MOST_NUMBERS or count(step - 1) > thinned.MOST_ALONG**2


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 70))
def test_what_is_left_out_is_given_to_the_nearest(n: int, m: int, step: int) -> None:
    values = np.random.default_rng(n * m).random((n, m))
    i, j = positions(n, step), positions(m, step)
    assert gathered(values, i, j, step).sum() == pytest.approx(values.sum())
    assert i[0] + (n - 1 - i[-1]) < step
    for axis, (size, kept) in enumerate(((n, i), (m, j))):
        # What a record is given to is none that is further from it than another.
        for at in range(size):
            one = np.zeros((n, m))
            one[(at, 0) if axis == 0 else (0, at)] = 1.0
            got = int(np.argwhere(gathered(one, i, j, step))[0][axis])
            assert abs(kept[got] - at) == np.abs(kept - at).min()


@given(st.lists(st.floats(2**-36, 1.0), min_size=1, max_size=30))
def test_a_byte_is_no_further_off_than_is_said(probabilities: list[float]) -> None:
    rows = np.array([[[*probabilities, math.nan]]])
    codes, least_log, step_log = quantised(rows)
    back = pages.probabilities(codes, least_log, step_log)
    assert math.isnan(back[0, 0, -1])
    assert (np.abs(back / rows - 1)[..., :-1] <= math.expm1(step_log / 2) * (1 + 1e-9) + 1e-12).all()


def test_a_posterior_and_a_typical_record_by_hand() -> None:
    rows, far = csr_array([[0.5, 0.5], [0.25, 0.75], [0.2, 0.8], [0, 0]]), np.zeros(2)  # one cannot be used
    prior = np.array([[0.1, 0.4], [0.3, 0.2]])
    grid = Grid(0.0, 0.0, 1, 1, 1.0, (1,))
    thinned = Thinned(grid, 1, np.arange(2), np.arange(2), rows, far, prior, np.ones((2, 2), dtype=bool))
    np.testing.assert_allclose(thinned.posterior(0), np.array([[0.05, 0.1], [0.06, 0.0]]) / 0.21)
    # From (0, 0): one record there, two at 1, one at the square root of 2, whose row is not known.
    assert thinned.within(0, np.zeros(2), (0.5, 1.0, 2.0)) == pytest.approx([0.05 / 0.21, 1.0, 1.0])
    # Of the three that are known, half of the prior is at the first x, and more than half at the first y.
    assert thinned.typical() == (0, 0)


# --- figures --------------------------------------------------------------------------------------


def test_what_others_lose_is_what_their_rows_say(built: Path) -> None:
    problem = Problem.of_store(MechanismStore.open(str(built)))
    records = problem.records_xy_km(slice(None))
    loss = problem.loss.rows(records)

    def expected(made: Any) -> float:
        rows = made.rows(slice(None)).reshape(len(records), -1)
        return float(problem.prior.ravel() @ (rows * loss).sum(axis=1))

    assert costs.exponential_loss(problem) == pytest.approx(
        expected(exponential_mechanism(problem, 60)), rel=1e-9
    )
    value, error = plain_laplace(problem)
    exact = expected(planar_laplace(problem, 60))
    assert abs(value - exact) < 5 * error
    assert 0 < error < 0.01 * exact


def test_what_plain_noise_loses_at_each_record_is_what_its_rows_say(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.of_store(MechanismStore.open(str(built)))
    records = problem.records_xy_km(slice(None))
    rows = planar_laplace(problem, 60).rows
    assert rows is not None
    exact = (rows(slice(None)).reshape(len(records), -1) * problem.loss.rows(records)).sum(axis=1)
    found = plain.plain_expected_km(problem).ravel()
    used = problem.prior.ravel() > 0
    np.testing.assert_array_equal(np.isfinite(found), used)
    assert np.abs(found[used] / exact[used] - 1).max() < 0.03
    # Of more than so many, some are drawn: always the same, and no less exactly.
    monkeypatch.setattr(plain, "_POINTS", 100 * 20)
    few = plain.plain_expected_km(problem).ravel()
    assert np.isfinite(few).sum() == min(20, used.sum())
    np.testing.assert_array_equal(few, plain.plain_expected_km(problem).ravel())
    known = np.isfinite(few)
    assert np.abs(few[known] / exact[known] - 1).max() < 0.1


def test_maps_of_errors_by_hand() -> None:
    grid, ones = Grid(0.0, 0.0, 1, 1, 1.0, (1,)), np.ones((2, 2))
    shown = Thinned(grid, 1, np.arange(2), np.arange(2), csr_array(ones), np.zeros(2), ones / 4, ones > 0)
    own, other = np.array([[0.1, 0.4], [0.3, math.nan]]), np.array([[0.2, 0.3], [0.3, 0.1]])
    prior = np.array([[0.5, 0.2], [0.1, 0.2]])
    frame = maps.Frame(grid.box)
    found = maps.error_fields(frame, shown, prior, own, other)
    assert found is not None
    assert (found["records"], found["less"]) == (3, pytest.approx(0.5 / 0.8))
    assert found["own"]["legend"]["least"] == found["plain"]["legend"]["least"] == pytest.approx(100)
    assert found["own"]["legend"]["most"] == found["plain"]["legend"]["most"] <= 400 + 1e-9
    assert found["difference"]["legend"]["most"] == pytest.approx(100)
    assert found["difference"]["legend"]["middle"] == pytest.approx(0, abs=1e-9)
    assert maps.error_fields(frame, shown, prior, own * math.nan, other) is None


def test_the_promise_spelt_out_by_hand() -> None:
    # e = 2.71828, and e / (1 + e) = 0.73106; both are said rounded up.
    told = [(row["factor"], row["sure"]) for row in words.factors(1.0, 0.0)]
    names = [row["distance"] for row in words.factors(1.0, 0.0)]
    assert dict(zip(names, told, strict=True))["1 km"] == ("2.72", "73.2%")
    assert told[0] == ("1", "50%")
    assert (names[-1], told[-1][1]) == ("10 km", "over 99.9%")
    # ε (d + 2ρ) = 0.5 (0.1 + 0.2) = 0.15: e^0.15 = 1.16183, share 0.53743.
    # Of 50 m, 0.5 (0.05 + 0.2) = 0.125: e^0.125 = 1.13315, share 0.53121.
    assert words.factors(0.5, 0.1)[1:3] == [
        {"distance": "50 m", "factor": "1.14", "sure": "53.2%"},
        {"distance": "100 m", "factor": "1.17", "sure": "53.8%"},
    ]
    assert words.factors(100.0, 0.0)[-1]["factor"] == "e^1000"


@given(st.floats(1e-12, 1e12), st.integers(1, 12))
def test_bounds_are_rounded_outward(value: float, digits: int) -> None:
    above, below = (Decimal(round_(value, digits)) for round_ in (words.rounded_up, words.rounded_down))
    assert below <= Decimal(value) <= above
    assert above - below <= Decimal(value) * Decimal(10) ** (1 - digits)


@given(st.floats(0, 1))
def test_shares_do_not_look_like_all_or_nothing(share: float) -> None:
    text = html.percent(share)
    assert (text == "0%") == (share == 0)
    assert (text == "100%") == (share == 1)
    assert "100" not in text or share == 1


@pytest.mark.slow
def test_workers_say_the_same(built: Path, tmp_path: Path) -> None:
    # Without a bound, which is what the time allows.
    _, alone = made(built, tmp_path / "a.html")
    _, found = made(built, tmp_path / "r.html", workers=2)
    for part in ("data", "losses", "quantiles", "heat", "adversary", "job"):
        assert found.texts[part] == alone.texts[part]


def test_an_estimate_below_what_is_certified_is_left_out() -> None:
    result = {
        "lower_bound_certified": False, "lower_bound_certified_km": 0.3753, "lower_bound_km": 0.3119,
        "lower_bound_stride": 61, "lower_bound_standard_error_km": 0.16, "offsets_used": 16,
        "offsets_total": 3721,
    }  # fmt: skip
    assert "0.3753 km (certified)" in words.bound_in_words(result)
    assert "0.3119" not in words.bound_in_words(result)
    assert "about 0.4119 ± 0.31 km, an estimate" in words.bound_in_words({**result, "lower_bound_km": 0.4119})


def test_it_says_with_what_it_can_be_checked(whole: Made) -> None:
    """Not by a command that takes whatever an index has under that name."""
    _, html = whole
    assert f"mdpext-dask {metadata.version('mdpext-dask')} and its extra report" in html.texts["needed"]
    assert "pip install" not in html.html
