"""Reports in a real browser: what is picked is what is shown, in light and dark, narrow, and on paper."""

import base64
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mdpext_dask import build, open_mechanism, report
from mdpext_dask.job.spec import parse_job
from mdpext_dask.reports.page import near, thinned
from mdpext_dask.reports.page.thinned import Thinned
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.rows import rows_of
from tests.support.browsers import launched
from tests.support.forged import shard_of
from tests.support.pages import Page

Job = Callable[..., dict[str, dict[str, Any]]]
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def store(small_job: Job, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a finished store."""
    url = str(tmp_path_factory.mktemp("page") / "small.zarr")
    build(parse_job(small_job()), url)
    return url


@pytest.fixture(scope="module")
def file(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report on it."""
    path = tmp_path_factory.mktemp("page") / "r.html"
    report(store, path, bound_seconds=0)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return one browser for all tests."""
    with launched() as browser:
        yield browser


@pytest.fixture
def show(browser: Any, file: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that shows the report; in the end nothing has been complained of or asked for."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(expect_quiet: bool = True, **how: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, **how})
        contexts.append(context)
        page = context.new_page()
        if expect_quiet:
            page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()] * len(contexts)


def place_of(page: Any, a: int, b: int) -> tuple[float, float]:
    """Return where on the screen a record of the first map is."""
    x, y = page.evaluate(
        """([a, b]) => {
          const data = JSON.parse(document.getElementById("data").textContent);
          const map = document.getElementById("from-map");
          map.scrollIntoView({block: "center"});
          const at = new DOMPoint(data.x[a], data.y[b]).matrixTransform(map.getScreenCTM());
          return [at.x, at.y];
        }""",
        [a, b],
    )
    return x, y


def shown_row(page: Any) -> dict[int, float]:
    """Return the probabilities in the list beside the map, by output."""
    found: list[tuple[str, float]] = page.evaluate(
        """() => [...document.querySelectorAll("#from-rows tr")].map(
          (line) => [line.dataset.output, Number(line.dataset.probability)])"""
    )
    return {int(output): probability for output, probability in found}


def dots(page: Any) -> NDArray[np.float64]:
    """Return the areas of the dots over the largest one."""
    radii = page.evaluate(
        'Array.from(document.querySelectorAll("#from-map .dot"), (dot) => Number(dot.getAttribute("r")))'
    )
    return np.asarray((np.array(radii) / max(radii)) ** 2)


def assert_shows(page: Any, store: str, a: int, b: int) -> None:
    """Assert that the page shows the row of a record, in numbers and as dots, to what a byte holds."""
    assert page.get_attribute("#from-map", "data-record") == f"{a},{b}"
    grid = MechanismStore.open(store).grid
    row = open_mechanism(store).row(x_km=grid.x_km()[a], y_km=grid.y_km()[b]).values
    data = Page(page.content()).data
    allowed = 1.01 * data["step_log"]  # of one entry and of what all of them add up to
    found = shown_row(page)
    assert len(found) == len(row)
    for output, probability in found.items():
        assert probability == pytest.approx(row[output], rel=allowed)
    order = list(found.values())
    assert order == sorted(order, reverse=True)
    np.testing.assert_allclose(dots(page), row / row.max(), rtol=allowed, atol=0.01)


def pixels(content: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def colours_in(content: bytes) -> tuple[int, float]:
    """Return how many colours a picture has, and the share of it that has not the commonest one."""
    flat = pixels(content).reshape(-1, 3).astype(int) @ np.array([1, 256, 65536])
    counts = np.unique(flat, return_counts=True)[1]
    return len(counts), 1 - counts.max() / counts.sum()


def ground_of(page: Any) -> str:
    found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_a_record_that_is_clicked_is_shown(store: str, show: Callable[..., Any]) -> None:
    page = show()
    first = page.get_attribute("#from-map", "data-record")
    a, b = Page(page.content()).data["typical"]
    assert first == f"{a},{b}"
    before = dots(page)
    for record in ((2, 3), (10, 20)):
        page.mouse.click(*place_of(page, *record))
        assert_shows(page, store, *record)
        assert page.inner_text("#from-where") in page.text_content("#from-said")
    assert np.abs(dots(page) - before).max() > 0.1
    page.click("#from-reset")
    assert_shows(page, store, a, b)


def test_a_record_is_moved_by_keys_and_found_by_its_place(store: str, show: Callable[..., Any]) -> None:
    page = show()
    a, b = Page(page.content()).data["typical"]
    page.focus("#from-map")
    for key in ("ArrowRight", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert_shows(page, store, a + 1, b + 2)
    page.keyboard.press("Shift+ArrowDown")
    assert_shows(page, store, a + 1, max(b - 3, 0))
    for _ in range(30):
        page.keyboard.press("ArrowLeft")
    assert page.get_attribute("#from-map", "data-record").startswith("0,")
    page.keyboard.press("Home")
    assert_shows(page, store, a, b)

    opened = MechanismStore.open(store)
    projection = opened.projection
    assert projection is not None
    at = np.array([[opened.grid.x_km()[4] + 0.1, opened.grid.y_km()[11] - 0.1]])
    lon, lat = projection.to_degrees(at)[0].tolist()
    page.fill("#from-first", f"{lat:.6f}")
    page.fill("#from-second", f"{lon:.6f}")
    page.keyboard.press("Enter")
    assert_shows(page, store, 4, 11)
    page.fill("#from-first", "nonsense")
    page.keyboard.press("Enter")
    assert_shows(page, store, 4, 11)


def test_where_a_report_may_come_from(store: str, show: Callable[..., Any]) -> None:
    page = show()
    thinned = Thinned.of(MechanismStore.open(store))
    for output in (1, 6):
        page.select_option("#back-output", str(output))
        image = page.get_attribute("#back-field-light", "href")
        found = pixels(base64.b64decode(image.split(",")[1])).astype(float).sum(axis=2)
        # North up, a pixel a record; on light the likeliest is the darkest.
        posterior = thinned.posterior(output).T[::-1]
        assert found.shape == posterior.shape
        inhabited = thinned.prior.T[::-1] > 0
        assert posterior.flat[np.where(inhabited, found, np.inf).argmin()] >= 0.94 * posterior.max()
        ranks = np.argsort(np.argsort(posterior[inhabited])), np.argsort(np.argsort(-found[inhabited]))
        assert np.corrcoef(*ranks)[0, 1] > 0.95
        data = Page(page.content()).data
        near = thinned.within(output, np.array(data["outputs_km"][output]), data["radii_km"])
        told = page.evaluate(
            'Array.from(document.querySelectorAll("#back-rows tr"), (l) => Number(l.dataset.probability))'
        )
        np.testing.assert_allclose(told, near, atol=data["step_log"])
        assert page.inner_text("#back-where").startswith(f"{output} at ")
    circle = page.locator("#from-map .dot").nth(3)
    x, y = float(circle.get_attribute("cx")), float(circle.get_attribute("cy"))
    box = page.locator("#back-map").bounding_box()
    scale = page.evaluate('document.getElementById("back-map").getScreenCTM().a')
    ground = page.evaluate(
        '(() => { const m = document.getElementById("back-map").getScreenCTM(); return [m.e, m.f]; })()'
    )
    assert box is not None
    page.locator("#back-map").click(
        position={"x": ground[0] + scale * x - box["x"], "y": ground[1] + scale * y - box["y"]}
    )
    assert page.input_value("#back-output") == "3"


def shown_metres(page: Any, place: str) -> list[str]:
    """Return the two distances of a sentence beside a close-up."""
    told: list[str] = page.evaluate(
        f'Array.from(document.querySelectorAll("#{place} b"), (one) => one.textContent)'
    )
    return told


def test_a_close_up_shows_where_half_and_nine_tenths_of_the_reports_are(
    store: str, show: Callable[..., Any]
) -> None:
    page = show()
    grid, outputs = MechanismStore.open(store).grid, MechanismStore.open(store).output_xy_km()
    data = Page(page.content()).data
    told = set()

    def check(a: int, b: int, *, exact: bool = False) -> None:
        assert page.get_attribute("#from-map", "data-record") == f"{a},{b}"
        place = np.array([grid.x_km()[a], grid.y_km()[b]])
        row = open_mechanism(store).row(x_km=place[0], y_km=place[1]).values
        if not exact:  # what a byte holds of it
            row = np.exp(np.rint((np.log(row) - data["least_log"]) / data["step_log"]) * data["step_log"])
        apart = np.hypot(*(outputs - place).T)
        found = [near.in_metres(near.distance_within(apart, row, share)) for share in (0.5, 0.9)]
        assert shown_metres(page, "from-words") == found
        half, most = (set(near.least_set(row, share).tolist()) for share in (0.5, 0.9))
        for kinds, expected in ((".in-half", half), (".in-half, .in-most", most)):
            at = page.evaluate(
                """(kinds) => Array.from(document.getElementById("from-dots").querySelectorAll(kinds),
                  (dot) => [Number(dot.getAttribute("cx")), Number(dot.getAttribute("cy"))])""",
                kinds,
            )
            dots = page.evaluate(
                """() => Array.from(document.querySelectorAll("#from-map .dot"),
                  (dot) => [Number(dot.getAttribute("cx")), Number(dot.getAttribute("cy"))])"""
            )
            assert sorted(at) == sorted(dots[k] for k in expected)
        assert f"{len(half)} of {len(outputs)} places" in page.inner_text("#from-words")
        assert found[0] in page.text_content("#from-words")
        told.add(tuple(found))

    check(*data["typical"], exact=True)  # as the page is without scripts
    for record in ((2, 3), (10, 20), (5, 8)):
        page.mouse.click(*place_of(page, *record))
        check(*record)
    assert found_in_said(page)
    assert len(told) > 1
    # The close-up is a map as well: its middle is the record, and what is clicked in it is picked.
    box = page.locator("#from-near").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    check(5, 8)
    scale = page.evaluate('document.getElementById("from-world").getScreenCTM().a')
    step = data["x"][6] - data["x"][5]
    if scale * step < box["width"] / 2:
        page.mouse.click(box["x"] + box["width"] / 2 + scale * step, box["y"] + box["height"] / 2)
        check(6, 8)
    page.focus("#from-map")
    page.keyboard.press("Home")
    check(*data["typical"])


def test_a_record_whose_row_is_lost_has_no_close_up(small_job: Job, browser: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "lost.zarr")
    build(parse_job(small_job(store={"block_cells": [2, 2]})), url)
    opened = MechanismStore.open(url)
    shard_of(Path(url), 1).unlink()
    assert not report(url, tmp_path / "r.html", bound_seconds=0)["holds"]
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    page.goto((tmp_path / "r.html").as_uri())
    lost = opened.plan[1].owned_x.start + 1, opened.plan[1].owned_y.start + 1
    for record, shown in ((lost, False), (Page(page.content()).data["typical"], True)):
        page.mouse.click(*place_of(page, *record))
        for name in ("from-near", "from-words"):
            assert page.locator(f"#{name}").is_visible() == shown
    context.close()


def found_in_said(page: Any) -> bool:
    """Whether what is read aloud has the distances."""
    return all(metres in page.text_content("#from-said") for metres in shown_metres(page, "from-words"))


def test_half_of_those_who_report_a_place_are_within_what_is_said(
    store: str, show: Callable[..., Any]
) -> None:
    page = show()
    shown, data = Thinned.of(MechanismStore.open(store)), Page(page.content()).data
    for output in (data["output"], 1, 6):
        page.select_option("#back-output", str(output))
        x, y = data["outputs_km"][output]
        apart = np.hypot(shown.x_km[:, None] - x, shown.y_km - y).ravel()
        posterior = shown.posterior(output).ravel()
        for share, said in zip((0.5, 0.9), shown_metres(page, "back-words"), strict=True):
            number, unit = said.replace(",", "").split("\N{NO-BREAK SPACE}")
            km = float(number) / (1000 if unit == "m" else 1)
            # Codes are rounded: as much is held, but for what a byte cannot hold.
            assert posterior[apart <= km + 0.006].sum() >= share - data["step_log"]
            assert posterior[apart < km - 0.006].sum() <= share + data["step_log"]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_streets_and_maps_fit_narrow_and_wide(width: int, scheme: str, show: Callable[..., Any]) -> None:
    page = show(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("from-map", "from-near", "back-map", "back-near"):
        box = page.locator(f"#{name}").bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= width
    # The streets are there and can be told from the ground: without them fewer pixels differ from it.
    streets = page.locator("#from-near")
    before = colours_in(streets.screenshot())[1]
    page.evaluate('document.getElementById("roads").remove()')
    assert colours_in(streets.screenshot())[1] < before - 0.01


def test_errors_are_on_one_scale(show: Callable[..., Any]) -> None:
    page = show()
    assert page.locator("#errors figure").count() == 3
    told = [
        page.locator("#errors .legend").nth(position).locator("span").all_inner_texts()
        for position in range(3)
    ]
    own, plain, difference = ([one.removesuffix(" or more") for one in each] for each in told)
    assert own == plain
    assert float(difference[0]) == -float(difference[2]) < 0 == float(difference[1])
    assert 10 < float(own[0].replace(",", "")) < float(own[2].replace(",", ""))  # in metres


@pytest.mark.slow
def test_of_noise_it_shows_what_is_stored_though_far_outputs_are_left_out(
    small_job: Job, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "noise.zarr")
    budget = {"epsilon_per_km": 4.0, "budget": "certified"}
    build(parse_job(small_job(privacy=budget, extension={"method": "noise"}, outputs={"count": 40})), url)
    monkeypatch.setattr(thinned, "MOST_NUMBERS", 1500)
    report(url, tmp_path / "r.html", bound_seconds=0)
    opened = MechanismStore.open(url)
    shown = Thinned.of(opened)
    stored = rows_of(opened, slice(0, opened.grid.shape[0]), slice(0, opened.grid.shape[1])).astype(float)
    stored = (stored / stored.sum(axis=-1, keepdims=True))[np.ix_(shown.i, shown.j)]
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    page.goto((tmp_path / "r.html").as_uri())
    data = Page(page.content()).data
    for a, b in ((0, 0), (2, 7), (6, 14)):
        page.mouse.click(*place_of(page, a, b))
        found = shown_row(page)
        assert len(found) == 12  # more than there are near ones
        for output, probability in found.items():
            left_out = (thinned.NEAR - 1) * shown.far[output]
            assert probability == pytest.approx(stored[a, b, output], rel=data["step_log"], abs=left_out)
        np.testing.assert_allclose(
            dots(page), stored[a, b] / stored[a, b].max(), rtol=data["step_log"], atol=0.01
        )
    for output in range(opened.outputs):
        page.select_option("#back-output", str(output))
        told = page.evaluate(
            'Array.from(document.querySelectorAll("#back-rows tr"), (l) => Number(l.dataset.probability))'
        )
        joint = shown.prior * stored[..., output]
        x, y = data["outputs_km"][output]
        apart = np.hypot(shown.x_km[:, None] - x, shown.y_km - y)
        near = [joint[apart <= radius].sum() / joint.sum() for radius in data["radii_km"]]
        np.testing.assert_allclose(told, near, atol=data["step_log"])
    context.close()


@pytest.mark.slow
def test_in_light_and_dark_every_map_shows_something(show: Callable[..., Any]) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        page = show(color_scheme=scheme)
        grounds[scheme] = ground_of(page)
        for position in range(page.locator("svg.map").count()):
            colours, share = colours_in(page.locator("svg.map").nth(position).screenshot())
            assert colours > 20
            assert share > 0.02
        assert page.locator(f".map .on-{scheme}").first.is_visible()
        assert not page.locator(f".map .on-{'dark' if scheme == 'light' else 'light'}").first.is_visible()
        undecoded = page.evaluate(
            """async () => {
              const images = [...document.querySelectorAll("image")].map((one) => one.getAttribute("href"));
              const sizes = await Promise.all(images.map(async (source) => {
                const image = new Image();
                image.src = source;
                await image.decode();
                return image.naturalWidth * image.naturalHeight;
              }));
              return sizes.filter((size) => !(size > 0)).length + (sizes.length < 9 ? 100 : 0);
            }"""
        )
        assert undecoded == 0
    assert grounds == {"light": "rgb(246, 245, 241)", "dark": "rgb(18, 22, 28)"}


def test_on_paper_it_is_light_and_has_no_controls(show: Callable[..., Any]) -> None:
    page = show(color_scheme="dark")
    page.emulate_media(media="print")
    assert ground_of(page) == "rgb(255, 255, 255)"
    for hidden in ("nav", "#from-form", "#back-output", "#from-help"):
        assert not page.locator(hidden).is_visible()
    for seen in ("#from-map", "#back-map", "#from-table", "#losses", "#heat", "#job", "#verdict"):
        assert page.locator(seen).is_visible()
    content = page.pdf(prefer_css_page_size=True)
    assert content.startswith(b"%PDF")
    assert 3 <= content.count(b"/Type /Page\n") <= 20
    # As wide as A4 between its margins: nothing is cut off.
    page.set_viewport_size({"width": 688, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") <= 688


def test_it_fits_a_telephone(store: str, show: Callable[..., Any]) -> None:
    page = show(viewport=NARROW, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.touchscreen.tap(*place_of(page, 5, 8))
    assert_shows(page, store, 5, 8)
    for one in page.locator("button, input, select").all():
        box = one.bounding_box()
        assert box is None or box["height"] >= 40


def test_without_scripts_all_but_picking_is_there(show: Callable[..., Any]) -> None:
    page = show(java_script_enabled=False)
    for hidden in ("#from-form", "#back-output"):
        assert not page.locator(hidden).is_visible()
    for seen in ("#from-map", "#back-map", "#from-rows tr", "#losses", "#heat", "#timings"):
        assert page.locator(seen).first.is_visible()
    assert colours_in(page.locator("#from-map").screenshot())[0] > 20
    assert colours_in(page.locator("#back-map").screenshot())[0] > 20


def test_it_runs_nothing_else_and_reaches_nobody(show: Callable[..., Any]) -> None:
    outcome = show(expect_quiet=False).evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
          document.body.setAttribute("onclick", "window.ran = true");
          document.body.click();
          const reached = await fetch("data:text/plain,x").then(() => true, () => false);
          return [window.ran === true, reached];
        }"""
    )
    assert outcome == [False, False]


def test_a_report_in_pieces_is_noticed(browser: Any, file: Path, tmp_path: Path) -> None:
    """The checks above can fail: a page whose script was changed by one letter runs none."""
    broken = tmp_path / "broken.html"
    broken.write_text(file.read_text().replace('"use strict";', '"use strict"; '))
    context = browser.new_context()
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(broken.as_uri())
    assert any("Content Security Policy" in text for text in said)
    assert page.get_attribute("#from-map", "data-record") is None
    context.close()


@pytest.mark.slow
@pytest.mark.usefixtures("browser")
def test_the_readmes_pictures_can_be_taken_again(file: Path, tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "workflows" / "benchmarks" / "report_pictures.py"
    subprocess.run([sys.executable, str(script), str(file), str(tmp_path)], check=True, timeout=120)
    for name in ("report_light.png", "report_dark.png", "report_map.png"):
        content = (tmp_path / name).read_bytes()
        assert colours_in(content)[0] > 20
        assert len(content) < 300_000
