"""Hand-written extracts of OpenStreetMap, and the same in the other formats."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

# Node id -> (lon, lat).
Nodes = Mapping[int, tuple[float, float]]
# Way id -> (node ids, tags).
Ways = Mapping[int, tuple[Iterable[int], Mapping[str, str]]]
ROAD = {"highway": "residential"}


def osm_xml(nodes: Nodes, ways: Ways) -> str:
    """Return an extract as XML, nodes first as files have them."""
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<osm version="0.6" generator="a test">']
    node = '  <node id="{}" version="1" lat="{:.7f}" lon="{:.7f}"/>'
    lines += [node.format(key, lat, lon) for key, (lon, lat) in nodes.items()]
    for way, (refs, tags) in ways.items():
        lines.append(f'  <way id="{way}" version="1">')
        lines += [f'    <nd ref="{ref}"/>' for ref in refs]
        lines += [f"    <tag k={quoteattr(key)} v={quoteattr(value)}/>" for key, value in tags.items()]
        lines.append("  </way>")
    return "\n".join([*lines, "</osm>", ""])


def write_osm(path: Path, nodes: Nodes, ways: Ways) -> Path:
    """Write an extract as XML."""
    path.write_text(osm_xml(nodes, ways))
    return path


def convert(source: Path, target: Path, *, says_sorted: bool = False) -> Path:
    """Write an extract anew in the format of the target's name, by osmium."""
    import osmium

    header: Any = osmium.io.Header()
    if says_sorted:
        header.set("sorting", "Type_then_ID")
    with osmium.SimpleWriter(target, header=header, overwrite=True) as writer:
        for thing in osmium.FileProcessor(source):
            writer.add(thing)
    return target
