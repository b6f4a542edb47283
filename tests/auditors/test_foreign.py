"""Foreign mechanisms: every number arrives as it was, every record where it was, or one line says why not."""

import bz2
import gzip
import itertools
import lzma
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pyarrow import parquet

from mdpext_dask.auditors.foreign import read as reading_foreign
from mdpext_dask.auditors.foreign import row_files
from mdpext_dask.auditors.foreign.read import ForeignMechanism, lattice_of, read_foreign
from mdpext_dask.errors import DataError, MdpextError, SpecError, StoreError
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.problem.domain import build_domain
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.store.mechanism_store import MechanismStore
from tests.support.inside import call, run_inside
from tests.support.refusals import refusal as refusal_of

ROWS = np.array([[0.25, 0.75], [-0.0, np.inf], [np.nan, -1e-300]])
PLACES = np.array([[0.5, 1.0], [2.0, -3.0], [4.0, 5.25]])
NUMERIC = ("f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?")
SINGLE = ("f2", "f4", "i1", "u1", "i2", "u2", "?")
EXACT = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def save_npy(path: Path, rows: NDArray[Any]) -> Path:
    np.save(path / "m.npy", rows)
    return path / "m.npy"


def save_npz(path: Path, rows: NDArray[Any]) -> Path:
    np.savez_compressed(path / "m.npz", probability=rows)
    return path / "m.npz"


def save_zarr(path: Path, rows: NDArray[Any], version: int = 3) -> Path:
    group = zarr.open_group(path / f"m{version}.zarr", mode="w", zarr_format=version)
    chunks = tuple(max(1, length - 1) for length in rows.shape)
    array = group.create_array("probability", shape=rows.shape, dtype=rows.dtype, chunks=chunks)
    array[...] = rows
    return path / f"m{version}.zarr"


def save_zarr_2(path: Path, rows: NDArray[Any]) -> Path:
    return save_zarr(path, rows, 2)


def save_csv(path: Path, rows: NDArray[Any]) -> Path:
    lines = [",".join(f"p{k}" for k in range(rows.shape[1])), *(",".join(map(str, r)) for r in rows.tolist())]
    return write(path / "m.csv", "\n".join(lines) + "\n")


def save_parquet(path: Path, rows: NDArray[Any], row_group_size: int = 2) -> Path:
    table = {f"p{k}": rows[:, k] for k in range(rows.shape[1])}
    parquet.write_table(pa.table(table), path / "m.parquet", row_group_size=row_group_size)
    return path / "m.parquet"


ARRAYS = (save_npy, save_npz, save_zarr, save_zarr_2)
FORMATS = (*ARRAYS, save_csv, save_parquet)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def points_file(folder: Path, count: int, name: str = "points.csv") -> Path:
    return write(folder / name, "x_km,y_km\n" + "".join(f"{i},{i % 2}\n" for i in range(count)))


def read(path: Path | str, points: Path | None = None, folder: Path | None = None) -> ForeignMechanism:
    return read_foreign(str(path), points, folder or (points or Path(str(path))).parent / "scratch")


def rows_of(mechanism: ForeignMechanism) -> NDArray[Any]:
    rows = np.load(mechanism.rows, mmap_mode="r", allow_pickle=False)
    assert rows.ndim == 2
    assert rows.flags.c_contiguous
    assert rows.dtype in (np.float32, np.float64)
    assert rows.dtype.isnative
    assert len(rows) == len(mechanism.coordinates)
    return np.array(rows)


