"""The report page of a store in a browser; it is made first, unless the one that is there is up to date."""

import os
import re
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import Any

from mdpext_dask.events import Observer, silent
from mdpext_dask.reports.report import page_name, report, stamp_of
from mdpext_dask.store.mechanism_store import COMPLETE, MechanismStore
from mdpext_dask.store.objects import WhereStored, address_of, is_remote, local_path

# Where in a page its stamp is, and how much of a page is read for it.
_STAMP, _HEAD = re.compile(rb'<meta name="mdpext-stamp" content="([0-9a-f]*)">'), 4096


def show(
    url: WhereStored,
    path: str | Path | None = None,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    scheduler: str | None = None,
    observer: Observer = silent,
) -> dict[str, Any]:
    """Open the report page of a store in a browser; write it first, unless it is there and up to date.

    It is up to date if it said that the store holds, and neither a file of the store nor the version of this
    software has changed since. Pages of remote stores are always made.

    Parameters
    ----------
    url
        The store, or an open mechanism.
    path
        The page; default: beside the store, or in a new temporary folder where none can be written there.
    overwrite
        Whether to make the page in any case, and to replace a file that is no report page.
    workers, scheduler, observer
        As of :func:`mdpext_dask.reports.report.report`.

    Returns
    -------
    `store`, `file`, `holds` and `verdict` of the page; `reused`, whether it was up to date; `opened`, whether
    a browser was found; `said`, that in words; and `seconds`.

    Raises
    ------
    SpecError, IncompleteStoreError, StoreError
        As of :func:`~mdpext_dask.reports.report.report`.
    """
    started, url = time.perf_counter(), address_of(url)
    store = MechanismStore.open(url)
    target = _place_for(url) if path is None else Path(path)
    found, stamp = _stamp_in(target), stamp_of(store)
    reused = bool(stamp) and found == stamp and store.state == COMPLETE and not overwrite
    if reused:
        made = {"holds": True, "verdict": "holds, as its page says, and has not changed since"}
    else:
        made = report(
            url,
            target,
            overwrite=overwrite or found is not None,
            workers=workers,
            scheduler=scheduler,
            observer=observer,
        )
    opened = _opened(target.resolve().as_uri())
    return {
        "store": store.url,
        "file": str(target),
        "reused": reused,
        "opened": opened,
        "said": "opened in your browser" if opened else "no display here; open the file in any browser",
        "holds": made["holds"],
        "verdict": made["verdict"],
        "seconds": time.perf_counter() - started,
    }


def _place_for(url: str) -> Path:
    """Return where a page goes that is not told."""
    beside = None if is_remote(url) else local_path(url).resolve().parent
    if beside is None or not os.access(beside, os.W_OK):
        beside = Path(
            tempfile.mkdtemp(prefix="mdpext-")
        )  # for this user alone: the prior may be confidential
    return beside / page_name(url)


def _stamp_in(page: Path) -> str | None:
    """Return the stamp of a report page; None if there is no such page."""
    try:
        with page.open("rb") as file:
            found = _STAMP.search(file.read(_HEAD))
    except OSError:
        return None
    return None if found is None else found[1].decode()


def _opened(address: str) -> bool:
    """Open an address in a browser, and return whether that went well; in a terminal only if named."""
    has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if not has_display and sys.platform.startswith(("linux", "freebsd")):
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
