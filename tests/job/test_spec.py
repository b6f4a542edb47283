"""The job file: what it accepts, how it refuses, and what the fingerprint stands for."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mdpext_dask.errors import SpecError
from mdpext_dask.job.spec import differing_keys, fingerprint_of, load_job, parse_job, with_overrides
from tests.support.forged import flip_a_bit
from tests.support.problems import JobMaker, point_file
from tests.support.refusals import refusal, refused

_JOB_TEXT = """
[domain]
roads = "builtin:manhattan"
cell_km = 3.0
refine = [2, 2]

[privacy]
epsilon_per_km = 1.0

[outputs]
count = 8
"""

# For every key of a job: another value; and what else has to be set for it.
_OTHER: dict[str, Any] = {
    "job.name": "other", "domain.roads": "roads", "domain.place": "Piedmont, California",
    "domain.bbox": (-74, 40.7, -73.95, 40.8), "domain.region": "points.csv", "domain.rotation_deg": 30.0,
    "domain.cell_km": 2.0, "domain.refine": (2, 3), "domain.metric_p": math.inf,
    "privacy.epsilon_per_km": 0.5, "privacy.budget": "half", "privacy.min_probability": 1e-5,
    "outputs.choose": "seeds", "outputs.count": 9, "outputs.random_seed": 1, "outputs.file": "points.csv",
    "outputs.outside": "drop", "outputs.limit": 9, "prior.kind": "uniform", "prior.file": "points.csv",
    "loss.kind": "euclidean", "loss.file": "points.csv", "loss.tasks": 6, "loss.tasks_file": "points.csv",
    "outputs.lon_column": "a", "outputs.lat_column": "a", "prior.lon_column": "a", "prior.lat_column": "a",
    "loss.tasks_lon_column": "a", "loss.tasks_lat_column": "a",
    "loss.random_seed": 1, "loss.directed": True, "seed.solver": "highs", "seed.refine_rounds": 3,
    "seed.refine_seconds": 60.0, "extension.method": "mcshane-whitney", "extension.stages": "one",
    "extension.sweeps": 2, "extension.seconds": 30.0,
    "store.block_cells": (1, 2), "cluster.kind": "inline", "cluster.workers": 3,
    "cluster.address": "tcp://a.b:86", "cluster.memory_gib": 4.0, "cluster.queue": "long",
    "cluster.account": "mobility", "cluster.walltime_hours": 2.5, "cluster.options": ("--qos=high",),
    "cluster.image": "registry.example/mdpext:1", "cluster.namespace": "privacy",
    "cluster.volume_claim": "stores", "compare.methods": ("em",), "compare.repeats": 3,
    "compare.limit_seconds": 60.0, "compare.bound_seconds": 0.0, "compare.cases": {"finer": ("a=[4]",)},
}  # fmt: skip
_WITH = {
    "outputs.file": ["outputs.choose=file"],
    "outputs.outside": ["outputs.choose=file", "outputs.file=points.csv"],
    "outputs.limit": ["outputs.choose=all-road-nodes"],
    "prior.file": ["prior.kind=file"],
    "loss.file": ["loss.kind=file"],
    **{
        f"outputs.{axis}_column": ["outputs.choose=file", "outputs.file=points.csv"]
        for axis in ("lon", "lat")
    },
    **{f"prior.{axis}_column": ["prior.kind=file", "prior.file=points.csv"] for axis in ("lon", "lat")},
    **{f"loss.tasks_{axis}_column": ["loss.tasks_file=points.csv"] for axis in ("lon", "lat")},
    "cluster.address": ["cluster.kind=address"],
}


def _overrides(name: str) -> list[str]:
    """Return the overrides that give a key its other value, as somebody would type them."""
    value = _OTHER[name]
    if isinstance(value, tuple):
        value = list(value)
    text = '{finer = ["a=[4]"]}' if name == "compare.cases" else str(value)
    return [*_WITH.get(name, []), f"{name}={text.lower() if value is True else text}"]


# Names, places of work and what else is compared do not decide the bytes.
_WITHOUT_EFFECT = {name for name in _OTHER if name.startswith(("job.", "cluster.", "compare."))}


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job file in a folder, the working one, that also holds points.csv and roads/."""
    (tmp_path / "points.csv").write_text("lon,lat\n-73.97,40.78\n")
    _road_folder(tmp_path / "roads")
    path = tmp_path / "job.toml"
    path.write_text(_JOB_TEXT)
    monkeypatch.chdir(tmp_path)
    return path


