"""Take pictures of a report in Chromium: its top in light, and a place that was picked in dark.

pip install playwright
mdpext report manhattan.zarr
python workflows/benchmarks/report_pictures.py manhattan-report.html workflows/images
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

SIZE: Any = {"width": 1100, "height": 800}


def main() -> None:
    """Take both."""
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
        schemes: Any = {"light": "header", "dark": "#reports"}  # literals that Playwright names
        for scheme, target in schemes.items():
            context = browser.new_context(viewport=SIZE, color_scheme=scheme)
            page = context.new_page()
            page.goto(options.report.resolve().as_uri())
            page.locator(target).evaluate("(element) => element.scrollIntoView()")
            page.screenshot(path=options.folder / f"report_{scheme}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
