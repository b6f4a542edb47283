"""The page: values into one HTML file that fetches nothing, whatever texts the values hold."""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from markupsafe import Markup

from mdpext_dask.errors import printable
from mdpext_dask.reports.page import words

_FOLDER = "templates"


def page_of(contents: Mapping[str, Any]) -> str:
    """Return the HTML of a report.

    Everything is escaped where it is put in. Scripts and styles other than those of this package are refused
    by the page itself, and so is everything that would have to be fetched: its content security policy names
    both by their digests.

    Parameters
    ----------
    contents
        What :func:`mdpext_dask.reports.page.contents.contents_of` returns.
    """
    style, script = own_file("report.css"), own_file("report.js")
    html: str = _template().render(
        **{key: value for key, value in contents.items() if key != "data"},
        data=_json(contents["data"]),
        style=Markup(style),  # noqa: S704 our own file
        script=Markup(script),  # noqa: S704 our own file
        style_hash=_digest(style),
        script_hash=_digest(script),
    )
    return html


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mdpext_dask.reports.page", _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(_FILTERS)
    return environment.get_template("report.html")


def _shown(value: Any) -> Any:
    """Return what a page shows of a value; no text turns the direction of writing, or hides a part of it."""
    return "\n".join(map(printable, value.split("\n"))) if type(value) is str else value


def _shown_in(values: Any) -> Any:
    """Return a document of JSON values with :func:`_shown` of all that it holds, null for what is no number.

    Of a store that has lost a part, which the page says, places may be none.
    """
    if isinstance(values, float) and not math.isfinite(values):
        return None
    if isinstance(values, dict):
        return {_shown(key): _shown_in(value) for key, value in values.items()}
    return [_shown_in(value) for value in values] if isinstance(values, list | tuple) else _shown(values)


def own_file(name: str) -> str:
    """Return a file of the package's templates."""
    return resources.files("mdpext_dask.reports.page").joinpath(_FOLDER, name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _json(values: Any) -> Markup:
    """Return values as JSON that ends no element, whatever texts it holds."""
    text = json.dumps(_shown_in(values), allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)  # noqa: S704 no letter is left that means anything in HTML


def _digits(value: float, number: int) -> str:
    """Return a number with so many digits, without an exponent where that is no longer to read."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "unknown"
    text = f"{value:.{number}g}"
    if "e" in text and 1e-4 <= abs(value) < 1e9:
        return f"{float(text):,.0f}" if abs(value) >= 1 else f"{value:.{number + 3}f}"
    return text


def percent(share: float) -> str:
    """Return a share in percent: enough digits to tell it from 0 and from 1."""
    if not math.isfinite(share):
        return "∞" if share > 0 else "unknown"
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 1e-4:
        return "<0.01%"
    if share < 0.00995:
        return f"{100 * share:.2g}%"
    if 0.995 <= share < 1:
        return f"{math.floor(10_000 * share) / 100:.2f}%"
    return f"{100 * share:.1f}%" if share < 1 else f"{math.ceil(10_000 * share) / 100:.2f}%"


def _points(share: float) -> str:
    """Return a share in percent without a sign, short."""
    value = 100 * share
    return "<1" if value < 0.995 else f"{value:.0f}"


_FILTERS: dict[str, Callable[..., str]] = {
    "digits": _digits,
    "above": words.rounded_up,
    "below": words.rounded_down,
    "percent": percent,
    "percent2": lambda share: f"{100 * share:.2g}%",
    "used": lambda share: f"{words.rounded_up(100 * share, 4)}%",
    "points": _points,
    "ordinal": words.ordinal,
    "plain": lambda value: f"{value:g}",
    "parts": lambda share: f"{words.rounded_up(1e6 * share, 2)} parts in a million",
    "metres": lambda km: f"{words.rounded_up(1000 * km, 3)} m",
    "factor": words.factor_in_words,
    "count": lambda number: f"{number:,}",
}