def _road_folder(folder: Path) -> Path:
    # The job file is concerned with bytes only; nobody reads these as roads.
    folder.mkdir(parents=True)
    (folder / "nodes.csv.gz").write_bytes(b"nodes")
    (folder / "edges.csv.gz").write_bytes(b"edges")
    return folder


# --- what is refused -------------------------------------------------------------------------------


# Values that are named with their key, and what else is said of others.
_NO_VALUES: dict[str, list[Any]] = {
    "privacy.epsilon_per_km": [0, -1.5, math.nan, math.inf, "1.0", True],
    "privacy.min_probability": [0.0, math.nan], "domain.cell_km": [0.0, math.inf], "domain.refine": [2],
    "domain.metric_p": [0.5, math.nan, -math.inf, "infinity"], "outputs.count": [0, 8.0], "loss.tasks": [0],
    "loss.random_seed": [-1], "cluster.workers": [0], "job.name": ["../elsewhere"],
}  # fmt: skip
_FAULTS: list[tuple[Any, ...]] = [
    *((name, value, f"{name}:", repr(value)) for name, values in _NO_VALUES.items() for value in values),
    ("privacy.epsilon", 1.0, "privacy.epsilon:", "epsilon_per_km"),
    ("privacy.budgets", "half", "privacy.budgets:", "mean budget"),
    ("privacy.budget", "all", "privacy.budget:", "'half'", "'bound'", "'all'"),
    ("privacy.min_probability", 0.2, "privacy.min_probability:", "0.2", "1/8"),
    ("privacy.min_probability", 0.125, "privacy.min_probability:", "1/8"),
    ("privcy.epsilon_per_km", 1.0, "privcy:", "mean privacy"),
    ("domain.cel_km", 1.0, "domain.cel_km:", "mean cell_km"),
    ("domain.zzz", 1.0, "domain.zzz:", "cell_km", "refine", "metric_p"),
    ("domain.refine", [2, 0], "domain.refine", "0"), ("domain.refine", [1.5], "domain.refine", "1.5"),
    ("domain.refine", [], "domain.refine:", "at least 1"), ("domain.refine", 3, "in brackets", "say [3]"),
    ("domain.refine", "2, 2", "in brackets", "say [2, 2]"), ("store.block_cells", 2, "say [2, 2]"),
    ("compare.methods", "em", 'say ["em"]'), ("domain.bbox", 3, "say [west, south, east, north]"),
    ("domain.bbox", [1, 2, 3, 4, 5], "too many", "at most 4"),
    # Latitudes first, in two ways.
    ("domain.bbox", [40.7, 40.8, -74.1, -73.9], "must be [west, south, east, north], in this order", "40.7"),
    ("domain.bbox", [40.8, -73.9, 40.7, -74.1], "must be [west, south, east, north], in this order"),
    ("job.name", "my city", "job.name:", "letters, digits", "'my city'"),
    ("cluster.queue", "a b", "cluster.queue:", "one word"),
    ("loss.directed", "yes", "loss.directed:", "true or false"),
    ("outputs.count", "6", "outputs.count:", "whole number", "'6'"),
    ("domain.roads", "", "domain.roads:", "not be empty"),
    ("privacy.min_probability", 0.0, "at least 1.46e-11", "rule them out"),
    ("domain.bbox", [-73.0, 40.0, -74.0, 41.0], "domain.bbox:", "west < east"),
    ("domain.bbox", [-74.0, 40.0, -73.0, math.nan], "domain.bbox:", "south < north"),
    ("domain.bbox", [500000.0, 40.0, 510000.0, 41.0], "domain.bbox:", "degrees"),
    ("domain.place", "Rome, Italy", "domain:", "exactly one", "roads", "place"),
    ("outputs.choose", "seeds", "outputs:", "count", '"seeds"'),
    ("outputs.choose", "loss-file", "outputs:", "count", '"loss-file"'),
    ("outputs.choose", "file", "outputs:", 'choose = "file" needs file'),
    ("outputs.file", "points.csv", "outputs:", "file", "choose"),
    ("prior.kind", "file", "prior:", 'kind = "file" needs file'),
    ("prior.file", "points.csv", "prior:", "file", "kind"),
    ("prior.kind", "loss-file", "prior.kind:", '"loss-file"', 'loss.kind = "file"'),
    ("loss.seed", 3, "loss.seed:", "mean random_seed"), ("loss.file", "loss.npz", "loss:", "file", "kind"),
    ("loss.kind", "eucl\nidean", "loss.kind:", "'travel'", "'euclidean'"),
    ("extension.method", "mcshane", "extension.method:", "'mcshane-whitney'", "'module:Class'"),
    ("extension.method", "mod:", "extension.method:", "'module:Class'"),
    ("extension.stages", "two", "extension.stages:", "'levels'", "'two'"),
    ("extension.sweeps", 0, "extension.sweeps:", "1"), ("extension.sweeps", 41, "extension.sweeps:", "40"),
    ("store.block_cells", [0, 1], "store.block_cells", "0"),
    ("cluster.kind", "address", "cluster:", 'kind = "address" needs address'),
    ("cluster.address", "tcp://10.0.0.1:8786", "cluster:", "address", "kind"),
]  # fmt: skip


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: f"{fault[0]}={fault[1]!r}")
def test_bad_value_is_one_line_that_names_the_key(small_job: JobMaker, fault: tuple[Any, ...]) -> None:
    name, value, *named = fault
    section, key = name.split(".")
    job = small_job(**{section: {key: value}})
    message = refusal(lambda: parse_job(job, source="my.toml"), *named, kind=SpecError)
    assert message.startswith("my.toml: ")


