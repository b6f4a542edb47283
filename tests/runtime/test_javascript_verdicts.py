"""Both readers of cities give one verdict on files from anybody: opened or not, and all rows used or not."""

import json
import random
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.errors import ImplausibleWarning, MdpextError
from mdpext_dask.problem.grid import Grid
from mdpext_dask.runtime import city_layout, open_city
from tests.support.cities import put, rewritten, spoil, taken_apart, with_header, write_city
from tests.support.city_vectors import CITIES, VECTORS, file_of, header_of, outputs_on, refused_form
from tests.support.engines import every_engine, read

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

VECTOR_FOLDER = Path(__file__).parent / "vectors"
HEADERS, SECTIONS, BYTES = 160, 120, 60


def verdict(path: Path) -> tuple[bool, bool]:
    """Return whether a city can be opened, and whether all of its rows are used."""
    opened = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImplausibleWarning)
        try:
            city = open_city(path)
            opened = True
            for tile in range(len(city._tiles)):
                city._cumulative_rows(tile)
        except MdpextError:
            return opened, False
    return True, True


def compare_verdicts(paths: list[Path], engine: str) -> list[tuple[bool, bool]]:
    """Return this package's verdicts, which are those of the reader in JavaScript."""
    verdicts = [verdict(path) for path in paths]
    found = read({str(path): {"path": str(path)} for path in paths}, engine=engine)
    for path, expected in zip(paths, verdicts, strict=True):
        answer = found[str(path)]
        assert (answer.get("opened", False), answer.get("used", False)) == expected, (path.name, answer)
    return verdicts


def sources(folder: Path) -> list[Path]:
    small = [write_city(folder / f"{packing}-small.mdp", packing) for packing in ("seed", "rows")]
    return [*(VECTOR_FOLDER / f"{name}.mdp" for name in CITIES), *small]


@every_engine
def test_changed_headers_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    """Digests are right, so that every field is judged by itself."""
    rng, given, paths = random.Random(1), sources(tmp_path), []
    for number in range(HEADERS):
        path = tmp_path / f"{number}.mdp"
        rewritten(given[number % len(given)], path, lambda header, parts: spoil(header, parts, rng))
        paths.append(path)
    verdicts = compare_verdicts(paths, engine)
    assert 10 < sum(opened for opened, _ in verdicts) < HEADERS / 2


@every_engine
def test_changed_sections_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    """Digests of sections are right; bits of compressed streams, and of tables, are not."""
    rng, given, paths = random.Random(2), sources(tmp_path), []

    def change(_: dict[str, Any], parts: list[bytes]) -> None:
        which = rng.randrange(len(parts))
        part = bytearray(parts[which])
        kind = rng.randrange(5)
        if kind == 0:
            del part[rng.randrange(len(part)) :]
            part = part or bytearray(b"x")
        elif kind == 1:
            part += rng.randbytes(rng.randrange(1, 5))
        else:
            for _ in range(kind - 1):
                # Most of them where codes are told, and at the end, where the check is.
                at = rng.choice(
                    (rng.randrange(len(part)), rng.randrange(min(len(part), 90)), -1 - rng.randrange(6))
                )
                part[at] ^= 1 << rng.randrange(8)
        parts[which] = bytes(part)

    for number in range(SECTIONS):
        path = tmp_path / f"{number}.mdp"
        paths.append(rewritten(given[number % len(given)], path, change))
    compare_verdicts(paths, engine)


@every_engine
def test_unsound_rows_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    """Rows whose digests are right, and that no certificate could pass, or just could."""
    source, paths = VECTOR_FOLDER / "rows.mdp", []
    least, two = np.float32(2.0**-36), np.float32(2)
    entries: dict[str, Any] = {
        "least": [least],
        "less": [np.nextafter(least, np.float32(0))],
        "none": [0.0],
        "nan": [np.nan],
        "inf": [np.inf],
        "negative": [-0.25],
        "-0": [-0.0],
        "denormal": [1e-40],
        "large": [two],
        "two": [1.0, 1.0, *[least] * 10],
        "nearly two": [1.0, np.nextafter(np.float32(1), np.float32(0)), *[least] * 10],
    }
    for name, values in entries.items():

        def put_in(header: dict[str, Any], parts: list[bytes], values: Any = values) -> None:
            city = open_city(source)
            rows = city._content.rows(1).copy()
            rows[1, 2, : len(values)] = np.array(values, dtype=np.float32)
            parts[1] = city_layout.pack_rows(rows)
            header["rows_sha256"][1] = city_layout.rows_sha256(rows)

        paths.append(rewritten(source, tmp_path / f"{name}.mdp", put_in))
    seed, noise = VECTOR_FOLDER / "seed.mdp", VECTOR_FOLDER / "noise.mdp"
    for name, value in {
        "nan": np.nan,
        "low": -700.5,
        "lowest": -700.0,
        "high": 700.5,
        "inf": -np.inf,
    }.items():

        def score(_: dict[str, Any], parts: list[bytes], value: float = value) -> None:
            scores = open_city(seed)._content._scores.copy()
            scores[1, 1, 5] = value
            parts[0] = city_layout.pack_table(scores)

        paths.append(rewritten(seed, tmp_path / f"score {name}.mdp", score))
    for name, table, value in (
        ("nan", 1, np.nan),
        ("inf", 1, np.inf),
        ("negative", 1, -1e-9),
        ("total", 2, 0.0),
        ("total", 2, np.nan),
        ("total", 2, 5e-324),
        ("output", 0, 40),
        ("output", 0, -1),
        ("output", 0, 39),
    ):

        def mass(_: dict[str, Any], parts: list[bytes], table: int = table, value: float = value) -> None:
            tables = open_city(noise)._content.noise
            assert tables is not None
            changed = tables.arrays[table].copy()
            changed.ravel()[0] = value
            parts[table] = city_layout.pack_table(changed)

        paths.append(rewritten(noise, tmp_path / f"{name} {table} {value}.mdp", mass))
    with np.errstate(all="ignore"):  # of masses by tiny totals
        verdicts = dict(zip([path.stem for path in paths], compare_verdicts(paths, engine), strict=True))
    assert {name for name, (_, used) in verdicts.items() if used} == {"least", "nearly two", "output 0 39"}


