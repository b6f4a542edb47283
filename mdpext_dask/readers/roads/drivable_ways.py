"""Which ways of OpenStreetMap cars may use, and in which direction.

Ways are those of osmnx's network type "drive", so that an extract and a download give the same roads: public
ways with a ``highway`` tag, but no service roads, no tracks and paths, no areas, nothing that is private or
closed to motor vehicles, and nothing that is planned or gone. Patterns match anywhere in a value, as those of
Overpass do, which osmnx asks (https://wiki.openstreetmap.org/wiki/Overpass_API/Overpass_QL).

Directions follow https://wiki.openstreetmap.org/wiki/Key:oneway. What osmnx leaves out, is kept to as well:
motorways and circular junctions are one way unless they say otherwise. Reversible lanes can be driven either
way, though not at the same time.
"""

import re
from typing import Protocol

# Key -> what its value must not hold.
EXCLUDED = {
    "highway": (
        "abandoned|bridleway|bus_guideway|construction|corridor|cycleway|elevator|escalator|footway|no|path|"
        "pedestrian|planned|platform|proposed|raceway|razed|rest_area|service|services|steps|track"
    ),
    "area": "yes",
    "access": "private",
    "motor_vehicle": "no",
    "motorcar": "no",
    "service": "alley|driveway|emergency_access|parking|parking_aisle|private",
}
_EXCLUDED = tuple((key, re.compile(pattern)) for key, pattern in EXCLUDED.items())
_FORWARD = frozenset({"yes", "true", "1", "F"})
_BACKWARD = frozenset({"-1", "reverse", "T"})
_BOTH = frozenset({"no", "false", "0", "reversible", "alternating"})
_CIRCULAR = frozenset({"roundabout", "circular"})


class Tags(Protocol):
    """Tags of a way, be it of osmium or a dictionary."""

    def get(self, key: str, /) -> str | None:
        """Return a tag's value, None without it."""


def is_drivable(tags: Tags) -> bool:
    """Whether a way is a public road that cars may use."""
    if tags.get("highway") is None:
        return False
    values = ((tags.get(key), pattern) for key, pattern in _EXCLUDED)
    return not any(value is not None and pattern.search(value) for value, pattern in values)


def is_ferry(tags: Tags) -> bool:
    """Whether a way is the line of a ferry."""
    return tags.get("route") == "ferry"


def direction(tags: Tags) -> int:
    """Return 1 for a way that can only be travelled in the order of its nodes, -1 against it, 0 both ways."""
    oneway = tags.get("oneway")
    if oneway in _FORWARD:
        return 1
    if oneway in _BACKWARD:
        return -1
    implied = tags.get("junction") in _CIRCULAR or tags.get("highway") == "motorway"
    return 1 if implied and oneway not in _BOTH else 0