@pytest.mark.parametrize("name", ["domain", "privacy", "domain.roads", "privacy.epsilon_per_km"])
def test_missing_section_or_key_is_named(small_job: JobMaker, name: str) -> None:
    section, _, key = name.partition(".")
    job = small_job()
    if key:
        del job[section][key]
        refusal(lambda: parse_job(job), section, key, kind=SpecError)
    else:
        del job[section]
        refusal(lambda: parse_job(job), f"{section}: is required", kind=SpecError)


def test_section_that_is_no_table_and_misspelt_key_are_named(small_job: JobMaker) -> None:
    refusal(lambda: parse_job({**small_job(), "loss": 3}), "loss:", kind=SpecError)
    # Rather than the key that it leaves missing.
    job = {**small_job(), "privacy": {"epsilon": 1.0}}
    refusal(lambda: parse_job(job), "privacy.epsilon:", "epsilon_per_km", kind=SpecError)


@pytest.mark.parametrize("content", [b"[domain\nroads = 3", b"a = 1\na = 2", b"\xff\xfe[domain]", None])
def test_file_that_is_not_toml_or_missing_or_a_folder_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "job.toml"
    if content is None:
        refusal(lambda: load_job(tmp_path), str(tmp_path), kind=SpecError)
    else:
        path.write_bytes(content)
    assert refusal(lambda: load_job(path), kind=SpecError).startswith(f"{path}: ")


# --- what is accepted ------------------------------------------------------------------------------


@pytest.mark.parametrize(("given_p", "p"), [("inf", math.inf), (math.inf, math.inf), (1, 1.0), (1.5, 1.5)])
def test_metric_exponent_is_any_number_from_one(small_job: JobMaker, given_p: Any, p: float) -> None:
    assert parse_job(small_job(domain={"metric_p": given_p})).domain.metric_p == p


