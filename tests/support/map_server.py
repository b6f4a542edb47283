"""A server on this machine that answers as Nominatim and Overpass do, so that osmnx's own code runs."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlparse

from tests.support.osm_files import Nodes, Ways

_STATUS = "Connected as: 1\nCurrent time: 2026-01-01T00:00:00Z\nRate limit: 0\n\n2 slots available now.\n"


class MapServer:
    """What it answers, and what it was asked.

    Parameters
    ----------
    outline
        GeoJSON geometry of every place.
    nodes, ways
        What every query for roads gets.
    """

    def __init__(self, outline: dict[str, Any], nodes: Nodes, ways: Ways) -> None:
        self.outline, self.nodes, self.ways = outline, nodes, ways
        self.asked: list[str] = []
        self.status = 200
        self.remark: dict[str, str] = {}

    def places(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Return what a geocoder answers."""
        [name] = query["q"]
        if name.startswith("Nowhere"):
            return []
        numbers = re.findall(r"-?\d+\.?\d*", json.dumps(self.outline["coordinates"]))
        lon, lat = [*map(float, numbers[::2])], [*map(float, numbers[1::2])]
        return [
            {
                "place_id": 1, "licence": "ODbL", "osm_type": "relation", "osm_id": 41485,
                "boundingbox": [str(v) for v in (min(lat), max(lat), min(lon), max(lon))],
                "lat": str(lat[0]), "lon": str(lon[0]), "display_name": f"{name}, Earth",
                "class": "boundary", "type": "administrative", "importance": 0.8, "geojson": self.outline,
            }
        ]  # fmt: skip

    def roads(self) -> dict[str, Any]:
        """Return what Overpass answers."""
        nodes = [{"type": "node", "id": n, "lon": lon, "lat": lat} for n, (lon, lat) in self.nodes.items()]
        ways = [{"type": "way", "id": w, "nodes": [*n], "tags": tags} for w, (n, tags) in self.ways.items()]
        return {"version": 0.6, "elements": [*ways, *nodes], **self.remark}


@contextmanager
def serving(server: MapServer) -> Iterator[str]:
    """Serve on a port of loopback; return the address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def _answer(self, content: Any) -> None:
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(server.status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            url = urlparse(self.path)
            server.asked.append(url.path)
            self._answer(_STATUS if url.path.endswith("/status") else server.places(parse_qs(url.query)))

        def do_POST(self) -> None:
            server.asked.append(self.path)
            query = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["data"][0]
            assert '["highway"]' in query
            self._answer(server.roads())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
