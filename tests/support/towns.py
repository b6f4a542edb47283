"""A small town as OpenStreetMap has it."""

from tests.support.osm_files import ROAD, Nodes, Ways

ONE_WAY = {**ROAD, "oneway": "yes"}


def _grid(columns: int, rows: int, lon: float = 12.0, lat: float = 42.0) -> dict[int, tuple[float, float]]:
    """Return nodes 1, 2, ... row by row, a hundredth of a degree apart."""
    return {
        1 + row * columns + column: (round(lon + 0.01 * column, 7), round(lat + 0.01 * row, 7))
        for row in range(rows)
        for column in range(columns)
    }


# A small town on a lattice of 5 x 5: streets with bends, parallel ones, one-way streets in both directions, a
# node named twice in a row, a roundabout with arms, and an island.
TOWN: Nodes = {**_grid(5, 5), 90: (12.2, 42.2), 91: (12.21, 42.2)}


STREETS: Ways = {
    100: ([1, 2, 3, 4, 5], ROAD), 101: ([5, 10, 15, 20, 25], {"highway": "primary"}),
    102: ([1, 6, 11, 16, 21], {**ROAD, "oneway": "-1"}), 103: ([21, 22, 23, 24, 25], ONE_WAY),
    104: ([11, 12, 13], ROAD), 105: ([13, 14, 19, 18, 13], {**ROAD, "junction": "roundabout"}),
    106: ([14, 15], ROAD), 107: ([18, 23], {**ROAD, "oneway": "no"}), 108: ([3, 8, 9, 4], ROAD),
    109: ([6, 7, 7, 12], ROAD), 110: ([90, 91], ROAD),
}  # fmt: skip