def test_floor_may_be_just_below_an_equal_share_and_anything_for_one_output(small_job: JobMaker) -> None:
    parse_job(small_job(outputs={"count": 8}, privacy={"min_probability": math.nextafter(0.125, 0)}))
    parse_job(small_job(outputs={"count": 1}, privacy={"min_probability": 0.9}))


def test_a_job_cannot_be_changed(small_job: JobMaker) -> None:
    spec = parse_job(small_job())
    with pytest.raises(ValidationError):
        spec.privacy.epsilon_per_km = 9.0  # type: ignore[misc]


def test_canonical_form_describes_the_same_job(small_job: JobMaker) -> None:
    spec = parse_job(small_job(domain={"metric_p": "inf"}, store={"block_cells": [1, 2]}))
    assert parse_job(spec.canonical()) == spec


# --- paths and overrides ---------------------------------------------------------------------------


def test_paths_start_at_the_file_or_the_working_folder(job_file: Path, monkeypatch: Any) -> None:
    elsewhere = job_file.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_job(job_file).domain.roads == "builtin:manhattan"  # no path
    assert load_job(job_file, ["domain.roads=roads"]).domain.roads == str(elsewhere / "roads")
    job_file.write_text(_JOB_TEXT.replace("builtin:manhattan", "roads"))
    assert load_job(job_file).domain.roads == str(job_file.parent / "roads")


def test_every_key_is_tried(job_file: Path) -> None:
    sections = load_job(job_file).model_dump()
    assert {f"{section}.{key}" for section, keys in sections.items() for key in keys} == set(_OTHER)


@pytest.mark.parametrize("name", _OTHER)
def test_override_sets_any_key(job_file: Path, name: str) -> None:
    expected, (section, key) = _OTHER[name], name.split(".")
    if expected in ("roads", "points.csv"):
        expected = str(job_file.parent / expected)
    assert getattr(getattr(load_job(job_file, _overrides(name)), section), key) == expected


def test_strings_need_no_quotes_the_last_wins_and_a_value_may_hold_equals_signs(job_file: Path) -> None:
    for text in ('"half"', "half", " half ", "'half'"):
        assert load_job(job_file, [f"privacy.budget={text}"]).privacy.budget == "half"
    assert load_job(job_file, ["domain.cell_km=2", "domain.cell_km=1.5"]).domain.cell_km == 1.5
    assert load_job(job_file, ["domain.place=a=b"]).domain.place == "a=b"


def test_place_and_roads_replace_each_other(job_file: Path) -> None:
    by_place = load_job(job_file, ["domain.place=Rome, Italy"])
    assert (by_place.domain.roads, by_place.domain.place) == (None, "Rome, Italy")
    job_file.write_text(_JOB_TEXT.replace('roads = "builtin:manhattan"', 'place = "Rome, Italy"'))
    by_roads = load_job(job_file, ["domain.roads=builtin:manhattan"])
    assert (by_roads.domain.roads, by_roads.domain.place) == ("builtin:manhattan", None)


def test_another_choice_drops_the_keys_of_the_old_one(job_file: Path) -> None:
    assert load_job(job_file, ["outputs.choose=seeds"]).outputs.count is None
    prior, cluster = 'kind = "file"\nfile = "points.csv"', 'kind = "address"\naddress = "tcp://x:1"'
    job_file.write_text(f"{_JOB_TEXT}[prior]\n{prior}\n[cluster]\n{cluster}\n")
    spec = load_job(job_file, ["prior.kind=uniform", "cluster.kind=inline"])
    assert spec.prior.file is None
    assert spec.cluster.address is None


@pytest.mark.parametrize(
    "override",
    ["cell_km=2", "domain.cell_km", "domain.cell_km 2", "=2", ".cell_km=2", "domain.=2", "", "domain=2"],
)
def test_override_of_the_wrong_form_is_quoted_back(job_file: Path, override: str) -> None:
    parts = f"--set {override}:", "section.key=value"
    refusal(lambda: load_job(job_file, [override]), *parts, kind=SpecError)