@every_engine
def test_a_table_that_no_section_can_hold_is_refused_before_it_is_made(tmp_path: Path, engine: str) -> None:
    """Five gigabytes are promised for eight bytes; and four megabytes for one that holds half a gigabyte."""
    grid, packer = Grid(0.0, 0.0, 800, 800, 1.0, (1,)), zlib.compressobj()
    large, small = tmp_path / "large.mdp", tmp_path / "small.mdp"
    rows = [np.zeros(1, dtype=np.float32)] * 16
    header = header_of(grid, outputs_on(grid, 1000, planar=True))
    large.write_bytes(file_of(header, "seed", (200, 200), rows, [zlib.compress(b"")]))
    grid = Grid(0.0, 0.0, 99, 99, 1.0, (1,))
    header = header_of(grid, outputs_on(grid, 100, planar=True))
    bomb = b"".join(packer.compress(bytes(2**24)) for _ in range(32)) + packer.flush()
    small.write_bytes(file_of(header, "rows", (99, 99), rows[:1], [bomb]))
    assert compare_verdicts([large, small], engine) == [(True, False)] * 2


@every_engine
def test_damaged_bytes_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    rng, given, paths = random.Random(3), sources(tmp_path), []
    for number in range(BYTES):
        content = bytearray(given[number % len(given)].read_bytes())
        if number % 3 == 0:
            del content[rng.choice((rng.randrange(len(content)), rng.randrange(60))) :]
        elif number % 3 == 1:
            content[rng.choice((rng.randrange(len(content)), rng.randrange(50)))] ^= 1 << rng.randrange(8)
        else:
            content += rng.randbytes(rng.randrange(1, 9))
        paths.append(tmp_path / f"{number}.mdp")
        paths[-1].write_bytes(content)
    for name, changes in json.loads((VECTOR_FOLDER / VECTORS).read_text())["refused"].items():
        content = bytearray((VECTOR_FOLDER / f"{name}.mdp").read_bytes())
        for number, change in enumerate(changes):
            paths.append(tmp_path / f"{name}-{number}.mdp")
            paths[-1].write_bytes(refused_form(bytes(content), change))
    assert not any(used for _, used in compare_verdicts(paths, engine))


def raw(change: Callable[[str], str], encoding: str = "utf-8") -> Callable[[Path, Path], Path]:
    """Return what writes a city whose header's text is changed."""

    def write(source: Path, path: Path) -> Path:
        header, sections = taken_apart(source)
        content = change(json.dumps(header)).encode(encoding, "surrogatepass")
        path.write_bytes(with_header(content) + b"".join(sections))
        return path

    return write


