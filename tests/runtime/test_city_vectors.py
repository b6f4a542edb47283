"""The city file is what its documentation says: test vectors, and tables of fields."""

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.errors import GuaranteeViolation, StoreError
from mdpext_dask.runtime import city_header, city_layout, open_city
from tests.support.cities import taken_apart
from tests.support.city_vectors import CITIES, VECTORS, refused_form, vectors, write
from tests.support.refusals import refusal

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

FOLDER = Path(__file__).parent / "vectors"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "city-file.md"


def known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / VECTORS).read_text())
    return found


def test_what_follows_from_the_cities_is_what_followed() -> None:
    assert vectors(FOLDER) == (FOLDER / VECTORS).read_text()


def test_they_are_written_again_as_they_are(tmp_path: Path) -> None:
    write(tmp_path)
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in tmp_path.iterdir()}
    for name in CITIES:
        again, before = tmp_path / f"{name}.mdp", FOLDER / f"{name}.mdp"
        if again.read_bytes() != before.read_bytes():  # another library compresses otherwise
            (one, parts), (other, others) = taken_apart(again), taken_apart(before)
            assert list(map(zlib.decompress, parts)) == list(map(zlib.decompress, others))
            for header in (one, other):
                header.pop("signature", None)
                del header["sections"]
            assert one == other


def test_they_have_every_case() -> None:
    headers = [taken_apart(FOLDER / f"{name}.mdp")[0] for name in CITIES]
    assert {header["packing"] for header in headers} == set(city_header.PACKINGS)
    assert {header["metric_p"] for header in headers} == {1.0, 2.0, "inf"}
    for key in ("kept", "projection", "plane_fit", "remap"):
        assert {header[key] is None for header in headers} == {True, False}
    assert {"signature" in header for header in headers} == {True, False}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 150_000
    document = known()
    for city in document["cities"].values():
        if "records" in city:
            assert {record[-1] for record in city["records"]} == {True, False}
            assert len({draw[-1] for draw in city["draws"]}) > 3


def test_who_has_signed() -> None:
    key = known()["public_key"]
    assert open_city(FOLDER / "signed.mdp", trusted_key=key).remapped
    refusal(lambda: open_city(FOLDER / "seed.mdp", trusted_key=key), kind=GuaranteeViolation)
    refusal(lambda: open_city(FOLDER / "signed.mdp", trusted_key="0" * 64), kind=GuaranteeViolation)


def test_what_no_reader_may_use(tmp_path: Path) -> None:
    path = tmp_path / "city.mdp"
    for name, changes in known()["refused"].items():
        content = (FOLDER / f"{name}.mdp").read_bytes()
        for change in changes:
            path.write_bytes(refused_form(content, change))
            refusal(lambda: open_city(path)._content.rows(0), kind=StoreError)


# --- the documentation ------------------------------------------------------------------------------


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    lines = [line for line in text.split("\n\n## ")[0].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_page_has_the_prefix() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"version {city_layout.VERSION}" in text
    content = (FOLDER / "rows.mdp").read_bytes()
    magic, version, length = struct.unpack("<8sII", content[:16])
    assert (magic, version) == (b"mdpcity\n", 1)
    assert json.loads(content[48 : 48 + length])["packing"] == "rows"


def fields(check: Any, prefix: str = "") -> dict[str, tuple[Any, bool]]:
    """Return all fields that a check of an object knows, and whether each is needed."""
    inside = dict(
        zip(check.__code__.co_freevars, (cell.cell_contents for cell in check.__closure__), strict=True)
    )
    found: dict[str, tuple[Any, bool]] = {}
    for needed in (True, False):
        for key, inner in inside["needed" if needed else "optional"].items():
            found[f"{prefix}{key}"] = inner, needed
            nested = _object_in(inner)
            if nested is not None:
                found |= fields(nested, f"{prefix}{key}.")
    return found


def _object_in(check: Any) -> Any:
    """Return the check of an object that a check is, or holds."""
    cells = dict(
        zip(check.__code__.co_freevars, (c.cell_contents for c in check.__closure__ or ()), strict=True)
    )
    if "needed" in cells:
        return check
    return _object_in(cells["check"]) if callable(cells.get("check")) and "other" in cells else None


def bounds(check: Any) -> tuple[Any, ...] | None:
    """Return the range of a number, where a check is one."""
    cells = dict(
        zip(check.__code__.co_freevars, (c.cell_contents for c in check.__closure__ or ()), strict=True)
    )
    if "low" in cells:
        return cells["low"], cells["high"], cells["kinds"] is int
    if "check" in cells:
        return bounds(cells["check"])
    return None


def test_the_page_has_every_field_with_its_range() -> None:
    expected = fields(city_header._HEADER)
    rows = {row[0].strip("`"): row for row in table("## 3. Fields of the header")}
    assert set(rows) == set(expected)
    for name, (check, needed) in expected.items():
        _, kind, span, need, _ = rows[name]
        assert need == ("yes" if needed else "no"), name
        limits = bounds(check)
        if limits is not None:
            low, high, is_whole = limits
            assert span.removesuffix(" each") == f"{low:.12g} to {high:.12g}", name
            assert ("whole" in kind) == is_whole, name