@pytest.mark.parametrize(
    ("override", "named"),
    [("privacy.epsilon=1", "epsilon_per_km"), ("privacy.epsilon_per_km=0", "privacy.epsilon_per_km"),
     ("privacy.epsilon_per_km=one", "privacy.epsilon_per_km"), ("domain.refine=2", "domain.refine"),
     ("domain.cel_km=2", "cell_km"), ("nowhere.key=2", "nowhere"), ("loss.tasks=5", "loss")],
)  # fmt: skip
def test_bad_override_is_refused_like_a_bad_file(job_file: Path, override: str, named: str) -> None:
    if named == "loss":  # which is no section of this file
        job_file.write_text("loss = 3\n" + _JOB_TEXT)
    refusal(lambda: load_job(job_file, [override]), named, kind=SpecError)


@settings(max_examples=10)
@given(
    epsilon=st.floats(1e-3, 1e3),
    cell=st.floats(0.01, 100),
    refine=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    name=st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,9}", fullmatch=True),
)
def test_override_and_document_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, epsilon: float, cell: float, refine: list[int], name: str
) -> None:
    document = tomllib.loads(_JOB_TEXT)
    document["job"] = {"name": name}
    document["privacy"]["epsilon_per_km"] = epsilon
    document["domain"].update(cell_km=cell, refine=refine)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(_JOB_TEXT)
    overrides = [f'job.name="{name}"', f"privacy.epsilon_per_km={epsilon!r}"]
    overrides += [f"domain.cell_km={cell!r}", f"domain.refine={refine}"]
    assert load_job(path, overrides) == parse_job(document)


# --- loss files ------------------------------------------------------------------------------------


_LOSS_FILE_JOB: dict[str, dict[str, Any]] = {
    "domain": {"refine": [2]},
    "privacy": {"epsilon_per_km": 1.0},
    "loss": {"kind": "file", "file": "loss.npz"},
}


