"""The page that blurs one's own position, in a real browser: right answers, and no request at all."""

import base64
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.runtime import open_city
from tests.support.browsers import launched

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "deploy" / "browser" / "demo.html"
VECTORS = Path(__file__).parent / "vectors"
# Of the middle of the city of test vectors.
HERE = {"longitude": -73.97, "latitude": 40.78, "accuracy": 25.0}


def test_the_policy_forbids_requests_and_names_what_is_in_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert found
    policy = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    for tag, directive in (("style", "style-src"), ('script type="module"', "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        own = "'self' " if tag != "style" else ""
        assert policy.pop(directive) == f"{own}'sha256-{digest}'"
    assert policy == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert re.findall(r"https?://[\w.]+", text.partition("</style>")[2]) == ["http://localhost."]


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Return where the folder of the page is served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(PAGE.parent))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def show(browser: Any, site: str) -> Iterator[Callable[..., Any]]:
    """Return a function that shows the page; in the end it has asked for itself and the reader, no more."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(**how: Any) -> Any:
        context = browser.new_context(geolocation=HERE, permissions=["geolocation"], **how)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{site}/demo.html")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert asked == [f"{site}/demo.html", f"{site}/mdpext.js"] * len(contexts)


def opened(page: Any, name: str) -> Any:
    page.set_input_files("#file", str(VECTORS / f"{name}.mdp"))
    page.wait_for_selector("#facts:not([hidden])")
    return page


def reported(page: Any) -> str:
    found: str = page.wait_for_selector("#answer:not([hidden])").inner_text()
    return found


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)]
)
def test_my_own_position(show: Callable[..., Any], width: int, scheme: str) -> None:
    page = opened(show(viewport={"width": width, "height": 844}, color_scheme=scheme), "seed")
    # Nothing is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "ε = 1 per km" in page.inner_text("#facts")
    assert page.inner_text("#credit") == "nobody"
    page.click("#mine")
    places = {
        f"{abs(lat):.5f}° N, {abs(lon):.5f}° W" for lon, lat in open_city(VECTORS / "seed.mdp").output_lonlat
    }
    assert reported(page).removeprefix("Reported: ") in places
    assert "1 release so far" in page.inner_text("#spent")
    page.click("#mine")
    page.locator("#spent", has_text="2 releases").wait_for()
    # Something has been drawn: dots, the place and its reports.
    colours = page.evaluate(
        """() => {
          const map = document.querySelector("canvas"), pen = map.getContext("2d");
          return new Set(new Uint32Array(pen.getImageData(0, 0, map.width, map.height).data.buffer)).size;
        }"""
    )
    assert colours > 4


def test_a_place_on_the_map_and_answers_that_repeat(show: Callable[..., Any]) -> None:
    page = opened(show(viewport={"width": 800, "height": 900}), "rows-planar")
    assert page.is_disabled("#mine")  # without degrees
    page.check("#sticky")
    page.click("canvas", position={"x": 300, "y": 200})
    first = reported(page)
    assert first.startswith("Reported: x ")
    for _ in range(5):
        page.click("canvas", position={"x": 300, "y": 200})
    assert reported(page) == first
    assert "1 release so far" in page.inner_text("#spent")
    page.uncheck("#sticky")
    page.click("canvas", position={"x": 8, "y": 8})
    page.locator("#spent", has_text="2 releases").wait_for()
    assert "lies outside" in page.inner_text("#notes")


def test_another_file_is_refused_in_words(show: Callable[..., Any], tmp_path: Path) -> None:
    page = show(viewport={"width": 390, "height": 844})
    wrong = tmp_path / "wrong.mdp"
    content = bytearray((VECTORS / "rows.mdp").read_bytes())
    content[8] = 2
    wrong.write_bytes(content)
    page.set_input_files("#file", str(wrong))
    page.wait_for_selector("#wrong:not([hidden])")
    assert page.inner_text("#wrong") == (
        "wrong.mdp: has city format 2, newer than 1, the newest that is read here; upgrade mdpext.js"
    )
    assert page.is_disabled("#mine")


def test_over_plain_http_the_page_says_what_it_needs(browser: Any) -> None:
    """Where browsers have no WebCrypto: nothing can be opened."""
    context = browser.new_context()
    page = context.new_page()
    try:
        context.route(
            "**/*", lambda route: route.fulfill(path=PAGE.parent / route.request.url.split("/")[-1])
        )
        page.goto("http://city.example/demo.html")
        assert not page.evaluate("isSecureContext")
        assert "over https:// or on http://localhost" in page.inner_text("#wrong")
        assert page.is_disabled("#file")
        assert page.is_disabled("#mine")
        name = "import('./mdpext.js').then(({ openCity }) => openCity(new ArrayBuffer(64))).catch(String)"
        assert "there is no WebCrypto here" in page.evaluate(name)
    finally:
        context.close()


def test_a_position_known_too_little_is_said(show: Callable[..., Any]) -> None:
    page = opened(show(viewport={"width": 390, "height": 844}), "seed")
    page.context.set_geolocation(HERE | {"accuracy": 1500.0})
    page.click("#mine")
    reported(page)
    assert "known to 1500 m only, which is more than 1/ε = 1000 m" in page.inner_text("#notes")
