"""A Zarr hierarchy in a local folder or behind a URL: its arrays, and attributes that change in one piece."""

from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import Store

from mdpext_dask.errors import StoreError, first_line
from mdpext_dask.store import objects

# The object that holds the attributes of the root.
ROOT_KEY = "zarr.json"
# What damaged content makes our code raise. TypeError and AttributeError would be faults of that code.
DAMAGED_CONTENT = (ValueError, LookupError, RuntimeError, OSError)
# What Zarr, its codecs and storage raise where documents or bytes are damaged: around their calls alone.
DAMAGE = (*DAMAGED_CONTENT, TypeError, AttributeError)


class Hierarchy:
    """An open hierarchy.

    Parameters
    ----------
    url
        Where it is.
    objects_store
        Its objects, through Zarr's store interface.
    root
        Its root group.
    """

    def __init__(self, url: str, objects_store: Store, root: zarr.Group) -> None:
        self.url = objects.absolute(url)
        self.objects = objects_store
        self._root = root

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the root, as they were when the store was opened or last updated here."""
        return dict(self._root.attrs)

    def update(self, **attributes: Any) -> None:
        """Write attributes of the root in one atomic step.

        The metadata document is edited as it is: Zarr would drop the consolidated metadata in it.

        Raises
        ------
        StoreError
            If it is not there any more, is damaged, or cannot be written.
        """
        document = objects.get_json(self.objects, ROOT_KEY)
        if not isinstance(document, dict) or not isinstance(document.get("attributes"), dict):
            raise StoreError(
                f"{self.url}: {ROOT_KEY} is gone or damaged; has somebody deleted or replaced this store?"
            )
        document["attributes"].update(attributes)
        objects.put_json(self.objects, ROOT_KEY, document)
        try:
            self._root = zarr.open_group(self.objects, mode="r+", zarr_format=3, use_consolidated=False)
        except DAMAGE as error:
            raise StoreError(f"{self.url}: {ROOT_KEY} is damaged: {first_line(error)}") from None

    def array(self, name: str) -> "zarr.Array[Any]":
        """Return an array of the hierarchy, nothing read of it yet.

        Raises
        ------
        StoreError
            If it is not there, or its description is damaged.
        """
        array = self._node(name)
        if not isinstance(array, zarr.Array):
            raise StoreError(
                f"{self.url}: the array {name} is missing; is another run at work on this store?"
            )
        return array

    def read(self, name: str, *index: slice) -> NDArray[Any]:
        """Return (a part of) an array of the hierarchy.

        Raises
        ------
        StoreError
            If the array is not there or its bytes are damaged.
        """
        array = self.array(name)
        try:
            return np.asarray(array[index] if index else array[...])
        except DAMAGE as error:
            raise StoreError(f"{self.url}: {name} cannot be read: {first_line(error)}") from None

    def _node(self, name: str) -> "zarr.Array[Any] | zarr.Group | None":
        """Return an array or a group, or None if there is none of that name.

        Raises
        ------
        StoreError
            If its description is damaged.
        """
        try:
            return self._root.get(name)
        except DAMAGE as error:
            raise StoreError(f"{self.url}: {name}/{ROOT_KEY} is damaged: {first_line(error)}") from None