def assert_same_bits(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal, not-a-number where it was, and zeros of the same sign."""
    np.testing.assert_array_equal(found, expected)
    if expected.dtype.kind == "f":
        signs = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found)[signs], np.signbit(expected)[signs])


def refusal(
    path: Path | str,
    points: Path | None = None,
    folder: Path | None = None,
    kind: type[Exception] = DataError,
) -> str:
    """Return what a refusal says; nothing may be left in the scratch folder."""
    folder = folder or (points or Path(str(path))).parent / "scratch"
    message = refusal_of(lambda: read_foreign(str(path), points, folder), kind=kind)
    assert str(path) in message or str(points) in message
    assert not folder.exists() or not list(folder.iterdir())
    return message


# --- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", FORMATS)
def test_what_no_probability_can_be_is_kept(tmp_path: Path, save: Callable[..., Path]) -> None:
    found = read(save(tmp_path, ROWS), points_file(tmp_path, 3))
    read(save_csv(tmp_path, 2 * ROWS), points_file(tmp_path, 3))  # in the same folder, where they do not meet
    assert_same_bits(rows_of(found), ROWS)
    np.testing.assert_array_equal(found.coordinates, [(0, 0), (1, 1), (2, 0)])
    assert found.coordinates.dtype == np.float64
    assert found.planar
    assert Path(found.source).parent == tmp_path


@pytest.mark.parametrize("save", [*ARRAYS, save_parquet])
@given(data=st.data())
@EXACT
def test_types_are_exact(tmp_path_factory: Any, save: Callable[..., Path], data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("types")
    name = data.draw(st.sampled_from(NUMERIC))
    elements: dict[str, Any] = {}
    if name in ("i8", "u8"):
        elements = {"elements": st.integers(0 if name == "u8" else 1 - 2**53, 2**53 - 1)}
    elif name in ("f2", "f4", "f8"):
        elements = {"elements": st.floats(width=8 * int(name[1]))}
    shape = data.draw(st.tuples(st.integers(2, 5), st.integers(1, 4)))
    rows = data.draw(hnp.arrays(name, shape, **elements))
    found = rows_of(read(save(folder, rows), points_file(folder, len(rows))))
    assert found.dtype == (np.float32 if name in SINGLE else np.float64)
    assert_same_bits(found, rows)


@given(rows=hnp.arrays(np.float64, st.tuples(st.integers(2, 5), st.integers(1, 4))))
@EXACT
def test_text_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, rows: NDArray[np.float64]) -> None:
    folder = tmp_path_factory.mktemp("text")
    assert_same_bits(rows_of(read(save_csv(folder, rows), points_file(folder, len(rows)))), rows)


@pytest.mark.parametrize("save", [*ARRAYS, save_parquet])
@pytest.mark.parametrize("value", [2**53, 2**53 + 1, -(2**63), 2**63 - 1])
def test_integers_beyond_float64_are_refused(tmp_path: Path, save: Callable[..., Path], value: int) -> None:
    message = refusal(save(tmp_path, np.array([[0, 1], [value, 0]])), points_file(tmp_path, 2))
    assert "cannot hold exactly" in message
    assert str(value)[:15] in message or "e+" in message


def test_missing_wholes_in_parquet_are_kept_and_the_others_still_checked(tmp_path: Path) -> None:
    path, points = tmp_path / "m.parquet", points_file(tmp_path, 3)
    parquet.write_table(pa.table({"a": pa.array([1, None, 0]), "b": pa.array([True, None, False])}), path)
    assert_same_bits(rows_of(read(path, points)), np.array([[1.0, 1.0], [np.nan, np.nan], [0, 0]]))
    parquet.write_table(pa.table({"a": pa.array([1, None, 2**53 + 1])}), path)
    for file in (tmp_path / "scratch").iterdir():
        file.unlink()
    assert "column a" in refusal(path, points)


@pytest.mark.parametrize("save", ARRAYS)
@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", "<f4", ">i4", ">u2"])
def test_byte_order_does_not_matter(tmp_path: Path, save: Callable[..., Path], dtype: str) -> None:
    rows = np.array([[1, 0], [0, 3]], dtype)
    assert_same_bits(rows_of(read(save(tmp_path, rows), points_file(tmp_path, 2))), rows)


@pytest.mark.parametrize("save", ARRAYS)
@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("piece", [1, 50, 10**6])
def test_memory_order_and_pieces_do_not_matter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[..., Path],
    shape: tuple[int, ...],
    order: str,
    piece: int,
) -> None:
    monkeypatch.setattr(row_files, "PIECE_BYTES", piece)
    rows = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    count = int(np.prod(shape[:-1]))
    path = save(tmp_path, np.asarray(rows, order=order))
    assert_same_bits(rows_of(read(path, points_file(tmp_path, count))), rows.reshape(count, -1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_usable_file_is_used_where_it_lies(tmp_path: Path, dtype: type) -> None:
    path = save_npy(tmp_path, ROWS.astype(dtype))
    assert read(path, points_file(tmp_path, 3)).rows == path
    assert not (tmp_path / "scratch").exists()


def test_paths_may_be_urls_of_files_or_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, points = save_npy(tmp_path, ROWS), points_file(tmp_path, 3)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (f"file://{path}", "~/m.npy", "m.npy"):
        found = read(name, Path("~/points.csv"), tmp_path / "scratch")
        assert (found.rows, found.source) == (path, name)
    assert points.exists()


# --- where the records are -------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("x_km", "y_km"), ("lon", "lat")])
def test_coordinates_beside_the_rows(tmp_path: Path, names: tuple[str, str]) -> None:
    places: dict[str, Any] = dict(zip(names, PLACES.T, strict=True))
    np.savez(tmp_path / "m.npz", probability=ROWS, **places)
    for version in (2, 3):
        group = zarr.open_group(save_zarr(tmp_path, ROWS, version), mode="r+")
        for name, values in places.items():
            group.create_array(name, data=values)
    columns = {names[0]: PLACES[:, 0], "a": ROWS[:, 0], names[1]: PLACES[:, 1], "b": ROWS[:, 1]}
    lines = [",".join(map(repr, row)) for row in np.stack(list(columns.values()), axis=-1).tolist()]
    write(tmp_path / "m.csv", "\n".join([",".join(columns), *lines]))
    parquet.write_table(pa.table(dict(reversed(columns.items()))), tmp_path / "m.parquet")
    points = points_file(tmp_path, 3)
    for name in ("m.npz", "m2.zarr", "m3.zarr", "m.csv", "m.parquet"):
        path = tmp_path / name
        found = read(path)
        assert_same_bits(rows_of(found), ROWS[:, ::-1] if name == "m.parquet" else ROWS)
        np.testing.assert_array_equal(found.coordinates, PLACES)
        assert found.planar == (names[0] == "x_km")
        # A file of points counts for more.
        np.testing.assert_array_equal(read(path, points).coordinates, [(0, 0), (1, 1), (2, 0)])


AXES = np.array([0.0, 1.5, 4.0]), np.array([-1.0, 2.0])
CROSSINGS = np.array(list(itertools.product(*AXES)))


@pytest.mark.parametrize("form", ["axes", "each", "planes", "points"])
def test_records_of_an_array_with_x_and_y_are_in_c_order(tmp_path: Path, form: str) -> None:
    rows = np.arange(24.0).reshape(3, 2, 4)
    x, y = {
        "axes": AXES, "each": tuple(CROSSINGS.T), "planes": tuple(np.meshgrid(*AXES, indexing="ij")),
        "points": AXES,
    }[form]  # fmt: skip
    if form == "points":
        places = CROSSINGS.reshape(3, 2, 2).astype(np.float32)
        np.savez(tmp_path / "m.npz", Q=rows, points_km=places, n=np.arange(3))
    else:
        np.savez(tmp_path / "m.npz", probability=rows, x_km=x, y_km=y)
    group = zarr.open_group(save_zarr(tmp_path, rows), mode="r+")
    group.create_array("x_km", data=x)
    group.create_array("y_km", data=y)
    for path in (tmp_path / "m.npz", tmp_path / "m3.zarr"):
        found = read(path)
        assert_same_bits(rows_of(found), rows.reshape(6, 4))
        np.testing.assert_array_equal(found.coordinates, CROSSINGS)
        assert found.lattice is not None
        assert found.lattice.dtype == np.intp
        np.testing.assert_array_equal(found.lattice, np.arange(6).reshape(3, 2))


def test_a_store_of_our_own_layout(tmp_path: Path, small_job: Callable[..., dict[str, Any]]) -> None:
    spec = JobSpec.model_validate(small_job())
    domain = build_domain(spec)
    url = str(tmp_path / "own.zarr")
    store = MechanismStore.create(url, spec, domain, {})
    shape = *domain.grid.shape, domain.outputs
    rows = np.random.default_rng(1).random(shape, dtype=np.float32)
    array = store.array("probability")
    rows[0, 0] = np.nan
    array[...] = rows
    found = read(url, folder=tmp_path / "scratch")
    assert rows_of(found).dtype == np.float32
    assert_same_bits(rows_of(found), rows.reshape(-1, shape[-1]))
    expected = np.stack(np.meshgrid(domain.grid.x_km(), domain.grid.y_km(), indexing="ij"), axis=-1)
    np.testing.assert_array_equal(found.coordinates, expected.reshape(-1, 2))
    assert found.lattice is not None
    assert found.lattice.shape == shape[:2]
    # The array alone says nothing of where its records are.
    message = refusal(f"{url}/probability", folder=tmp_path / "none", kind=SpecError)
    assert "--points" in message


def test_what_was_never_written_reads_as_nan(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "m.zarr", shape=(4, 2), chunks=(2, 2), dtype="f4", fill_value=np.nan)
    assert np.isnan(rows_of(read(tmp_path / "m.zarr", points_file(tmp_path, 4)))).all()


def test_zarr_behind_a_url(tmp_path: Path) -> None:
    group = zarr.open_group("memory://foreign-rows", mode="w")
    for name, values in (("probability", ROWS), ("x_km", PLACES[:, 0]), ("y_km", PLACES[:, 1])):
        group.create_array(name, data=values)
    found = read("memory://foreign-rows", folder=tmp_path / "scratch")
    assert_same_bits(rows_of(found), ROWS)
    np.testing.assert_array_equal(found.coordinates, PLACES)


@pytest.mark.parametrize(("units", "word"), [(None, "has no attribute units"), ("m", "units m")])
def test_axes_must_say_that_they_are_in_kilometres(tmp_path: Path, units: str | None, word: str) -> None:
    path = save_zarr(tmp_path, np.zeros((3, 2, 4)))
    group = zarr.open_group(path, mode="r+")
    for name, values in zip(("x", "y"), AXES, strict=True):
        group.create_array(name, data=values, attributes={} if units is None else {"units": units})
    message = refusal(path)
    assert word in message
    assert "x_km" in message
    # Whoever says it otherwise is heard.
    assert read(path, points_file(tmp_path, 6)).planar
    for name, values in zip(("lon", "lat"), AXES, strict=True):
        group.create_array(name, data=values)
    assert not read(path).planar


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_with_y_before_x_is_refused(tmp_path: Path, version: int) -> None:
    group = zarr.open_group(tmp_path / "m.zarr", mode="w", zarr_format=version)
    names = ["y", "x", "output"]
    named = {2: {"attributes": {"_ARRAY_DIMENSIONS": names}}, 3: {"dimension_names": names}}[version]
    group.create_array("probability", data=np.zeros((2, 2, 3)), **named)
    assert "(y, x, output)" in refusal(tmp_path / "m.zarr")


# --- lattice ---------------------------------------------------------------------------------------

lattices = st.tuples(*[st.lists(st.floats(-100, 100), min_size=2, max_size=6, unique=True)] * 2)


@given(axes=lattices, random=st.randoms(use_true_random=False))
@EXACT
def test_a_shuffled_lattice_is_found(axes: tuple[list[float], list[float]], random: Any) -> None:
    points = list(itertools.product(*axes))
    random.shuffle(points)
    coordinates = np.array(points)
    lattice = lattice_of(coordinates)
    assert lattice is not None
    expected = np.stack(np.meshgrid(*map(sorted, axes), indexing="ij"), axis=-1)
    np.testing.assert_array_equal(coordinates[lattice], expected)
    assert sorted(lattice.ravel()) == list(range(len(points)))


@given(axes=lattices, data=st.data())
@EXACT
def test_one_wrong_point_is_no_lattice(axes: tuple[list[float], list[float]], data: st.DataObject) -> None:
    points = np.array(list(itertools.product(*axes)))
    which = data.draw(st.integers(0, len(points) - 1))
    moved, doubled = points.copy(), points.copy()
    moved[which, 0] += 1000
    doubled[which] = points[which - 1]
    assert lattice_of(np.delete(points, which, axis=0)) is None
    assert lattice_of(moved) is None
    assert lattice_of(doubled) is None
    assert lattice_of(np.concatenate([points, points[:1]])) is None


@pytest.mark.parametrize("points", [[(0, 0), (0, 1)], [(0, 0), (1, 0), (2, 0)], [(0, 0), (0, 0)]])
def test_a_line_is_no_lattice(points: list[tuple[float, float]]) -> None:
    assert lattice_of(np.array(points, np.float64)) is None
    # Zeros of both signs are one line.
    assert lattice_of(np.array([(0.0, 0), (-0.0, 1), (1, 0.0), (1, 1)])) is not None


def test_degrees_make_no_lattice(tmp_path: Path) -> None:
    lines = "".join(f"{x},{y},1\n" for x, y in CROSSINGS)
    path = write(tmp_path / "m.csv", "lon,lat,p\n" + lines)
    assert read(path).lattice is None
    assert read(write(path, "x_km,y_km,p\n" + lines)).lattice is not None


# --- CSV -------------------------------------------------------------------------------------------


PACKERS = {"CSV": bytes, "csv.gz": gzip.compress, "csv.bz2": bz2.compress, "csv.xz": lzma.compress}


@pytest.mark.parametrize(("suffix", "pack"), PACKERS.items())
def test_packed_tables(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path = write(tmp_path / f"m.{suffix}", pack(b"\xef\xbb\xbfx_km,y_km,a\r\n1,2,0.5\r\n3,4,.25\r\n"))
    found = read(path)
    np.testing.assert_array_equal(rows_of(found), [[0.5], [0.25]])
    np.testing.assert_array_equal(found.coordinates, [(1, 2), (3, 4)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", np.nan), ("nan", np.nan), ("NaN", np.nan), ("inf", np.inf), ("-Infinity", -np.inf),
        ("1e999", np.inf), (" 0.5 ", 0.5), ("+1", 1), ("-0", -0.0), (".5", 0.5), ("5.", 5), ('"0.5"', 0.5),
        ("1E-3", 0.001), ("4.9e-324", 5e-324),
    ],
)  # fmt: skip
def test_numbers_in_text(tmp_path: Path, text: str, value: float) -> None:
    path = write(tmp_path / "m.csv", f"a,b\n1,{text}\n{text},0\n")
    assert_same_bits(rows_of(read(path, points_file(tmp_path, 2))), np.array([[1, value], [value, 0]]))


@pytest.mark.parametrize(
    "text", ["NA", "null", "one", "0x1F", "1_0", "٣", "1 2", "--1", "e5", ".", "True", "1;2", "0.5%"]
)
def test_text_that_is_no_number_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "m.csv", f"x_km,y_km,a,b\n1,2,0,\n1,2,{text},1\n1,2,worse,1\n")
    assert f"line 3: a {text!r} is not a number" in refusal(path)


def test_text_of_any_length_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.csv", 'a,b\n1,2\n3,"' + "long\n" * 1000 + '"\n')
    assert len(refusal(path, points_file(tmp_path, 2))) < 300


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        # Blank lines at the end are no rows; empty cells are NaN.
        ("\na,b\n1,0\n,1\n0.5,\n\n  \n", [[1, 0], [np.nan, 1], [0.5, np.nan]]),
        # Coordinates that are not needed may be anything.
        ("x_km,y_km,a\n0,north,1\n,inf,0\n", [[1], [0]]),
        # Outputs may be called by numbers.
        *((f"{header}\n1,0,0\n0,1,0\n", [[1, 0, 0], [0, 1, 0]]) for header in ("0,1,2", "1,2,3", "a,1,2")),
        # Labels are no outputs.
        *(
            (f"{label},a,b\n{first},1,0\n{first + 1},0,1\n", [[1, 0], [0, 1]])
            for label in ("record", "id", "index", "", "ID", "Unnamed: 0") for first in (0, 1)
        ),
    ],
)  # fmt: skip
def test_rows_of_a_table(tmp_path: Path, content: str, rows: list[list[float]]) -> None:
    path = write(tmp_path / "m.csv", content)
    assert_same_bits(rows_of(read(path, points_file(tmp_path, len(rows)))), np.array(rows, np.float64))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"), ("\n\n", "is empty"), ("a,b\n", "holds no rows"), ("a,b\n1,2\n", "found 1 and 2"),
        ("a,a\n1,2\n1,2\n", "two columns have the name 'a'"), ("a, a\n1,2\n1,2\n", "two columns"),
        ("a,,b\n1,2,3\n", "column 2 has no name"), ("record,id\n1,2\n", "no column is an output"),
        ("a,b\n1,2\n1\n", "line 3: 1 fields, but the header has 2"), ("a,b\n1,2,3\n", "line 2: 3 fields"),
        ("0.5,0.25,0.25\n1,0,0\n", "first line holds numbers"), ("1,0\n0,1\n", "first line holds numbers"),
        ("a,b\n1,\"2\n", "not a readable CSV"),
        ("x_km,a\n1,2\n", "x_km needs y_km"), ("x_km,y_km,lat,a\n1,2,3,4\n", "lat needs lon"),
        ("longitude,a\n1,3\n", "longitude looks like a coordinate; call it lon"),
        ("X,Y,a\n1,2,3\n", "call it x_km"), ("lat,Lng,long,a\n", "which column is lon? Found Lng, long"),
        (b"a,b\n1,\xff\n", "line 2: is not UTF-8"), ("a;b\n1;2\n", "line 1: looks semicolon separated"),
        ("a,b\n1,2\n\n1,2\n", "line 3: is empty"), ("a,b\n1,2\n,\n1,2\n", "line 3: is empty"),
    ],
)  # fmt: skip
def test_tables_that_are_not_clear_are_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    assert words in refusal(write(tmp_path / "m.csv", content), points_file(tmp_path, 2))


def test_labels_of_parquet_are_no_outputs(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    parquet.write_table(
        pa.table({"a": [1.0, 0.0], "__index_level_0__": ["p", "q"], "id": [7, 5], "record": [0, 1]}), path
    )
    assert rows_of(read(path, points_file(tmp_path, 2))).tolist() == [[1], [0]]


@pytest.mark.parametrize("records", [(1, 0, 2), (0, 2, 1), (5, 6, 7), (0, 1, "x"), (0, 1, 1)])
def test_records_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: tuple[Any, ...]) -> None:
    monkeypatch.setattr(row_files, "PIECE_BYTES", 1)
    lines = "".join(f"{record},{i},{i},1\n" for i, record in enumerate(records))
    path = write(tmp_path / "m.csv", "record,x_km,y_km,a\n" + lines)
    assert "in the order of the records" in refusal(path, points_file(tmp_path, 3))
    # Coordinates in the same rows go with them.
    assert read(path).coordinates.tolist() == [[0, 0], [1, 1], [2, 2]]
    if "x" not in records:
        parquet.write_table(pa.table({"record": list(records), "a": [1, 0, 1]}), tmp_path / "m.parquet")
        assert "in the order" in refusal(tmp_path / "m.parquet", points_file(tmp_path, 3), tmp_path / "other")


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("save", FORMATS)
def test_without_coordinates_points_are_asked_for(tmp_path: Path, save: Callable[..., Path]) -> None:
    message = refusal(save(tmp_path, ROWS), kind=SpecError)
    for part in ("--points FILE", "x_km,y_km", "lon,lat"):
        assert part in message


@pytest.mark.parametrize("save", FORMATS)
@pytest.mark.parametrize("count", [2, 4])
def test_points_must_be_as_many_as_records(tmp_path: Path, save: Callable[..., Path], count: int) -> None:
    message = refusal(save(tmp_path, ROWS), points_file(tmp_path, count))
    assert "3 records" in message
    assert f"{count} points in {tmp_path / 'points.csv'}" in message


@pytest.mark.parametrize("save", ARRAYS)
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.zeros(5), "has the shape (5,)"), (np.zeros((2, 2, 2, 2)), "has the shape (2, 2, 2, 2)"),
        (np.zeros((2, 2), complex), "holds complex128"), (np.array([["a", "b"], ["c", "d"]]), "holds"),
        (np.zeros((0, 3)), "found 0 and 3"), (np.zeros((3, 0)), "found 3 and 0"),
        (np.zeros((1, 3)), "found 1 and 3"), (np.zeros((1, 1, 3)), "found 1 and 3"),
        (np.zeros((2, 2), "M8[s]"), "holds datetime64"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arrays(tmp_path: Path, save: Callable[..., Path], rows: NDArray[Any], words: str) -> None:
    if rows.dtype.kind == "U" and "zarr" in save.__name__:
        rows = rows.astype("S1") if save is save_zarr_2 else rows
    with _quiet():
        assert words in refusal(save(tmp_path, rows), points_file(tmp_path, 4))


def _quiet() -> AbstractContextManager[Any]:
    """Zarr warns of types that its next version may write otherwise."""
    return warnings.catch_warnings(action="ignore")


@pytest.mark.parametrize("save", [save_npy, save_npz])
@pytest.mark.parametrize(
    "rows",
    [np.array([[{}, 1], [2, 3]], object), np.zeros((2, 2), np.longdouble), np.zeros(3, "f4,f8")],
    ids=["objects", "longdouble", "records"],
)
def test_nothing_is_unpickled(tmp_path: Path, save: Callable[..., Path], rows: NDArray[Any]) -> None:
    refusal(save(tmp_path, rows), points_file(tmp_path, 2))


@pytest.mark.parametrize("save", [*ARRAYS, save_csv, save_parquet])
def test_a_missing_file_is_named(tmp_path: Path, save: Callable[..., Path]) -> None:
    path = save(tmp_path, ROWS)
    absent = path.with_name("absent" + "".join(path.suffixes))
    assert refusal(absent, points_file(tmp_path, 3)) == f"{absent}: no such file"
    missing = tmp_path / "absent.csv"
    assert refusal(path, missing, tmp_path / "scratch") == f"{missing}: no such file"


@pytest.mark.parametrize("name", ["m.txt", "m", "m.mat", "m.h5"])
def test_an_unknown_format_is_told_what_is_known(tmp_path: Path, name: str) -> None:
    message = refusal(write(tmp_path / name, b"1"), points_file(tmp_path, 3))
    for part in (".npy", ".npz", ".csv", ".parquet", "Zarr"):
        assert part in message


def test_only_zarr_has_a_url(tmp_path: Path) -> None:
    assert "only Zarr" in refusal("memory://m.npy", folder=tmp_path)
    refusal("memory://nothing-here", folder=tmp_path)
    refusal("nonsense://place", folder=tmp_path, kind=StoreError)


@pytest.mark.parametrize("save", [save_npy, save_npz, save_parquet])
@given(cut=st.floats(0, 1, exclude_max=True))
@EXACT
def test_cut_file(tmp_path_factory: pytest.TempPathFactory, save: Callable[..., Path], cut: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = save(folder, np.random.default_rng(0).random((20, 5)))
    content = path.read_bytes()
    write(path, content[: int(cut * len(content))])
    refusal(path, points_file(folder, 20))


@pytest.mark.parametrize("save", [save_npz, save_parquet, save_npy])
@given(data=st.data())
@EXACT
def test_damaged_file(tmp_path_factory: pytest.TempPathFactory, save: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path, points = save(folder, np.random.default_rng(0).random((20, 5))), points_file(folder, 20)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, min(len(content), 200) - 1), min_size=1, max_size=5)):
        content[place] ^= data.draw(st.integers(1, 255))
    write(path, bytes(content))
    with _quiet():
        message = ""
        try:
            read(path, points)
        except MdpextError as error:
            message = str(error)
    assert len(message.splitlines()) <= 1


LINES = b"a,b\n" + b"1,2\n" * 1000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.csv.gz", gzip.compress(LINES, mtime=0)[:-9]), ("m.csv.gz", LINES),
        ("m.csv.bz2", bz2.compress(LINES)[:-9]), ("m.csv.xz", lzma.compress(LINES)[:-9]), ("m.csv.xz", LINES),
        ("m.npy", b""), ("m.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': (((((\n"), ("m.npy", b"PK\x03\x04"),
        ("m.npy", b"\x93NUMPY\x01\x00\x10\x00{[]: 1, 'a': 2}\n"),
        ("m.npz", b"not a zip"), ("m.npz", b"\x93NUMPY\x01\x00"), ("m.parquet", b"PAR1" * 4),
    ],
)  # fmt: skip
def test_broken_files_are_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    assert "not a readable" in refusal(write(tmp_path / name, content), points_file(tmp_path, 2))


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "found nothing"), ({"a": np.zeros(3)}, "found a"), ({"a": ROWS, "b": ROWS}, "found a, b"),
        ({"points_km": PLACES}, "no array"), ({"probability": np.zeros(3), "a": ROWS}, "has the shape (3,)"),
        ({"a": ROWS, "x_km": PLACES[:, 0]}, "x_km needs y_km"),
        ({"a": ROWS, "lat": PLACES[:, 0]}, "lat needs lon"),
        ({"a": ROWS, "x_km": np.zeros(3), "y_km": np.zeros(2)}, "y_km has the shape (2,)"),
        ({"a": ROWS, "x_km": np.zeros(3), "y_km": np.zeros(99)}, "too many numbers"),
        ({"a": ROWS, "x_km": np.zeros(3), "y_km": np.array(["a"] * 3)}, "y_km holds"),
        ({"a": ROWS, "points_km": np.zeros((2, 3))}, "points_km has the shape (2, 3)"),
        ({"a": ROWS, "lon": np.array([0, 1, 200]), "lat": np.zeros(3)}, "row 3: lon 200"),
        ({"a": ROWS, "x_km": np.zeros(3), "y_km": np.array([0, np.nan, 1])}, "row 2: y_km nan is not"),
        ({"a": np.zeros((3, 2, 4)), "x_km": np.zeros(2), "y_km": np.zeros(3)}, "does not fit"),
    ],
)  # fmt: skip
def test_unclear_archives_are_refused(tmp_path: Path, arrays: dict[str, NDArray[Any]], words: str) -> None:
    np.savez(tmp_path / "m.npz", **arrays)
    assert words in refusal(tmp_path / "m.npz")


def test_other_files_in_an_archive_are_no_arrays(tmp_path: Path) -> None:
    path = save_npz(tmp_path, ROWS)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.txt", "text")
    assert_same_bits(rows_of(read(path, points_file(tmp_path, 3))), ROWS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("LON,latitude,a\n0,0,1\n0,91,1\n", "line 3: lon 0, lat 91 is out of range"),
        ("x_km,y_km,a\n0,0,1\n0,,1\n", "line 3: y_km nan is not a finite number"),
        ("x_km,y_km,a\n0,inf,1\n0,0,1\n", "line 2: y_km inf is not a finite number"),
        ("x_km,y_km,a\n0,north,1\n", "line 2: y_km 'north' is not a number"),
    ],
)
def test_coordinates_that_cannot_be_are_named(tmp_path: Path, content: str, words: str) -> None:
    assert words in refusal(write(tmp_path / "m.csv", content))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array(["a", "b"]), "column q holds string"), (pa.array([[1.0], [2.0]]), "column q holds list"),
        (pa.array(["1", "2"]).dictionary_encode(), "column q holds dictionary"),
    ],
)  # fmt: skip
def test_columns_that_are_no_numbers(tmp_path: Path, column: Any, words: str) -> None:
    parquet.write_table(pa.table({"p": [1.0, 0.0], "q": column}), tmp_path / "m.parquet")
    assert words in refusal(tmp_path / "m.parquet", points_file(tmp_path, 2))


def test_columns_of_one_name_in_parquet(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1.0, 0]), pa.array([0.0, 1])], names=["p", "p"])
    parquet.write_table(table, tmp_path / "m.parquet")
    assert "two columns" in refusal(tmp_path / "m.parquet", points_file(tmp_path, 2))


@pytest.mark.parametrize("damage", ["nothing", "no array", "metadata", "list", "chunk", "group"])
def test_zarr_that_is_damaged_or_none(tmp_path: Path, damage: str) -> None:
    path = save_zarr(tmp_path, ROWS)
    array = path / "probability"
    if damage == "nothing":
        path = tmp_path / "folder"
        path.mkdir()
    elif damage == "no array":
        path = tmp_path / "other.zarr"
        zarr.open_group(path, mode="w").create_array("p", data=ROWS)
    elif damage == "chunk":
        for chunk in (array / "c").rglob("*"):
            if chunk.is_file():
                chunk.write_bytes(b"junk")
    else:
        place = path if damage == "group" else array
        write(place / "zarr.json", "[]" if damage == "list" else '{"zarr_format": 3, "node_type": "array"}')
    message = refusal(path, points_file(tmp_path, 3))
    # Zarr takes an array whose description lacks something for none at all.
    absent = damage in ("no array", "metadata")
    assert ("without an array probability" if absent else "not a readable Zarr") in message


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = write(tmp_path / "file", b"")
    with pytest.raises(StoreError, match="cannot be written"):
        read_foreign(str(save_csv(tmp_path, ROWS)), points_file(tmp_path, 3), blocked / "scratch")


# --- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "save",
    [save_npz, *(pytest.param(save, marks=pytest.mark.slow) for save in FORMATS if save is not save_npz)],
)
def test_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., Path]) -> None:
    monkeypatch.setattr(row_files, "PIECE_BYTES", 1 << 16)
    rows = np.random.default_rng(0).integers(0, 1000, (6000, 100)).astype(np.int32)
    path, points = tmp_path / "m.zarr", points_file(tmp_path, len(rows))
    if save in (save_zarr, save_zarr_2):
        version = 3 if save is save_zarr else 2
        array = zarr.create_array(path, shape=rows.shape, dtype="i4", chunks=(200, 60), zarr_format=version)
        array[...] = rows
    else:
        path = save(tmp_path, rows, **({"row_group_size": 500} if save is save_parquet else {}))
    read_foreign(str(path), points, tmp_path / "warm")  # imports are not what is measured
    places = read_points(points)
    monkeypatch.setattr(reading_foreign, "read_points", lambda *_, **__: places)
    tracemalloc.start()
    try:
        found = read(path, points)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < rows.nbytes / 3, (peak, rows.nbytes)
    assert_same_bits(rows_of(found), rows)


def test_arrow_does_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Arrow holds, only its own books say."""
    monkeypatch.setattr(row_files, "PIECE_BYTES", 1 << 16)
    rows, held, append = np.random.default_rng(0).random((20_000, 100)), [], row_files.RowWriter.append

    def noted(*arguments: Any) -> None:
        held.append(pa.total_allocated_bytes())
        append(*arguments)

    monkeypatch.setattr(row_files.RowWriter, "append", noted)
    path = save_parquet(tmp_path, rows, 1000)
    before = pa.total_allocated_bytes()
    read(path, points_file(tmp_path, len(rows)))
    assert 0 < max(held) - before < rows.nbytes / 2


def test_columns_of_points_may_be_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    array, places = tmp_path / "rows.npy", [(12.5, 41.9), (12.51, 41.9), (12.5, 41.93)]
    np.save(array, np.array([[0.5, 0.5], [0.25, 0.75], [0.125, 0.875]]))
    lines = "".join(f"{lat},{k},{lon}\n" for k, (lon, lat) in enumerate(places))
    plain = write(tmp_path / "plain.csv", f"lat,n,lon\n{lines}")
    named = write(tmp_path / "named.csv", f"north,lon,east\n{lines}")
    given = ["--epsilon-per-km", 9, "--method", "exhaustive", "--workers", 1, "--progress", "none"]
    expected = call(capfd, "audit", array, "--points", plain, *given)
    found = call(
        capfd, "audit", array, "--points", named, "--lon-column", "east", "--lat-column", "north", *given
    )
    assert found["epsilon_audited"] == expected["epsilon_audited"]
    assert found["worst"] == expected["worst"]
    for wrong in (["--lon-column", "east"], ["--lon-column", "east", "--lat-column", "N"]):
        run = run_inside(capfd, "audit", array, "--points", named, *wrong, *given)
        assert run.returncode == 2
        assert str(named) in run.stderr
    run = run_inside(capfd, "audit", array, "--lon-column", "east", *given)
    assert "only with --points" in run.stderr
