"""Report pages, read as a browser reads them."""

import base64
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np


class Page(HTMLParser):
    """A report, taken apart."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}  # of elements with an id, and of scripts and styles by their number
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        name = values.get("id")
        if tag in ("script", "style"):
            name = name or f"{tag}-{sum(t == tag for t, _ in self.tags)}"
        if name is not None:
            assert name not in self.texts, f"{name} twice"
            self.texts[name] = ""
        if tag not in ("meta", "link", "input", "br"):
            self._open.append((tag, name))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name is not None:
                self.texts[name] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.tags if found == tag]

    @property
    def data(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.texts["data"])
        return document

    def rows(self) -> np.ndarray:
        """Return the probabilities that the page's script works with, of shape (n_x, n_y, K)."""
        data = self.data
        values = probabilities(self._array("codes", "u1"), data["least_log"], data["step_log"])
        if "starts" not in data:
            return values.reshape(*data["shape"], -1)
        counts, outputs = np.diff(self._array("starts", "<u4")), data["outputs"]
        numbers = self._array("numbers", "<u2" if outputs < 2**16 else "<u4")
        rows = np.where(counts[:, None] > 0, self._array("far", "<f4").astype(float), np.nan)
        rows[np.repeat(np.arange(len(counts)), counts), numbers] = values
        return rows.reshape(*data["shape"], outputs)

    def _array(self, name: str, kind: str) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.data[name]), dtype=kind)


def probabilities(codes: np.ndarray, least_log: float, step_log: float) -> np.ndarray:
    """Return what the codes of a page stand for, as its script reads them; NaN where nothing is known."""
    return np.where(codes > 0, np.exp(least_log + step_log * (codes.astype(np.float64) - 1)), np.nan)
