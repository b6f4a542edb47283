"""The reader in JavaScript makes of every file what this package makes of it: rows, draws, refusals."""

import hashlib
import json
import random
import subprocess
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.errors import ImplausibleWarning, MdpextError, StoreError
from mdpext_dask.extend.normalise import exponential
from mdpext_dask.problem.grid import Grid
from mdpext_dask.runtime import City, city_layout, open_city
from tests.support.cities import put, rewritten, spoil, taken_apart, with_header, write_city
from tests.support.city_vectors import (
    CITIES,
    VECTORS,
    file_of,
    header_of,
    outputs_on,
    refused_form,
    scores_at,
    words_from,
)  # fmt: skip
from tests.support.engines import BROWSERS, MINIFIED, READER, node, read

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

VECTOR_FOLDER = Path(__file__).parent / "vectors"
HEADERS, SECTIONS, BYTES = 160, 120, 60


@pytest.fixture(params=["node", *(pytest.param(name, marks=pytest.mark.slow) for name in BROWSERS)])
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of each engine; tests are skipped where it is not installed."""
    name: str = request.param
    return name


@cache
def known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTOR_FOLDER / VECTORS).read_text())
    return found


# --- vectors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "engine_name"), [(READER, "node"), *((MINIFIED, name) for name in ("node", *BROWSERS))]
)
def test_the_vectors(module: Path, engine_name: str) -> None:
    asked: dict[str, Any] = {
        name: {
            "path": str(VECTOR_FOLDER / f"{name}.mdp"),
            "records": [record[:2] for record in city.get("records", ())],
            "draws": [draw[:2] for draw in city.get("draws", ())],
            "sticky": [answer[:3] for answer in city.get("sticky", ())],
        }
        for name, city in known()["cities"].items()
    }
    asked["signed"]["options"] = {"trustedKey": known()["public_key"]}
    found = read(asked, module, engine_name)
    for name, city in known()["cities"].items():
        # That all rows are used says that they have the digests of the vectors.
        assert found[name]["used"], found[name]
        assert found[name]["mechanism_sha256"] == city["mechanism_sha256"]
        assert found[name]["records"] == [record[2:] for record in city.get("records", ())]
        for kind in ("draws", "sticky"):
            assert found[name][kind] == [answer[-1] for answer in city.get(kind, ())], (name, kind)


def test_the_minified_file_is_that_of_the_source_and_small() -> None:
    digest = hashlib.sha256(READER.read_bytes()).hexdigest()
    assert MINIFIED.read_text().startswith(f"// mdpext.js {digest[:16]}\n"), "run workflows/minify_reader.py"
    assert MINIFIED.stat().st_size < 20_000


def test_who_has_signed(engine: str) -> None:
    key, other = known()["public_key"], "0" * 64
    asked = {
        "not signed": {"path": str(VECTOR_FOLDER / "seed.mdp"), "options": {"trustedKey": key}},
        "another key": {"path": str(VECTOR_FOLDER / "signed.mdp"), "options": {"trustedKey": other}},
        "no remap": {"path": str(VECTOR_FOLDER / "rows.mdp"), "options": {"remap": True}},
    }
    found = read(asked, engine=engine)
    assert [found[name].get("opened") for name in asked] == [None] * 3
    assert "not signed" in found["not signed"]["why"]
    assert "another key" in found["another key"]["why"]
    assert "without a remap" in found["no remap"]["why"]


def test_a_signature_of_what_is_hard_to_write_again(tmp_path: Path) -> None:
    """Numbers, letters and orders of keys that languages write differently; and one that has been changed."""
    from tests.support.city_vectors import SIGNING_KEY

    strange: dict[str, Any] = {
        "numbers": [
            1e16,
            1e15,
            123456789012345678.0,
            1e-5,
            1e-4,
            1.5e-7,
            5e-324,
            1.7976931348623157e308,
            -0.0,
            0.0,
            1.0,
            2**80,
            -7,
            1e21,
            1e22,
            0.1 + 0.2,
        ],
        "\U0001f5fa": 1,
        "\uffee": 2,
        "é": 3,
        "z": '\x7f\x00\x1f\n\t\b\f\r"\\/\u2028',
        "__proto__": {"b": 1, "a": []},
        "lone": "\ud800",
    }
    asked = {}
    for name in ("whole", "changed"):

        def sign(header: dict[str, Any], _: list[bytes], name: str = name) -> None:
            header |= strange
            header.pop("signature")
            header["signature"] = SIGNING_KEY.signed("city", header)
            header["z"] += "x" * (name == "changed")

        path = rewritten(VECTOR_FOLDER / "signed.mdp", tmp_path / f"{name}.mdp", sign)
        asked[name] = {"path": str(path), "options": {"trustedKey": SIGNING_KEY.public_key}}
    open_city(tmp_path / "whole.mdp", trusted_key=SIGNING_KEY.public_key)
    found = read(asked)
    assert found["whole"].get("used"), found
    assert "is not what the trusted key has signed" in found["changed"]["why"]


# --- rows and draws ---------------------------------------------------------------------------------


def large_city(path: Path, grid: Grid, outputs: int, packing: str, tile: tuple[int, int]) -> City:
    """Write a city with uneven rows, and return it."""
    planar = outputs_on(grid, outputs, planar=True)
    rng = np.random.default_rng(outputs)
    scores = scores_at(grid.seeds_xy_km(), planar, 0.3).reshape(*grid.seeds_shape, outputs)
    scores -= rng.uniform(0, 9, scores.shape)
    tiles = city_layout.Tiles(grid, tile)
    rows = [tiles.extended(scores, number) for number in range(len(tiles))]
    sections = (
        [city_layout.pack_table(scores)] if packing == "seed" else list(map(city_layout.pack_rows, rows))
    )
    path.write_bytes(file_of(header_of(grid, planar), packing, tile, rows, sections))
    return open_city(path)


def compare_rows(city: City, folder: Path, engine: str = "node") -> int:
    """Compare all rows bit for bit, and return how many there are."""
    path = city._content.path
    (found,) = read({"it": {"path": str(path), "rows": str(folder / "rows")}}, engine=engine).values()
    assert found.get("used"), found
    bits = np.fromfile(folder / "rows", dtype="<u4")
    start = 0
    for tile in range(len(city._tiles)):
        rows = city._content.rows(tile).view(np.uint32).ravel()
        assert np.array_equal(rows, bits[start : start + len(rows)])
        start += len(rows)
    assert start == len(bits)
    return start // city._content.outputs


@pytest.mark.parametrize("packing", ["seed", "rows"])
def test_rows_are_the_same_bits(packing: str, tmp_path: Path, engine: str) -> None:
    grid = Grid(-4.0, 2.0, 9, 7, 1.0, (2, 3))
    assert (
        compare_rows(large_city(tmp_path / "c.mdp", grid, 139, packing, (4, 3)), tmp_path, engine) == 55 * 43
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["seed", "rows"])
def test_a_million_rows_are_the_same_bits(packing: str, tmp_path: Path) -> None:
    grid = Grid(-4.0, 2.0, 100, 100, 0.1, (10,))  # small, so that no probability is below 2^-36
    assert compare_rows(large_city(tmp_path / "c.mdp", grid, 20, packing, (9, 11)), tmp_path) == 1001 * 1001


@pytest.mark.parametrize("size", [41, 64, 65, 200])
def test_draws_at_every_border_of_a_row_and_from_random_bytes(size: int, tmp_path: Path) -> None:
    """Every output's first and last number, and what is next to the end of acceptance, in any blocks."""
    city = large_city(tmp_path / "c.mdp", Grid(-4.0, 2.0, 3, 2, 1.0, (3,)), size, "seed", (2, 2))
    grid, draws, expected = city.places.grid, [], []
    rng = random.Random(7)
    for i, j in ((0, 0), (4, 5), (9, 6)):
        place = {"x": float(grid.x_km()[i]), "y": float(grid.y_km()[j])}
        sums = city._cumulative(i, j).tolist()
        total = sums[-1]
        end = total * ((2**64 - 1) // (total + (total >> 6)))
        # After a number that is thrown away, another.
        contents = [
            (number + copy * total).to_bytes(8, "little")
            for number in {*sums[:-1], *(up - 1 for up in sums), 0}
            for copy in (0, 7)
        ]
        contents += [number.to_bytes(8, "little") + bytes(8) for number in (end - 1, end, end + 1, 2**64 - 1)]
        contents += [rng.randbytes(64) for _ in range(300)]
        for content in contents:
            outputs, _ = city.sample_points(
                np.array([list(place.values())]), planar=True, entropy_for_tests=words_from(content)
            )
            draws.append([place, content.hex()])
            expected.append(int(outputs[0]))
    (found,) = read({"it": {"path": str(tmp_path / "c.mdp"), "draws": draws}}).values()
    assert found["draws"] == expected
    assert len(set(expected)) == size


def test_no_draw_follows_from_rows_that_a_caller_has_changed(tmp_path: Path) -> None:
    module, city = tmp_path / "changing.mjs", known()["cities"]["rows"]
    module.write_text(
        f"""import {{ CityError, openCity as open }} from "{READER.as_uri()}";
        export {{ CityError }};
        export async function openCity(...given) {{
          const city = await open(...given);
          for (let tile = 0; tile < city.tiles; tile++) (await city.rows(tile)).fill(0);
          (await city.row(0, 0)).fill(0);
          return city;
        }}"""
    )
    draws = [draw[:2] for draw in city["draws"]]
    (found,) = read({"it": {"path": str(VECTOR_FOLDER / "rows.mdp"), "draws": draws}}, module).values()
    assert found["draws"] == [draw[-1] for draw in city["draws"]]


def test_records_of_places_anywhere() -> None:
    """In degrees and km, in and around a turned plane with polynomials, and on Earth without."""
    rng = np.random.default_rng(3)
    near = rng.uniform((-74.1, 40.7), (-73.85, 40.86), (400, 2))
    far = np.stack([rng.uniform(-180, 180, 200), rng.uniform(-90, 90, 200)], axis=-1)
    antipode = np.array([106.03, -40.78]) + rng.uniform(-0.5, 0.5, (50, 2))
    asked: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name in ("seed", "noise", "rows", "rows-inf"):
        city = open_city(VECTOR_FOLDER / f"{name}.mdp")
        places = np.concatenate([near, far, antipode, [[106.03, -40.78], [0.0, 90.0], [180.0, -90.0]]])
        xy = city.places.many(places, planar=False)
        for place_km in (None, 0.9):
            records, inside = city.places.records(xy, place_km)
            pairs = np.stack(np.divmod(records, city.places.grid.shape[1]), axis=-1).tolist()
            key = f"{name} {place_km}"
            expected[key] = [[*pair, not within] for pair, within in zip(pairs, inside.tolist(), strict=True)]
            given = [[{"lon": lon, "lat": lat}, place_km] for lon, lat in places.tolist()]
            asked[key] = {"path": str(VECTOR_FOLDER / f"{name}.mdp"), "records": given}
    found = read(asked)
    for name in asked:
        assert found[name]["records"] == expected[name], name


# --- files from anybody -----------------------------------------------------------------------------


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


def test_changed_headers_have_the_same_verdict(tmp_path: Path, engine: str) -> None:
    """Digests are right, so that every field is judged by itself."""
    rng, given, paths = random.Random(1), sources(tmp_path), []
    for number in range(HEADERS):
        path = tmp_path / f"{number}.mdp"
        rewritten(given[number % len(given)], path, lambda header, parts: spoil(header, parts, rng))
        paths.append(path)
    verdicts = compare_verdicts(paths, engine)
    assert 10 < sum(opened for opened, _ in verdicts) < HEADERS / 2


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
    for name, changes in known()["refused"].items():
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
        "a list": raw(lambda text: f"[{text}]"),
        "utf-16": raw(str, "utf-16-le"),
        "mark": raw(str, "utf-8-sig"),
        "latin": raw(lambda text: text.replace("nobody", "ü"), "latin-1"),
        "wrong": raw(lambda text: text.replace("nobody", "\ud800")),
    }
    source = VECTOR_FOLDER / "rows.mdp"
    paths = [write(source, tmp_path / f"{name}.mdp") for name, write in changes.items()]
    verdicts = dict(zip(changes, compare_verdicts(paths, engine), strict=True))
    assert verdicts["blanks"] == verdicts["twice"] == (True, True)
    assert verdicts["whole as float"] == verdicts["utf-16"] == (False, False)


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


