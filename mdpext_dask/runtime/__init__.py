"""Sampling an exported city where nothing is installed but numpy.

    from mdpext_dask.runtime import open_city

    city = open_city("city.mdp")
    [[lon, lat]] = city.sample(12.4922, 41.8902)

Importing it loads numpy, the standard library and, if it is there, ``cryptography``, which makes many draws
faster: not Dask, Zarr, pandas, SciPy, PROJ or a solver. ``pip install numpy`` and ``pip install --no-deps
mdpext-dask`` are enough. Whoever would rather copy files than install a package needs these modules, with the
``__init__.py`` of their folders: ``budget``, ``coarse``, ``entropy``, ``errors``, ``extend.lattice``,
``extend.log_convex``, ``extend.normalise``, ``extend.operator``, ``grid``, ``limits``, ``longitudes``,
``projection``, ``record_lookup``, ``reporter``, ``runtime.city``, ``runtime.city_file``, ``runtime.fit``,
``runtime.geodesic``, ``runtime.layout``, ``sampler``, ``sticky``, ``tables``; and ``releases`` for a ledger.
"""

from mdpext_dask.runtime.city import City, open_city

__all__ = ["City", "open_city"]