def _with(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = {*_LOSS_FILE_JOB, *sections}
    return {name: {**_LOSS_FILE_JOB.get(name, {}), **sections.get(name, {})} for name in names}


def test_a_loss_file_brings_outputs_and_prior_and_the_job_says_so() -> None:
    spec = parse_job(_LOSS_FILE_JOB)
    canonical = spec.canonical()
    assert canonical["outputs"]["choose"] == canonical["prior"]["kind"] == "loss-file"
    assert canonical["domain"]["cell_km"] is None
    assert parse_job(canonical) == spec
    assert parse_job(_with(outputs={"choose": "loss-file"}, prior={"kind": "loss-file"})) == spec
    assert parse_job(_with(prior={"kind": "uniform"})).prior.kind == "uniform"


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        *(({"domain": {key: value}}, [f"domain.{key}:", "leave it out"]) for key, value in (
            ("roads", "builtin:manhattan"), ("place", "Rome, Italy"), ("bbox", [12.0, 41.0, 12.5, 41.5]))),
        ({"outputs": {"choose": "seeds"}}, ["outputs.choose:", '"seeds"', "leave [outputs] out"]),
        ({"outputs": {"choose": "file", "file": "o.csv"}}, ["outputs.choose:", '"file"']),
        ({"outputs": {"choose": "road-nodes", "count": 3}}, ["outputs.choose:", '"road-nodes"']),
        ({"prior": {"kind": "uniform", "lon_column": "a"}}, ["prior:", "lon_column", 'kind = "file" only']),
        ({"loss": {"tasks_lat_column": "a"}}, ["loss:", "tasks_lat_column", "tasks_file only"]),
        ({"outputs": {"lat_column": "a"}}, ["outputs:", "lat_column", 'choose = "file" only']),
        ({"outputs": {"count": 3}}, ["outputs:", "count", '"loss-file"']),
        ({"prior": {"kind": "road-nodes"}}, ["prior.kind:", '"road-nodes"', '"uniform"']),
        ({"prior": {"file": "p.csv"}}, ["prior:", "file", "kind"]),
        ({"loss": {"file": None}}, ["loss:", "file", "kind"]),
        ({"loss": {"tasks_file": "t.csv"}}, ["loss:", "tasks_file", "leave it out"]),
        ({"loss": {"directed": True}}, ["loss:", "directed", "leave it out"]),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_loss_file_is_named(sections: dict[str, Any], named: list[str]) -> None:
    refusal(lambda: parse_job(_with(**sections)), *named, kind=SpecError)


def test_turning_to_a_loss_file_drops_what_the_file_takes_the_place_of(job_file: Path) -> None:
    with job_file.open("a") as file:
        file.write('[prior]\nkind = "file"\nfile = "points.csv"\n[loss]\ndirected = true\ntasks = 7\n')
    spec = load_job(job_file, ["loss.kind=file", "loss.file=loss.npz", "prior.kind=uniform"])
    assert (spec.domain.roads, spec.domain.cell_km, spec.domain.refine) == (None, None, (2, 2))
    assert (spec.outputs.choose, spec.outputs.count) == ("loss-file", None)
    assert (spec.prior.kind, spec.prior.file) == ("uniform", None)
    assert (spec.loss.directed, spec.loss.tasks) == (False, 50)
    assert spec.loss.file == str(job_file.parent / "loss.npz")


def test_turning_away_from_a_loss_file_drops_it(job_file: Path) -> None:
    text = _JOB_TEXT.replace("[outputs]\ncount = 8", "").replace('roads = "builtin:manhattan"', "")
    job_file.write_text(text + '[loss]\nkind = "file"\nfile = "loss.npz"\n')
    assert load_job(job_file).domain.cell_km == 3.0
    overrides = ["loss.kind=euclidean", "domain.roads=builtin:manhattan"]
    spec = load_job(job_file, [*overrides, "outputs.choose=seeds"])
    assert (spec.loss.kind, spec.loss.file, spec.prior.kind) == ("euclidean", None, "road-nodes")
    assert load_job(job_file, overrides).outputs.choose == "auto"


# --- the fingerprint -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _OTHER)
def test_fingerprint_changes_with_keys_that_decide_bytes_alone(job_file: Path, name: str) -> None:
    old, new = load_job(job_file), load_job(job_file, _overrides(name))
    assert (new.fingerprint() == old.fingerprint()) == (name in _WITHOUT_EFFECT)
    assert (name in differing_keys(old.identity(), new.identity())) == (name not in _WITHOUT_EFFECT)


def test_named_columns_are_in_a_fingerprint_only_where_there_are_some(small_job: JobMaker) -> None:
    """Stores that were made before there were such keys keep theirs."""
    assert not any(k.endswith("_column") for keys in parse_job(small_job()).identity().values() for k in keys)


def test_fingerprint_does_not_depend_on_spelling_or_the_order_of_keys(small_job: JobMaker) -> None:
    plain = parse_job(small_job(domain={"cell_km": 3.0, "metric_p": math.inf}))
    spelt = {"domain": {"metric_p": "inf", "cell_km": 3}, "seed": {"solver": "auto"}}
    other = parse_job(small_job(**spelt, prior={"kind": "road-nodes"}))
    assert other.fingerprint() == plain.fingerprint() == fingerprint_of(plain.identity())
    one, two = {"a": {"x": 1, "y": 2}, "b": {}}, {"b": {}, "a": {"y": 2, "x": 1}}
    assert fingerprint_of(one) == fingerprint_of(two)
    assert fingerprint_of({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of "{}"


def test_moving_input_files_keeps_the_fingerprint(tmp_path: Path, small_job: JobMaker) -> None:
    prints = set()
    for folder, name in ((tmp_path / "a", "points.csv"), (tmp_path / "deep" / "b", "places.csv")):
        _road_folder(folder)
        file = point_file(folder / name, "lon,lat", [(12, 42)])
        prior, loss = {"kind": "file", "file": file}, {"tasks_file": file}
        spec = parse_job(small_job(domain={"roads": str(folder)}, prior=prior, loss=loss))
        prints.add(spec.fingerprint())
        # A stray file beside a network changes nothing.
        (folder / "other.csv.gz").write_bytes(b"x")
        prints.add(spec.fingerprint())
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("changed", "key"),
    [("roads/nodes.csv.gz", "domain.roads"), ("roads/edges.csv.gz", "domain.roads"),
     ("city.graphml", "domain.roads"), ("outputs.csv", "outputs.file"), ("prior.csv", "prior.file"),
     ("tasks.csv", "loss.tasks_file"), ("loss.npz", "loss.file")],
)  # fmt: skip
def test_one_byte_of_an_input_file_changes_the_fingerprint(job_file: Path, changed: str, key: str) -> None:
    folder = job_file.parent
    for name in ("outputs.csv", "prior.csv", "tasks.csv", "loss.npz", "city.graphml"):
        (folder / name).write_text("lon,lat\n12,42\n")
    roads = "city.graphml" if changed == "city.graphml" else "roads"
    overrides = [
        "outputs.choose=file", "outputs.file=outputs.csv", "prior.kind=file", "prior.file=prior.csv",
        "loss.tasks_file=tasks.csv", f"domain.roads={roads}",
    ]  # fmt: skip
    if key == "loss.file":
        overrides = ["loss.kind=file", "loss.file=loss.npz"]
    spec = load_job(job_file, overrides)
    old, fingerprint = spec.identity(), spec.fingerprint()
    flip_a_bit(folder / changed)
    assert spec.fingerprint() != fingerprint
    assert differing_keys(old, spec.identity()) == [key]


def test_missing_input_file_is_named_with_its_key(tmp_path: Path, small_job: JobMaker) -> None:
    path = tmp_path / "none.csv"
    spec = parse_job(small_job(loss={"tasks_file": str(path)}))
    refusal(spec.fingerprint, "loss.tasks_file", str(path), kind=SpecError)


def test_differing_keys_are_named_in_order() -> None:
    old = {"domain": {"cell_km": 3.0, "refine": [2]}, "privacy": {"epsilon_per_km": 1.0}}
    new = {"domain": {"cell_km": 2.0, "refine": [2]}, "privacy": {"epsilon_per_km": 2.0}}
    assert differing_keys(old, new) == ["domain.cell_km", "privacy.epsilon_per_km"]
    assert differing_keys(old, old) == []
    assert differing_keys({"a": {"x": 1}}, {"a": {"x": 1, "y": 2}, "b": {"z": 3}}) == ["a.y", "b.z"]


@pytest.mark.parametrize("roads", ["~nosuchuser/x", "a\0b"])
def test_a_path_that_is_none_is_one_error(tmp_path: Path, roads: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text("[privacy]\nepsilon_per_km = 1\n")
    refused(SpecError, "not a path", load_job, job, [f"domain.roads={roads}"])


def test_a_job_made_from_another_chooses_its_method_again(small_job: JobMaker) -> None:
    job = small_job(privacy={"budget": "certified"}, domain={"cell_km": 3.0, "refine": [2]})
    del job["extension"]
    left_open = parse_job(job)
    assert (left_open.extension.method, parse_job(left_open.canonical())) == ("auto", left_open)
    for overrides in (["privacy.budget=half"], ["extension.stages=one"]):
        published = with_overrides(left_open, overrides)
        assert (published.extension.method, published.extension.seconds) == ("log-convex", None)
        assert published.replace(privacy={"budget": "certified"}, extension={"stages": "levels"}) == left_open
    # What was asked for by name stays.
    named = with_overrides(left_open, ["extension.method=cell-lp"])
    assert with_overrides(named, ["privacy.epsilon_per_km=0.5"]).extension.method == "cell-lp"


def test_a_region_of_a_place_without_a_name_is_refused(small_job: JobMaker) -> None:
    refusal(lambda: parse_job(small_job(domain={"region": "place: "})), "must name a place", kind=SpecError)
