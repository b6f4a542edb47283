"""Take pictures of a report in Chromium: its top and its map in light, and a place that was picked in dark.

pip install playwright pillow
mdpext report manhattan.zarr
python workflows/benchmarks/report_pictures.py manhattan-report.html workflows/images
"""

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

SIZE: Any = {"width": 1100, "height": 800}


def save(content: bytes, path: Path) -> None:
    """Write a picture with 256 colours, which is a third of the size."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    few = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def map_of(page: Any) -> Any:
    """Return where the map and its close-up are, down to whose data they show."""
    both = page.locator(".picked").first
    box, last = both.bounding_box(), both.locator(".attribution").first.bounding_box()
    edge, bottom = 12, last["y"] + last["height"]
    return {
        "x": box["x"] - edge, "y": box["y"] - edge,
        "width": box["width"] + 2 * edge, "height": bottom - box["y"] + 2 * edge,
    }  # fmt: skip


def main() -> None:
    """Take all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--browser", default=shutil.which("chromium"))
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=options.browser,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        schemes: Any = ("light", "dark")  # literals that Playwright names
        for scheme in schemes:
            context = browser.new_context(viewport=SIZE, color_scheme=scheme)
            page = context.new_page()
            page.goto(options.report.resolve().as_uri())
            if scheme == "dark":
                page.locator("#reports").evaluate("(element) => element.scrollIntoView()")
            save(page.screenshot(), options.folder / f"report_{scheme}.png")
            if scheme == "light":
                save(page.screenshot(full_page=True, clip=map_of(page)), options.folder / "report_map.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