def test_both_readers_say_of_a_newer_city_that_they_are_too_old(tmp_path: Path) -> None:
    content = (VECTOR_FOLDER / "seed.mdp").read_bytes()
    newer = tmp_path / "newer.mdp"
    newer.write_bytes(content[:8] + (2).to_bytes(4, "little") + content[12:])
    said = "has city format 2, newer than 1, the newest that is read here; upgrade mdpext"
    assert read({"newer": {"path": str(newer)}})["newer"]["why"].startswith(said)
    with pytest.raises(StoreError) as caught:
        open_city(newer)
    assert str(caught.value) == f"{newer}: {said}-dask"


def test_without_webcrypto_nothing_is_opened() -> None:
    code = """
const { openCity } = await import(process.argv[1]);
Object.defineProperty(globalThis, "crypto", { value: { getRandomValues: crypto.getRandomValues } });
await openCity(new ArrayBuffer(9)).catch((error) => console.log(error.message));
"""
    command = [str(node()), "--input-type=module", "-e", code, READER.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no WebCrypto here: open the page over https://" in done.stdout


def test_the_exponential_is_the_same_bits(tmp_path: Path, engine: str) -> None:
    """All of its range, through rows of which one output takes nearly all."""
    x = np.linspace(-24.5, 0.0, 400)
    assert (np.diff(exponential(x)) > 0).all()
    grid = Grid(0.0, 0.0, 19, 19, 1.0, (2,))
    outputs = outputs_on(grid, 2, planar=True)
    scores = np.stack([np.zeros(400), x], axis=-1).reshape(*grid.seeds_shape, 2)
    tiles = city_layout.Tiles(grid, (19, 19))
    rows = [tiles.extended(scores, 0)]
    path = tmp_path / "c.mdp"
    path.write_bytes(
        file_of(header_of(grid, outputs), "seed", (19, 19), rows, [city_layout.pack_table(scores)])
    )
    assert compare_rows(open_city(path), tmp_path, engine) == 39 * 39
