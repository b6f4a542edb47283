"""Attributes of a store as xarray and netCDF can hold them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from mdpext_dask.store.schema import as_read, as_stored

# Strings of the attributes never look like JSON; texts within lists and objects may.
_PLAIN = st.sampled_from(["complete", "inf", "Location obfuscation mechanism [x]", "CF-1.11", ""])
_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_LISTS_AND_OBJECTS = st.lists(_JSON, max_size=3) | st.dictionaries(st.text(), _JSON, max_size=3)


@given(st.dictionaries(st.text(), _PLAIN | _NUMBERS | st.none() | st.booleans() | _LISTS_AND_OBJECTS))
def test_attributes_are_strings_and_numbers_and_come_back(attributes: dict[str, object]) -> None:
    stored = as_stored(attributes)
    assert all(type(value) in (str, int, float) for value in stored.values())
    assert as_stored(stored) == stored
    # Also those that version 1 has stored as they were.
    for kept in (stored, attributes):
        found = as_read(json.loads(json.dumps(kept)))
        assert [(k, type(v), v) for k, v in found.items()] == [(k, type(v), v) for k, v in attributes.items()]


def test_what_only_looks_like_json_stays_a_text() -> None:
    damaged = {"job": "{", "grid": "[" * 100_000, "notes": "[1] is no list", "title": "nullify"}
    assert as_read(damaged) == damaged
