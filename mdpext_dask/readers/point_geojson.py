"""Points from GeoJSON (RFC 7946), a feature at a time: a FeatureCollection, or a feature on each line."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from mdpext_dask.errors import DataError, first_line
from mdpext_dask.readers.optional_libraries import import_optional
from mdpext_dask.readers.point_chunks import BY_NAME, WEIGHT, PointChunk, PointColumns, Wanted, check_numbers
from mdpext_dask.readers.reference_systems import check_wgs84
from mdpext_dask.readers.tables import (
    BYTE_ORDER_MARKS_16,
    LONLAT,
    PIECE_ROWS,
    empty_row,
    find_column,
    not_utf8,
    opened,
    reading,
)

_KIND = "GeoJSON file"
_BYTES_AT_ONCE = 1 << 20
_CRS_MEMBER = b'"crs"'
# RFC 8142 puts it before each feature of a sequence.
_RECORD_SEPARATOR = b"\x1e"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN = 40
# Of what JSON knows; true and false are no numbers.
_NUMBERS = {float, int}
# What a bracket does to the depth, as signed bytes; and all that is no bracket.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_DEEPEST = 200


def collection_pieces(
    path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns = BY_NAME
) -> Iterator[PointChunk]:
    """Yield the points of a FeatureCollection.

    Raises
    ------
    DataError
        With file, feature (from 1) and what is wrong with it, or what else is wrong.
    """
    columns.refuse(path)
    ijson = import_optional("ijson", f"{path}: a GeoJSON file of points")
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: GeoJSON is read from files only")
    number = 0

    def counted(features: Iterator[Any]) -> Iterator[Any]:
        nonlocal number
        for feature in features:
            number += 1
            yield feature

    with reading(path, _KIND):
        names_crs = _look_through(path)
        try:
            with _opened(path) as stream:
                kind = next(ijson.items(stream, "type", use_float=True), None)
            if kind != "FeatureCollection":
                raise DataError(f"{path}: must be a FeatureCollection, found the type {_shown(kind)}")
            if names_crs:
                with _opened(path) as stream:
                    for crs in ijson.items(stream, "crs", use_float=True):
                        _check_crs(crs, path)
            with _opened(path) as stream:
                features = counted(ijson.items(stream, "features.item", use_float=True))
                yield from _pieces(features, path, weights=weights, extra=extra, columns=columns)
        except ijson.JSONError as error:
            where = f"{path}: not a readable {_KIND}: somewhere after feature {number}"
            raise DataError(f"{where}: {_complaint(error)}") from None


def line_pieces(
    path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns = BY_NAME
) -> Iterator[PointChunk]:
    """Yield the points of a file with a GeoJSON feature on each line, but for blank lines at its end.

    Raises
    ------
    DataError
        With file, feature (from 1) and what is wrong with it, or what else is wrong.
    """
    columns.refuse(path)
    with reading(path, _KIND), opened(path) as stream:
        features = _features_of_lines(stream, path)
        yield from _pieces(features, path, weights=weights, extra=extra, columns=columns)


def _features_of_lines(stream: IO[bytes], path: Path) -> Iterator[Any]:
    decode = json.JSONDecoder(parse_constant=_no_number).decode
    blank = None
    for number, line in enumerate(stream, start=1):
        text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        text = text.strip().removeprefix(_RECORD_SEPARATOR)
        if not text:
            blank = number if blank is None else blank
        elif blank is not None:
            raise empty_row(path, blank)
        else:
            try:
                yield decode(text.decode())
            except UnicodeDecodeError as error:
                raise not_utf8(path if number == 1 else f"{path}: line {number}", error) from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number}: not JSON: {first_line(error)}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _pieces(
    features: Iterator[Any], path: Path, *, weights: bool, extra: Sequence[str], columns: PointColumns
) -> Iterator[PointChunk]:
    """Yield the points of features that have been parsed; the first one says what users are called."""
    begin = list(islice(features, 1))
    properties = _properties(begin[0], f"{path}: feature 1") if begin else {}
    users = columns.users_in(properties)
    rows = _rows(chain(begin, features), path, weights=weights, extra=extra, users=users)
    extra, first = (*extra, *users), 0
    while piece := list(islice(rows, PIECE_ROWS)):
        numbers, texts = zip(*piece, strict=True)
        names = (*LONLAT, WEIGHT)[: len(numbers[0])]
        wanted = Wanted(dict(zip(names, names, strict=True)), extra)
        values = dict(zip(wanted.numbers, np.array(numbers).T, strict=True))
        check_numbers(values, path, "feature", range(first + 1, first + len(piece) + 1))
        yield wanted.chunk(values, dict(zip(extra, zip(*texts, strict=True), strict=True)), first)
        first += len(piece)


def _rows(
    features: Iterator[Any], path: Path, *, weights: bool, extra: Sequence[str], users: Sequence[str]
) -> Iterator[tuple[list[float], list[str]]]:
    """Yield lon, lat and weight, if there are weights, of each feature, and further properties as text.

    Those of `users` may be missing.
    """
    weighted = None
    for number, feature in enumerate(features, start=1):
        where = f"{path}: feature {number}"
        properties = _properties(feature, where)
        row = _lonlat(feature.get("geometry"), where)
        called = find_column(list(properties), WEIGHT, where) if weights else None
        has_weight = called is not None
        weighted = has_weight if weighted is None else weighted
        if has_weight != weighted:
            has, had = ("no weight", "one") if weighted else ("a weight", "none")
            raise DataError(f"{where}: has {has}, but the features before it have {had}")
        if called is not None:
            weight = properties[called]
            if type(weight) not in _NUMBERS:
                raise DataError(f"{where}: {called} {_shown(weight)} is not a finite number")
            row.append(_float(weight))
        properties = {**dict.fromkeys(users), **properties} if users else properties
        yield row, [_property(properties, name, where) for name in (*extra, *users)]


def _properties(feature: Any, where: str) -> dict[str, Any]:
    if not isinstance(feature, dict) or feature.get("type") != "Feature":
        raise DataError(f"{where}: is not a Feature: {_shown(feature)}")
    properties = feature.get("properties")
    if properties is None:
        return {}
    if not isinstance(properties, dict):
        raise DataError(f"{where}: its properties are not an object: {_shown(properties)}")
    return properties


def _lonlat(geometry: Any, where: str) -> list[float]:
    """Return lon and lat of a Point; what comes after them, such as an altitude, does not count."""
    match geometry:
        case None:
            raise DataError(f"{where}: its geometry is missing")
        case {"type": "Point", "coordinates": [lon, lat, *_]} if {type(lon), type(lat)} <= _NUMBERS:
            return [_float(lon), _float(lat)]
        case {"type": "Point"}:
            found = _shown(geometry.get("coordinates"))
            raise DataError(f"{where}: the coordinates must be [lon, lat], found {found}")
        case {"type": found} | found:
            raise DataError(f"{where}: its geometry must be a Point, found {_shown(found)}")


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of very many digits is out of every range
        return math.inf


def _property(properties: dict[str, Any], name: str, where: str) -> str:
    """Return a property as text."""
    if name not in properties:
        raise DataError(f"{where}: has no property {name}; found {', '.join(properties) or 'none'}")
    value = properties[name]
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _check_crs(crs: Any, path: Path) -> None:
    """Refuse the crs that files of before RFC 7946 may name, unless it is degrees on WGS 84."""
    match crs:
        case None:
            check_wgs84(None, path)
        case {"properties": {"name": str(name)}}:
            check_wgs84(name, path)
        case _:
            raise DataError(f"{path}: its coordinate reference system is not known: {_shown(crs)}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file behind its byte order mark, which is no part of JSON."""
    with opened(path) as stream:
        start = stream.read(len(_BYTE_ORDER_MARK))
        if start.startswith(BYTE_ORDER_MARKS_16):
            raise UnicodeDecodeError("utf-8", start, 0, 1, "invalid start byte")
        if start != _BYTE_ORDER_MARK:
            stream.seek(0)
        yield stream


def _look_through(path: Path) -> bool:
    """Return whether a file mentions a crs anywhere, which is faster to find out than where.

    Raises
    ------
    DataError
        If objects lie in objects without end: a parser that keeps the way to each would fill the memory.
    """
    before, depth, found = b"", 0, False
    with opened(path) as stream:
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


def _complaint(error: Exception) -> str:
    """Return what the parser says in one line: what is wrong, and the text that is."""
    said = error.args[0] if error.args else ""
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else str(said)).splitlines()
    if "UTF8" in "".join(lines[:1]):
        return "is not UTF-8; save the file as UTF-8"
    shown = " ".join(" ".join(lines[1:2]).split())
    return f"{lines[0]}: {shown}" if shown else (lines[0] if lines else type(error).__name__)
