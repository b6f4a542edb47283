"""``python -m mdpext_dask``."""

from mdpext_dask.cli.main import main

if __name__ == "__main__":
    main()
