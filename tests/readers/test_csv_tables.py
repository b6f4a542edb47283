"""Tables: what is in the file is what is read, and what cannot be read is named by file and line."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdpext_dask.errors import DataError
from mdpext_dask.readers.longitudes import check_degrees
from mdpext_dask.readers.point_files import read_points
from mdpext_dask.readers.tables import read_csv


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes lines to a CSV file and returns its path."""

    def write(*lines: str, name: str = "table.csv") -> Path:
        path = tmp_path / name
        content = ("\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


def _refusal(path: Path, action: Callable[[], object]) -> str:
    """Return what a refusal says after the name of the file."""
    with pytest.raises(DataError) as caught:
        action()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# --- points ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["points.csv", "points.csv.gz"])
def test_points_in_degrees_with_weights(table: Callable[..., Path], name: str) -> None:
    points = read_points(table("weight,lat,lon", "2,42.5,12.25", "0,-42,-180", name=name))
    np.testing.assert_array_equal(points.coordinates, [(12.25, 42.5), (-180, -42)])
    np.testing.assert_array_equal(points.weight, [2, 0])
    assert not points.planar


def test_points_in_kilometres_without_weights(table: Callable[..., Path]) -> None:
    points = read_points(table("name,x_km,y_km", "a,-1000.5,2", "b,3e2,-4"))
    np.testing.assert_array_equal(points.coordinates, [(-1000.5, 2), (300, -4)])
    np.testing.assert_array_equal(points.weight, [1, 1])
    assert points.planar


def test_weights_are_ignored_where_they_mean_nothing(table: Callable[..., Path]) -> None:
    points = read_points(table("lon,lat,weight", "1,2,heavy"), weights=False)
    np.testing.assert_array_equal(points.weight, [1])


def test_spaces_after_commas_do_not_matter(table: Callable[..., Path]) -> None:
    np.testing.assert_array_equal(read_points(table("lon, lat", "1, 2")).coordinates, [(1, 2)])


@given(
    values=st.lists(
        st.tuples(st.floats(-180, 180), st.floats(-90, 90), st.floats(1e-9, 1e9)), min_size=1, max_size=20
    )
)
@settings(max_examples=50, deadline=None)
def test_numbers_are_read_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[float, float, float]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "bits.csv"
    path.write_text("lon,lat,weight\n" + "".join(f"{a!r},{b!r},{c!r}\n" for a, b, c in values))
    points = read_points(path)
    expected = np.array(values)
    np.testing.assert_array_equal(points.coordinates, expected[:, :2])
    np.testing.assert_array_equal(points.weight, expected[:, 2])


@pytest.mark.parametrize(
    "text", ["north", "NaN", "nan", "inf", "-Infinity", "", "1e999", "12,5", "0x1F", "1_0"]
)
@pytest.mark.parametrize("column", ["lon", "lat", "weight"])
def test_cell_that_is_no_finite_number_is_named(table: Callable[..., Path], column: str, text: str) -> None:
    bad = {"lon": "1", "lat": "2", "weight": "3", column: f'"{text}"'}
    path = table("lon,lat,weight", "1,2,3", ",".join(bad.values()), "1,2,3")
    message = _refusal(path, lambda: read_points(path))
    assert message == f"line 3: {column} {text!r} is not a finite number"


def test_cell_that_is_not_there_is_named(table: Callable[..., Path]) -> None:
    path = table("lon,lat", "1,2", "3")
    assert _refusal(path, lambda: read_points(path)).startswith("line 3: lat ")


def test_negative_weight_is_named(table: Callable[..., Path]) -> None:
    path = table("lon,lat,weight", "1,2,0", "1,2,1", "1,2,-0.5")
    assert _refusal(path, lambda: read_points(path)) == "line 4: weight '-0.5' is negative"


def test_weights_that_are_all_zero_are_refused(table: Callable[..., Path]) -> None:
    path = table("lon,lat,weight", "1,2,0", "1,2,0.0")
    assert "zero" in _refusal(path, lambda: read_points(path))


@pytest.mark.parametrize("place", ["180.5,0", "-181,0", "0,90.1", "0,-91", "500000,4600000"])
def test_coordinates_that_cannot_be_degrees_are_named(table: Callable[..., Path], place: str) -> None:
    path = table("lon,lat", "0,0", place)
    lon, lat = map(float, place.split(","))
    message = _refusal(path, lambda: read_points(path))
    assert f"lon {lon:g}" in message
    assert f"lat {lat:g}" in message
    assert "line 3" in message
    assert "degrees" in message


@pytest.mark.parametrize("header", ["lon,latitude", "lat", "x_km,lat", "x,y", "lon;lat"])
def test_missing_columns_are_told_with_what_was_found(table: Callable[..., Path], header: str) -> None:
    path = table(header, ",".join("1" for _ in header.split(",")))
    message = _refusal(path, lambda: read_points(path))
    for part in ("lon,lat", "x_km,y_km", f"found {', '.join(header.split(','))}"):
        assert part in message


def test_degrees_at_the_very_ends_are_accepted() -> None:
    check_degrees(np.array([(180.0, 90.0), (-180.0, -90.0)]), "points")


# --- files -----------------------------------------------------------------------------------------


def test_missing_required_column_is_named(table: Callable[..., Path]) -> None:
    path = table("id,lon", "1,2")
    message = _refusal(path, lambda: read_csv(path, ("id", "lon", "lat")))
    assert "column lat is missing" in message
    assert "found id, lon" in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    assert _refusal(path, lambda: read_csv(path, ("lon",))) == "no such file"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.csv", b""),
        ("empty.csv.gz", gzip.compress(b"", mtime=0)),
        ("header.csv", b"lon,lat\n"),
        ("plain.csv.gz", b"lon,lat\n1,2\n"),
        ("cut.csv.gz", gzip.compress(b"lon,lat\n" + bytes(range(48, 58)) * 100, mtime=0)[:-20]),
        ("latin.csv", "lon,lat,straße\n1,2,3\n".encode("latin-1")),
        ("ragged.csv", b"lon,lat\n1,2\n1,2,3\n"),
        ("quoted.csv", b'lon,lat\n"1,2\n'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert _refusal(path, lambda: read_csv(path, ("lon",)))


def test_folder_instead_of_a_file_is_named(tmp_path: Path) -> None:
    assert _refusal(tmp_path, lambda: read_csv(tmp_path, ("lon",)))


# --- columns ---------------------------------------------------------------------------------------


@given(values=st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_whole_numbers_of_eighteen_digits_stay_exact(
    tmp_path_factory: pytest.TempPathFactory, values: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ids.csv"
    path.write_text("id\n" + "".join(f"{value}\n" for value in values))
    assert read_csv(path, ("id",)).integers("id").tolist() == values


def test_ids_that_floats_cannot_tell_apart_stay_apart(table: Callable[..., Path]) -> None:
    ids = [2**53, 2**53 + 1]
    assert float(ids[0]) == float(ids[1])
    path = table("id", *map(str, ids), name="ids.csv.gz")
    assert read_csv(path, ("id",)).integers("id").tolist() == ids


@pytest.mark.parametrize("text", ["1.0", "1e3", "one", "nan", "", "1 2", "--1", "99999999999999999999"])
def test_cell_that_is_no_whole_number_is_named(table: Callable[..., Path], text: str) -> None:
    path = table("id,more", "1,x", f"{text},x")
    message = _refusal(path, lambda: read_csv(path, ("id",)).integers("id"))
    assert message.startswith(f"line 3: id {text!r} ")


def test_first_bad_cell_is_the_one_named(table: Callable[..., Path]) -> None:
    path = table("a", "1", "x", "y")
    assert _refusal(path, lambda: read_csv(path, ("a",)).finite("a")).startswith("line 3: a 'x'")


def test_numbers_are_finite_floats(table: Callable[..., Path]) -> None:
    path = table("a", "1", "-2.5e-3", "+7")
    values = read_csv(path, ("a",)).finite("a")
    assert values.dtype == np.float64
    assert values.tolist() == [1, -0.0025, 7]
    assert all(map(math.isfinite, values))


def test_a_row_with_more_fields_than_the_header_shifts_nothing(table: Callable[..., Path]) -> None:
    path = table("lon,lat", "1,2,3", "4,5,6")
    assert "more fields" in _refusal(path, lambda: read_points(path))


def test_blank_lines_are_no_rows_but_count(table: Callable[..., Path]) -> None:
    good = read_points(table("lon,lat", "", "1,2", "", "3,4", ""))
    np.testing.assert_array_equal(good.coordinates, [[1, 2], [3, 4]])
    path = table("lon,lat", "", "1,2", "4,x")
    assert "line 4" in _refusal(path, lambda: read_points(path))


def test_a_damaged_archive_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "p.csv.gz"
    content = bytearray(gzip.compress(b"lon,lat\n" + b"1.25,2.5\n" * 500))
    content[20:40] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable CSV"):
        read_points(path)
