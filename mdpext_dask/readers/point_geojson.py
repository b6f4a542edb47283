"""Points from GeoJSON (RFC 7946), a feature at a time: a FeatureCollection, or a feature on each line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.csv_tables import LONLAT
from mdpext_dask.readers.point_chunks import WEIGHT, PointChunk, Wanted, as_text, first_fault, refuse
from mdpext_dask.readers.point_tables import (
    BYTE_ORDER_MARKS_16,
    PIECE_ROWS,
    check_degrees_crs,
    opened,
    reading,
)

_KIND = "GeoJSON file"
_NEEDS = "GeoJSON files of points need ijson: install it with pip install 'mdpext-dask[files]'"
_BYTES_AT_ONCE = 1 << 20
_CRS_MEMBER = b'"crs"'
# RFC 8142 puts it before each feature of a sequence.
_RECORD_SEPARATOR = b"\x1e"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN = 40
# Of what JSON knows; true and false are no numbers.
_NUMBERS = (float, int)
_HUGE = 10**300
# What a bracket does to the depth, as signed bytes; and all that is no bracket.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_DEEPEST = 200


def collection_pieces(path: Path, *, weights: bool, extra: Sequence[str]) -> Iterator[PointChunk]:
    """Yield the points of a FeatureCollection.

    Raises
    ------
    DataError
        With file, feature (from 1) and what is wrong with it, or what else is wrong.
    """
    try:
        import ijson
    except ImportError:
        raise DataError(f"{path}: {_NEEDS}") from None

    if path.exists() and not path.is_file():
        raise DataError(f"{path}: GeoJSON is read from files only")
    with reading(path, _KIND):
        names_crs = _look_through(path)
        try:
            with opened(path) as stream:
                kind = next(ijson.items(_Text(stream), "type", use_float=True), None)
            if kind != "FeatureCollection":
                raise DataError(f"{path}: must be a FeatureCollection, found the type {_shown(kind)}")
            if names_crs:
                with opened(path) as stream:
                    for crs in ijson.items(_Text(stream), "crs", use_float=True):
                        _check_crs(crs, path)
            with opened(path) as stream:
                features = ijson.items(_Text(stream), "features.item", use_float=True)
                counted = _counted(features, path, ijson.JSONError)
                yield from _pieces(counted, path, weights=weights, extra=extra)
        except ijson.JSONError as error:
            raise DataError(f"{path}: not a readable {_KIND}: {_complaint(error)}") from None


def line_pieces(path: Path, *, weights: bool, extra: Sequence[str]) -> Iterator[PointChunk]:
    """Yield the points of a file with a GeoJSON feature on each line; blank lines are none.

    Raises
    ------
    DataError
        With file, feature (from 1) and what is wrong with it, or what else is wrong.
    """
    with reading(path, _KIND), opened(path) as stream:
        yield from _pieces(_features_of_lines(stream, path), path, weights=weights, extra=extra)


def _features_of_lines(stream: Any, path: Path) -> Iterator[Any]:
    decode = json.JSONDecoder(parse_constant=_no_number).decode
    for number, line in enumerate(stream, start=1):
        text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        text = text.strip().removeprefix(_RECORD_SEPARATOR)
        if text:
            try:
                yield decode(text.decode())
            except UnicodeDecodeError:
                raise
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number}: not JSON: {first_line(error)}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _pieces(
    features: Iterator[Any], path: Path, *, weights: bool, extra: Sequence[str]
) -> Iterator[PointChunk]:
    """Yield the points of features that have been parsed."""
    wanted = Wanted(LONLAT, False, tuple(extra))
    rows: list[tuple[float, ...]] = []
    texts: list[list[str]] = []
    first = 0

    def piece() -> PointChunk:
        values = dict(zip(wanted.numbers, _columns(rows), strict=True))
        if fault := first_fault(values):
            shown = f"{values[fault.column][fault.row]:g}" if fault.column else ""
            raise refuse(path, f"feature {first + fault.row + 1}", fault, shown)
        cells = [as_text(column) for column in zip(*texts, strict=True)]
        return wanted.chunk(values, dict(zip(wanted.extra, cells, strict=True)), first)

    for number, feature in enumerate(features, start=1):
        try:
            properties = _properties(feature)
            if number == 1 and weights and WEIGHT in properties:
                wanted = Wanted(LONLAT, True, wanted.extra)
            rows.append(_numbers(feature, properties, wanted, weights=weights))
            if extra:
                texts.append([_property(properties, name) for name in extra])
        except _BadFeatureError as error:
            raise DataError(f"{path}: feature {number}: {error}") from None
        if len(rows) == PIECE_ROWS:
            yield piece()
            first += len(rows)
            rows, texts = [], []
    if rows:
        yield piece()


class _BadFeatureError(Exception):
    """What is wrong with a feature, before it is said which."""


def _properties(feature: Any) -> dict[str, Any]:
    if not isinstance(feature, dict) or feature.get("type") != "Feature":
        raise _BadFeatureError(f"is not a Feature: {_shown(feature)}")
    properties = feature.get("properties")
    if properties is None:
        return {}
    if not isinstance(properties, dict):
        raise _BadFeatureError(f"its properties are not an object: {_shown(properties)}")
    return properties


def _numbers(
    feature: dict[str, Any], properties: dict[str, Any], wanted: Wanted, *, weights: bool
) -> tuple[float, ...]:
    """Return lon and lat of a feature that is a Point, and its weight where there are weights."""
    geometry = feature.get("geometry")
    if geometry is None:
        raise _BadFeatureError("its geometry is missing")
    if not isinstance(geometry, dict) or geometry.get("type") != "Point":
        kind = geometry.get("type") if isinstance(geometry, dict) else geometry
        raise _BadFeatureError(f"its geometry must be a Point, found {_shown(kind)}")
    position = geometry.get("coordinates")
    # What comes after lon and lat, such as an altitude, does not count.
    if not isinstance(position, list) or len(position) < 2:
        raise _BadFeatureError(f"the coordinates must be [lon, lat], found {_shown(position)}")
    lon, lat = position[:2]
    if type(lon) not in _NUMBERS or type(lat) not in _NUMBERS:
        raise _BadFeatureError(f"the coordinates must be [lon, lat], found {_shown(position)}")
    if weights and (WEIGHT in properties) != wanted.weighted:
        has, had = ("no weight", "one") if wanted.weighted else ("a weight", "none")
        raise _BadFeatureError(f"has {has}, but the features before it have {had}")
    if not wanted.weighted:
        return lon, lat
    weight = properties[WEIGHT]
    if type(weight) not in _NUMBERS:
        raise _BadFeatureError(f"weight {_shown(weight)} is not a finite number")
    return lon, lat, weight


def _property(properties: dict[str, Any], name: str) -> str:
    """Return a property as text."""
    if name not in properties:
        raise _BadFeatureError(f"has no property {name}; found {', '.join(properties) or 'none'}")
    value = properties[name]
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _columns(rows: list[tuple[float, ...]]) -> NDArray[np.float64]:
    """Return rows of numbers as columns."""
    try:
        return np.array(rows, dtype=np.float64).T
    except OverflowError:  # a whole number of very many digits is out of every range
        return np.array([[value if abs(value) < _HUGE else np.inf for value in row] for row in rows]).T


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _check_crs(crs: Any, path: Path) -> None:
    """Refuse the crs that files of before RFC 7946 may name, unless it is degrees on WGS 84."""
    properties = crs.get("properties") if isinstance(crs, dict) else None
    name = properties.get("name") if isinstance(properties, dict) else None
    if crs is None or isinstance(name, str):
        check_degrees_crs(name, path)
    else:
        raise DataError(f"{path}: has a crs that is not known: {_shown(crs)}")


def _look_through(path: Path) -> bool:
    """Return whether a file mentions a crs anywhere, which is faster to find out than where.

    Raises
    ------
    DataError
        If objects lie in objects without end: a parser that keeps the way to each would fill the memory.
    """
    with opened(path) as stream:
        before, depth, found = b"", 0, False
        while part := stream.read(_BYTES_AT_ONCE):
            found |= _CRS_MEMBER in before + part
            before = part[-len(_CRS_MEMBER) :]
            # Brackets in texts count as well, but nobody writes so many.
            steps = np.frombuffer(part.translate(_STEPS, _NO_BRACKETS), dtype=np.int8)
            depths = depth + np.cumsum(steps, dtype=np.int64)
            if depths.size:
                depth = int(depths[-1])
                if depths.max() > _DEEPEST:
                    raise DataError(f"{path}: not a {_KIND}: objects in objects without end")
    return found


def _counted(features: Iterator[Any], path: Path, broken: type[Exception]) -> Iterator[Any]:
    """Yield features; where the parser stops, say after which."""
    number = 0
    try:
        for feature in features:
            number += 1
            yield feature
    except broken as error:
        raise DataError(
            f"{path}: not a readable {_KIND}: somewhere after feature {number}: {_complaint(error)}"
        ) from None


def _complaint(error: Exception) -> str:
    """Return what the parser says in one line: what is wrong, and the text that is."""
    said = error.args[0] if error.args else ""
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else str(said)).splitlines()
    shown = " ".join(" ".join(lines[1:2]).split())
    return f"{lines[0]}: {shown}" if shown else (lines[0] if lines else type(error).__name__)


class _Text:
    """A file of bytes without a byte order mark, which JSON does not have."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._started = False

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes."""
        if self._started or size == 0:
            return bytes(self._stream.read(size))
        self._started = True
        start = self._stream.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK)
        if start.startswith(BYTE_ORDER_MARKS_16):
            raise UnicodeDecodeError("utf-8", start, 0, 1, "invalid start byte")
        return bytes(start or self._stream.read(size))
