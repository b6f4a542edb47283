"""A link in a store leads no write, and no deletion, out of it."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from mdpext_dask.errors import StoreError
from mdpext_dask.store import objects
from tests.support.refusals import refusal


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Return a store with links in it, and the folder they lead to."""
    root, out = tmp_path / "s.zarr", tmp_path / "elsewhere"
    for folder in (root, out, out / "deep"):
        folder.mkdir()
    (out / "old.json").write_text("mine")
    (root / "audit").symlink_to(out)
    (root / "seed").symlink_to("../elsewhere/deep")
    (root / "notes.json").symlink_to(out / "old.json")
    return root, out


def contents(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("key", ["audit/certificate.json", "audit/old.json", "seed/c/0/0", "audit/deep/x"])
def test_nothing_is_written_or_deleted_elsewhere(key: str, places: tuple[Path, Path]) -> None:
    root, out = places
    store, before = objects.open_objects(str(root)), contents(out)
    for change in (
        lambda: objects.put_bytes(store, key, b"{}"),
        lambda: objects.put_json(store, key, {}),
        lambda: objects.create_exclusively(store, key, b"{}"),
        lambda: objects.delete_keys(store, [key]),
    ):
        assert "out of the store" in refusal(change, kind=StoreError)
    with pytest.raises(OSError):
        zarr.create_array(store, name=f"{key.partition('/')[0]}/a", data=np.zeros(2))
    assert contents(out) == before


def test_a_link_in_the_place_of_an_object_is_replaced(places: tuple[Path, Path]) -> None:
    root, out = places
    store = objects.open_objects(str(root))
    objects.put_bytes(store, "notes.json", b"new")
    assert (out / "old.json").read_text() == "mine"
    assert (root / "notes.json").read_text() == "new"
    objects.delete_keys(store, ["notes.json"])
    assert (out / "old.json").exists()


def test_the_store_itself_may_be_behind_a_link(places: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = places
    (tmp_path / "link.zarr").symlink_to(out)
    store = objects.open_objects(str(tmp_path / "link.zarr"))
    objects.put_bytes(store, "a/b", b"new")
    assert (out / "a" / "b").read_text() == "new"
    # Through a link that stays inside.
    (out / "c").symlink_to("a")
    objects.put_bytes(store, "c/d", b"too")
    assert (out / "a" / "d").read_text() == "too"
