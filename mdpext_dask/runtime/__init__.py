"""What draws on a device: exact sampling, sticky answers, ledgers, cities and signatures, with NumPy alone.

    from mdpext_dask.runtime import open_city

    city = open_city("city.mdp")
    [[lon, lat]] = city.sample(12.4922, 41.8902)

Importing it loads NumPy, the standard library and, if it is there, ``cryptography``, which makes many draws
faster and checks signatures: not Dask, Zarr, pandas, SciPy, PROJ or a solver. ``pip install numpy`` and
``pip install --no-deps mdpext-dask`` are enough. From other rooms it imports the grid and the projection of
``problem``, log-convex extension from ``extend``, and the top level. A new kind of draw goes into
:mod:`~mdpext_dask.runtime.location_sampler`.
"""

from mdpext_dask.runtime.city import City, open_city

__all__ = ["City", "open_city"]
