"""Pictures of audits: every kind is drawn, shows what the report says, and is refused before any work."""

import math
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mdpext_dask import AuditReport, Sampling, audit, build
from mdpext_dask.auditors import audit as audit_module
from mdpext_dask.auditors import figure as figure_module
from mdpext_dask.auditors.figure import DOTS_PER_INCH, SIZE_INCHES, band_shares
from mdpext_dask.errors import SpecError, StoreError
from mdpext_dask.files import SUFFIXES, check_picture
from mdpext_dask.job.spec import parse_job
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.refusals import refused

Job = Callable[..., dict[str, dict[str, Any]]]
FEW = 2_000


class Picture(NamedTuple):
    """A picture that was drawn, and from what."""

    report: AuditReport
    drawn: AuditReport
    figure: Figure
    path: Path

    @property
    def ratios(self) -> Axes:
        return self.figure.axes[0]

    @property
    def map(self) -> Axes:
        return self.figure.axes[1]

    def text(self) -> str:
        assert self.figure._suptitle is not None
        return self.figure._suptitle.get_text()


Draw = Callable[..., Picture]


@pytest.fixture(autouse=True)
def no_figures() -> None:
    """Let go of what other tests have drawn."""
    plt.close("all")


@pytest.fixture
def store(small_job: Job, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> str:
    """Return a copy of a store of several blocks, which is built once."""
    built = tmp_path_factory.getbasetemp() / "picture.zarr"
    if not built.exists():
        build(parse_job(small_job(store={"block_cells": [2, 2]})), str(built))
    return str(shutil.copytree(built, tmp_path / "m.zarr"))


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Draw:
    """Return :func:`audit` with a picture, which returns what was drawn as well."""
    kept: list[Any] = []
    figure_of = figure_module.figure_of

    def keep(report: AuditReport, drawn: AuditReport, subject: Any) -> Figure:
        kept[:] = report, drawn, figure_of(report, drawn, subject)
        return kept[2]

    monkeypatch.setattr(figure_module, "figure_of", keep)
    monkeypatch.setattr(audit_module, "_PICTURE_PAIRS", FEW)

    def run(*arguments: Any, name: str = "a.png", **options: Any) -> Picture:
        audit(*arguments, picture=tmp_path / name, overwrite=True, **options)
        return Picture(*kept, tmp_path / name)

    return run


def cloud(n: int, side: tuple[float, float] = (8, 5)) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows of slopes up to 0.9/km, and their points."""
    rng = np.random.default_rng(n)
    points, places = rng.uniform(size=(n, 2)) * side, rng.uniform(size=(3, 2)) * side
    weights = np.exp(-0.45 * np.linalg.norm(points[:, None] - places, axis=-1))
    return weights / weights.sum(axis=1, keepdims=True), points


def of_cloud(draw: Draw, n: int, side: tuple[float, float] = (8, 5), **options: Any) -> Picture:
    rows, points = cloud(n, side)
    return draw(rows, points=points, **{"epsilon_per_km": 1.0, **options})


def damaged(store: str, block: int = 0) -> str:
    """Return the store without one of its shards."""
    opened = MechanismStore.open(store)
    (Path(store) / opened.shard_keys(opened.plan[block])[0]).unlink()
    return store


def artist(axes: Axes, name: str) -> Any:
    (found,) = [child for child in axes.get_children() if child.get_gid() == name]
    return found


def marked(axes: Axes, name: str) -> NDArray[np.float64]:
    return np.asarray(artist(axes, name).get_xydata())


def check(picture: Picture, axes: int) -> None:
    """Check what every picture has to be: readable, and true to its reports."""
    header = picture.path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert struct.unpack(">II", header[16:24]) == tuple(round(s * DOTS_PER_INCH) for s in SIZE_INCHES)
    assert len(picture.figure.axes) == axes
    shown = [artist(picture.ratios, name).get_array().filled(0) for name in ("kept", "beyond")]
    np.testing.assert_array_equal(np.concatenate(shown).T, band_shares(picture.drawn))
    assert set(artist(picture.ratios, "promise").get_ydata()) == {1.0}
    if picture.report.worst:
        worst = picture.report.worst
        np.testing.assert_array_equal(marked(picture.map, "worst pair"), [worst["x"], worst["x_prime"]])
        (_, height), bound = marked(picture.ratios, "worst ratio")[0], worst["bound"]
        if float(worst["log_ratio"]) > bound:
            assert height > 1
        elif bound > 0:
            assert height == pytest.approx(worst["log_ratio"] / bound)
    assert picture.map.get_aspect() == 1
    check_that_nothing_overlaps(picture.figure)
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()
    assert not list(picture.path.parent.glob(".*partial"))


def check_that_nothing_overlaps(figure: Figure) -> None:
    """Check that titles, panels with all their labels, and the legend are apart and on the page."""
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas.draw()
    renderer = canvas.get_renderer()
    parts = [figure._suptitle, *figure.axes, *figure.legends]
    boxes = [part.get_tightbbox(renderer) for part in parts]
    # Half a pixel is rounding.
    for number, box in enumerate(boxes):
        assert min(box.x0, box.y0, figure.bbox.width - box.x1, figure.bbox.height - box.y1) >= -0.5
        for other in boxes[:number]:
            apart_x = max(box.x0, other.x0) - min(box.x1, other.x1)
            assert max(apart_x, max(box.y0, other.y0) - min(box.y1, other.y1)) >= -0.5


# --- stores ---------------------------------------------------------------------------------------


def test_a_store_that_holds(store: str, draw: Draw) -> None:
    picture = draw(store)
    check(picture, axes=4)
    assert picture.text().startswith("holds for all pairs")
    assert "p = 2" in picture.text()
    assert "OpenStreetMap contributors" in picture.text()
    assert "promised 1/km on the ground" in picture.text().replace("\n", " ")
    ratios = np.array(picture.report.details["epsilon_by_block"]) / picture.report.limit_per_km
    np.testing.assert_allclose(artist(picture.map, "blocks").get_array().filled(), ratios.T)
    opened = MechanismStore.open(store)
    x, y = opened.grid.x_km(), opened.grid.y_km()
    corners = artist(picture.map, "blocks").get_coordinates()
    np.testing.assert_allclose(corners[0, :, 0], [*(x[::8]), *([] if len(x) % 8 == 1 else [x[-1]])])
    np.testing.assert_allclose(corners[:, 0, 1], [*(y[::8]), *([] if len(y) % 8 == 1 else [y[-1]])])
    outputs = opened.output_xy_km()
    np.testing.assert_allclose(artist(picture.map, "outputs").get_offsets(), outputs)
    # A holding store breaks nothing anywhere.
    assert not artist(picture.ratios, "beyond").get_array().filled(0).any()
    assert marked(picture.ratios, "largest")[:, 1].max() <= 1


def test_a_store_that_is_violated(store: str, draw: Draw) -> None:
    picture = draw(store, epsilon_per_km=0.5)
    check(picture, axes=4)
    assert picture.text().startswith("does not hold")
    _, labels = picture.map.get_legend_handles_labels()
    assert "block above the limit" in labels
    assert "breaks\nthe promise" in [text.get_text() for text in picture.ratios.get_yticklabels()]
    assert artist(picture.ratios, "beyond").get_array().filled(0).any()


def test_an_infinite_ratio(store: str, draw: Draw) -> None:
    picture = draw(damaged(store))
    assert picture.report.worst["log_ratio"] == "inf"
    check(picture, axes=4)
    _, labels = picture.map.get_legend_handles_labels()
    assert "block with infinite ε" in labels
    assert "worst triple: ∞ of its bound" in picture.ratios.get_legend_handles_labels()[1]
    # Triples of rows that cannot be used are no histogram's, but break the promise.
    np.testing.assert_allclose(band_shares(picture.drawn).sum(axis=1), 1)
    stratum = picture.drawn.details["strata"][0]
    assert sum(stratum["triples_by_ratio"]) < stratum["pairs_drawn"] * picture.drawn.outputs


def test_every_triple_of_a_store(store: str, draw: Draw) -> None:
    picture = draw(store, "exhaustive")
    check(picture, axes=3)
    assert artist(picture.map, "outline")
    further = [line for line in picture.map.lines if line.get_gid() == "further pair"]
    assert len(further) == len(picture.report.details["worst_triples"]) - 1


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, math.inf])
@pytest.mark.parametrize("design", ["uniform", "stratified"])
def test_pairs_of_a_store(store: str, draw: Draw, design: str, p: float) -> None:
    sampling = Sampling(pairs=FEW, random_seed=1, design=design)
    picture = draw(store, "sampled", metric_p=p, sampling=sampling)
    assert picture.drawn is picture.report
    check(picture, axes=3)
    assert f"p = {p:g}" in picture.text()
    strata = picture.report.details["strata"]
    assert artist(picture.ratios, "kept").get_array().shape == (20, len(strata))
    assert f"{FEW:,} pairs" in picture.ratios.get_title()


@pytest.mark.slow
def test_shared_rows_that_agree_and_that_differ(store: str, draw: Draw) -> None:
    check(draw(store, "boundary"), axes=3)
    picture = draw(damaged(store), "boundary")
    check(picture, axes=3)
    records = np.array([m["record"] for m in picture.report.details["boundary_mismatches"]])
    grid = MechanismStore.open(store).grid
    places = np.stack([grid.x_km()[records[:, 0]], grid.y_km()[records[:, 1]]], axis=-1)
    np.testing.assert_allclose(artist(picture.map, "mismatches").get_offsets(), places)


# --- plain arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "verdict"), [pytest.param(1.0, "holds", marks=pytest.mark.slow), (0.1, "violated")]
)
def test_points(draw: Draw, epsilon: float, verdict: str) -> None:
    picture = of_cloud(draw, 100, epsilon_per_km=epsilon)
    assert picture.report.verdict == verdict
    check(picture, axes=3)
    np.testing.assert_allclose(artist(picture.map, "records").get_offsets(), cloud(100)[1])


def test_rows_that_cannot_be_used(draw: Draw) -> None:
    rows, points = cloud(60)
    rows[5, 1], rows[7] = 0, np.nan
    check(draw(rows, points=points, epsilon_per_km=1.0, metric_p=math.inf), axes=3)


def test_many_points_are_thinned_out(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_module, "_MOST_POINTS", 50)
    picture = of_cloud(draw, 200)
    check(picture, axes=3)
    shown = np.asarray(artist(picture.map, "records").get_offsets())
    assert len(np.unique(shown, axis=0)) == 50
    assert set(map(tuple, shown.tolist())) <= set(map(tuple, cloud(200)[1].tolist()))
    assert "50 of 200 records" in picture.map.get_legend_handles_labels()[1]


@pytest.mark.parametrize("method", [pytest.param("certificate", marks=pytest.mark.slow), "exhaustive"])
def test_a_lattice(draw: Draw, method: str) -> None:
    x, y = (side.ravel() for side in np.meshgrid(np.arange(6) * 0.5, np.arange(5) * 0.5, indexing="ij"))
    weights = np.stack([np.exp(-0.3 * x), np.exp(-0.3 * y)], axis=-1)
    rows = weights / weights.sum(axis=1, keepdims=True)
    check(draw(rows, method, points=np.stack([x, y], axis=-1), epsilon_per_km=1.0), axes=3)


@pytest.mark.slow
@pytest.mark.parametrize("side", [(8, 0), (0, 1e-3), (100.0, 1.0)])
def test_two_records_make_one_band(draw: Draw, side: tuple[float, float]) -> None:
    picture = of_cloud(draw, 2, side)
    check(picture, axes=3)
    assert artist(picture.ratios, "kept").get_array().shape == (20, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("other", "verdict"), [(0.5, "holds"), (0.25, "violated")])
def test_all_records_in_one_place(draw: Draw, other: float, verdict: str) -> None:
    picture = draw(np.array([[0.5, 0.5], [other, 1 - other]]), points=np.ones((2, 2)), epsilon_per_km=1.0)
    assert picture.report.verdict == verdict
    check(picture, axes=3)
    assert [text.get_text() for text in picture.ratios.get_xticklabels()] == ["0"]


def test_what_exceeds_1_by_rounding_only(draw: Draw) -> None:
    """Slopes of exactly ε, which logarithms in float64 exceed as often as not."""
    x = np.arange(12) * 0.1
    rows = np.stack([0.4 * np.exp(-x), 1 - 0.4 * np.exp(-x)], axis=-1)
    points = np.stack([x, np.zeros(12)], axis=-1)
    exact = draw(rows, points=points, epsilon_per_km=1.0)
    assert exact.report.verdict == "violated"
    check(exact, axes=3)
    assert "breaks\nthe promise" in [text.get_text() for text in exact.ratios.get_yticklabels()]
    # It is 1 but for the last digits, and the picture does not say that it is 1.
    assert "worst triple: 1 of its bound" not in exact.ratios.get_legend_handles_labels()[1]
    tolerant = draw(rows, points=points, epsilon_per_km=1.0, tolerance=1e-9)
    assert tolerant.report.verdict == "within tolerance"
    assert marked(tolerant.ratios, "largest")[:, 1].max() == 1
    assert "above 1,\ntolerated" in [text.get_text() for text in tolerant.ratios.get_yticklabels()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["$x$_{城}_\\frac.npy", "W" * 200 + ".npy"])
def test_names_of_files_may_be_anything(draw: Draw, tmp_path: Path, name: str) -> None:
    """Of folders, the picture says nothing; of long names, the end."""
    rows, points = cloud(20)
    folder = tmp_path / "private"
    folder.mkdir()
    np.save(folder / name, rows)
    picture = draw(folder / name, points=points, epsilon_per_km=1.0)
    check(picture, axes=3)
    assert name[-60:] in picture.text()
    assert "private" not in picture.text()


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.svg", b"<?xml"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("a.PNG", b"\x89PNG"), ("a.pdf", b"%PDF")]
        ),
    ],
)
def test_formats(draw: Draw, tmp_path: Path, name: str, start: bytes) -> None:
    """Where a link is, what it points to is replaced."""
    (tmp_path / "b").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "b" / "real")
    assert of_cloud(draw, 30, name=name).path.is_symlink()
    assert (tmp_path / "b" / "real").read_bytes().startswith(start)


@pytest.mark.slow
def test_the_same_reports_make_the_same_bytes(draw: Draw) -> None:
    for suffix in SUFFIXES:
        first, second = (of_cloud(draw, 30, name=f"a{suffix}").path.read_bytes() for _ in "12")
        assert first == second


def check_refusal(path: Path, complaint: str) -> None:
    refused(SpecError, rf"^--picture: .*{complaint}", check_picture, path, overwrite=False)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("a", "must end in"), ("a.jpg", "must end in"), (".png", "must end in"), ("a.png.txt", "must end in"),
        ("folder.png", "is a folder"), ("no/where/a.png", "no folder"), ("file/a.png", "no folder"),
        ("a" * 300 + ".png", "cannot be written"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    check_refusal(tmp_path / name, complaint)


def test_what_is_missing_for_a_picture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", refuse)
        check_refusal(tmp_path / "a.png", "cannot be written: .*Permission denied")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    check_refusal(tmp_path / "a.png", r"mdpext-dask\[report\]")


def test_refusals_come_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(audit_module, "subject_of", None)
    with pytest.raises(SpecError, match="--picture"):
        audit(np.full((2, 2), 0.5), points=np.eye(2), epsilon_per_km=1.0, picture=tmp_path / "a.gif")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_old_picture_stays(draw: Draw, monkeypatch: Any, tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a.png").write_text("old")
    before = set(tmp_path.iterdir())

    def fail(self: Path, target: Path) -> None:  # noqa: ARG001 of the method
        assert self.stat().st_size > 0
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    expected = StoreError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        of_cloud(draw, 10)
    if expected is StoreError:
        assert str(caught.value).startswith("--picture: ")
        assert len(str(caught.value).splitlines()) == 1
    assert set(tmp_path.iterdir()) == before
    assert (tmp_path / "a.png").read_text() == "old"


@pytest.mark.slow
def test_styles_of_the_user_are_left_alone(draw: Draw) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"text.usetex": True, "font.size": 33}):
        check(of_cloud(draw, 10), axes=3)
        assert mpl.rcParams["font.size"] == 33


@pytest.mark.slow
def test_the_command_line(store: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mdpext_dask.cli", "audit", store, "--picture", "a.png"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_matplotlib_is_not_imported_without_a_picture() -> None:
    code = (
        "import sys, mdpext_dask.auditors.audit, mdpext_dask.auditors.figure, mdpext_dask.cli; "
        "assert not [n for n in sys.modules if n.startswith('matplotlib')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