@every_engine
def test_texts_that_are_nearly_json_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    def more(value: str) -> Callable[[str], str]:
        return lambda text: text[:-1] + f', "more": {value}}}'

    values = (
        "01",
        "1.",
        ".5",
        "-",
        "+1",
        "1e",
        "1e5",
        "1E+05",
        "-0",
        "1_000",
        "0x1",
        "NaN",
        "-Infinity",
        "1e999",
        "tru",
        "True",
        "'a'",
        "[1,]",
        "[,1]",
        "{}",
        "{,}",
        '{"a" 1}',
        '{"a":}',
        "{1: 2}",
        '"\\x"',
        '"\\u12"',
        '"\\ud800"',
        '"\t"',
        '"\\t"',
        '"',
        "[" * 90 + "]" * 90,
        "[",
        "]",
        "1" * 4300,
        "1" * 4301,
        "-" + "1" * 4300,
        '"é🗺"',
        '{"__proto__": 3}',
        '"\x7f"',
        "\u00a01",
        "1 2",
        "null",
        "[[[]]]",
        "\f1",
        '"n5"',
        '"t"',
        '""',
        '"a"1',
        '1"a"',
        '"a""b"',
        '"\\1',
        '"t\\1',
        '[1, "t\\2]',
        '"t\\\\" 1 "',
        '"a\\',
        "truefalse",
        "null1",
        "1.5.2",
        "{null: 1}",
        '{"n1": 1}',
        "é",
        '{"": 1}',
        "1" * 100 + ".0",
        "[" * 450 + "]" * 450,
        "[" * 100_000 + "]" * 100_000,
        '"' + "ab" * 5_000_000 + '"',
        '"' + "\\n" * 5_000_000 + '"',
        # Must take no longer than others of their size.
        '"' + '\\"' * 100_000,
        "[" + ",".join(["1" * 4300] * 300) + "]",
    )
    changes = {f"more {number}": raw(more(value)) for number, value in enumerate(values)}
    whole = {
        "whole as float": ('"cells_x": 2', '"cells_x": 2.0'),
        "whole as power": ('"cells_x": 2', '"cells_x": 2e0'),
        "twice": ('"packing": "rows"', '"packing": 3, "packing": "rows"'),
        "float as whole": ('"cell_km": 1.5', '"cell_km": 2'),
        "key with escapes": ('"packing"', '"\\u0070acking"'),
        "huge": ('"metric_p": 2.0', f'"metric_p": {10**300}'),
        "true": ('"cells_x": 2', '"cells_x": true'),
        "text": ('"cells_x": 2', '"cells_x": "2"'),
    }
    for name, (before, after) in whole.items():
        changes[name] = raw(lambda text, before=before, after=after: text.replace(before, after, 1))
    changes |= {
        "blanks": raw(lambda text: f" \t\r\n{text}\n"),
        "null after": raw(lambda text: text + "\0"),
        "nothing": raw(lambda _: ""),
        "largest": raw(lambda text: text.ljust(2**25)),
        "too large": raw(lambda text: text.ljust(2**25 + 1)),
        "a list": raw(lambda text: f"[{text}]"),
        "utf-16": raw(str, "utf-16-le"),
        "mark": raw(str, "utf-8-sig"),
        "latin": raw(lambda text: text.replace("nobody", "ü"), "latin-1"),
        "wrong": raw(lambda text: text.replace("nobody", "\ud800")),
    }
    source = VECTOR_FOLDER / "rows.mdp"
    paths = [write(source, tmp_path / f"{name}.mdp") for name, write in changes.items()]
    verdicts = dict(zip(changes, compare_verdicts(paths, engine), strict=True))
    assert verdicts["blanks"] == verdicts["twice"] == verdicts["largest"] == (True, True)
    assert verdicts["whole as float"] == verdicts["utf-16"] == verdicts["too large"] == (False, False)


@every_engine
def test_sizes_at_their_limits_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    """What is refused for its size must not be made first, and what just fits is taken."""
    changes = [
        put("grid", "cells_x", value=10**8),
        put("grid", "cells_x", value=2**53 + 1),
        put("grid", "refine", value=[10**6] * 64),
        put("grid", "refine", value=[1, 3, 1]),
        put("tile_cells", value=[2, 3]),
        put("tile_cells", value=[2, 4]),
        put("sections", 0, 0, value=2**62),
        put("sections", 0, 0, value=2**62 + 1),
        put("metric_p", value=1e300),
        put("metric_p", value=1),
        put("metric_p", value=0.9999999),
        put("quantisation_km", value=0.25 * 2**0.5 * (1 + 9e-7)),
        put("quantisation_km", value=0.25 * 2**0.5 * (1 + 1.1e-6)),
        put("epsilon_certified", value=1 + 9.9e-7),
        put("epsilon_certified", value=1 + 1.1e-6),
        put("kept", value="ff"),
        put("kept", value="f"),
        put("kept", value="FF"),
        put("kept", value="fc\n"),
        put("remap", value=[0] * 12),
        put("remap", value=[11] * 12),
        put("remap", value=[12] * 12),
        put("remap", value=[0.0] * 12),
        put("noise", value=None),
        put("signature", value={"public_key": "0" * 64, "signature": "0" * 128}),
        put("signature", value={}),
        put("projection", value={"centre_lon": 3, "centre_lat": 4}),
        put("mechanism_sha256", value="0" * 64),
        put(
            "plane_fit", value={"half_lon": 1, "middle_lat": 4, "half_lat": 2, "x": [[1, 2]], "y": [[1], [2]]}
        ),
        put(
            "plane_fit",
            value={"half_lon": 1, "middle_lat": 4, "half_lat": 2, "x": [[1, 2]], "y": [[1], [2, 3]]},
        ),
        put("plane_fit", value={"half_lon": 1, "middle_lat": 88, "half_lat": 2, "x": [[1, 2]], "y": [[1]]}),
    ]
    source = VECTOR_FOLDER / "rows.mdp"
    paths = [rewritten(source, tmp_path / f"{number}.mdp", change) for number, change in enumerate(changes)]
    verdicts = compare_verdicts(paths, engine)
    assert 8 < sum(used for _, used in verdicts) < len(verdicts)
