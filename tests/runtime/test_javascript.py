"""The reader in JavaScript makes of every file what this package makes of it: rows, draws, refusals."""

import hashlib
import json
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.errors import DataError, StoreError
from mdpext_dask.extend.normalise import exponential
from mdpext_dask.problem.grid import Grid
from mdpext_dask.runtime import City, city_layout, open_city
from mdpext_dask.runtime.sticky import StickyKey
from tests.support.cities import rewritten
from tests.support.city_vectors import (
    VECTORS,
    file_of,
    header_of,
    outputs_on,
    scores_at,
    words_from,
)  # fmt: skip
from tests.support.engines import BROWSERS, MINIFIED, READER, every_engine, node, read

# Places outside are meant.
pytestmark = pytest.mark.filterwarnings("ignore::mdpext_dask.errors.ImplausibleWarning")

VECTOR_FOLDER = Path(__file__).parent / "vectors"


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
    assert MINIFIED.read_text().startswith(f"// mdpext.js {digest[:8]}\n"), "run workflows/minify_reader.py"
    assert MINIFIED.stat().st_size < 20_000


@every_engine
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


@every_engine
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


def test_both_readers_say_of_a_newer_city_that_they_are_too_old(tmp_path: Path) -> None:
    content = (VECTOR_FOLDER / "seed.mdp").read_bytes()
    newer = tmp_path / "newer.mdp"
    newer.write_bytes(content[:8] + (2).to_bytes(4, "little") + content[12:])
    said = "has city format 2, newer than 1, the newest that is read here; upgrade mdpext"
    assert read({"newer": {"path": str(newer)}})["newer"]["why"].startswith(said)
    with pytest.raises(StoreError) as caught:
        open_city(newer)
    assert str(caught.value) == f"{newer}: {said}-dask"


def test_a_key_file_is_read_as_in_python(tmp_path: Path) -> None:
    StickyKey.generate(epoch="May 🗺").write(tmp_path / "key")
    text = (tmp_path / "key").read_text()
    contents = {
        "sound": text,
        "damaged": text.replace('"May', '"June'),
        "newer": text.replace("version 2", "version 3"),
        "older": text.replace("version 2", "version 1"),
        "no object": "[]",
        "null": "null",
        "no JSON": text[:-3],
        "no text": text.replace('"epoch": "', '"epoch": 3, "was": "'),
    }
    code = """
import { text } from "node:stream/consumers";
const { readStickyKey } = await import(process.argv[1]);
const answers = {};
for (const [name, content] of Object.entries(JSON.parse(await text(process.stdin)))) {
  answers[name] = await readStickyKey(content).then(
    ({ secret, epoch }) => [Buffer.from(secret).toString("hex"), epoch],
    (error) => error.constructor.name + error.message,
  );
}
console.log(JSON.stringify(answers));
"""
    command = [str(node()), "--input-type=module", "-e", code, READER.as_uri()]
    done = subprocess.run(command, input=json.dumps(contents), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for name, content in contents.items():
        (tmp_path / "key").write_text(content)
        if name == "sound":
            key = StickyKey.read(tmp_path / "key")
            assert found[name] == [key.secret.hex(), key.epoch]
            continue
        with pytest.raises(DataError) as caught:
            StickyKey.read(tmp_path / "key")
        said = "newer than 2, the newest that is read here; upgrade mdpext"
        assert found[name].startswith("CityError")
        assert (said in found[name]) == (said in str(caught.value)) == (name == "newer")


def test_without_webcrypto_nothing_is_opened() -> None:
    code = """
const { openCity } = await import(process.argv[1]);
Object.defineProperty(globalThis, "crypto", { value: { getRandomValues: crypto.getRandomValues } });
await openCity(new ArrayBuffer(9)).catch((error) => console.log(error.message));
"""
    command = [str(node()), "--input-type=module", "-e", code, READER.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no WebCrypto here: open the page over https://" in done.stdout


@every_engine
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
