"""Road networks from folders, OpenStreetMap, GraphML, GeoPackages and downloads.

:func:`~mdpext_dask.readers.roads.read_network.read_roads` picks the reader. A new format is a function from a
path to a :class:`~mdpext_dask.readers.roads.network.RoadNetwork`, named there.
"""
