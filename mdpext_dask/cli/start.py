"""``mdpext start``: a job file for somebody's own city, with what it will come to."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.filesize import decimal

from mdpext_dask.cli.eta import readable_seconds
from mdpext_dask.cli.screens import GOOD, Screen, called, near
from mdpext_dask.errors import SpecError, printable
from mdpext_dask.evaluation.words import metres
from mdpext_dask.events import Observer
from mdpext_dask.files import check_new, whole_file
from mdpext_dask.job.spec import BUILTIN_PREFIX, JobSpec
from mdpext_dask.pipeline.plan import prospect
from mdpext_dask.problem.geometry import RoadGeometry, build_geometry
from mdpext_dask.reports.page.words import factor_in_words

# Distances at which ε is told, in km.
_TOLD_KM = (0.05, 0.2, 1.0)
# Others, in 1/km, are hardly meant: the noise would go further than 100 km, or not even a metre.
_LEAST_EPSILON, _MOST_EPSILON = 0.01, 1000.0
# Longest name that is made of a place's.
_NAME_LENGTH = 40
# Hexadecimal digits that tell boxes of one place, and names that are alike in plain letters, apart.
_DIGITS = 6
_FILE = """\
# {title}
# `mdpext plan` predicts time and memory, `mdpext run` builds the store; docs/job-file.md has all keys.

[job]
name = {name}

[domain]
# The road network: its nodes may be reported, and the error is in distance along its roads.
{domain}
# Records, the places that are told apart, are {spacing} from each other; a true place is moved to the
# nearest one, by at most {moved}.
cell_km = {cell_km}
refine = {refine}

[privacy]
# After one report, the odds between two places, each moved by {moved} at most, change by a factor of at most
# {meaning}.
epsilon_per_km = {epsilon}

[outputs]
# {outputs} road nodes may be reported, as many as are of use at this epsilon.
choose = "auto"

[prior]
# How likely a record is. A better one lowers the error; it never changes the promise: kind = "file".
kind = "road-nodes"

[loss]
# A report costs the mean error in road distance to so many places; kind = "euclidean": as the crow flies.
kind = "travel"
tasks = {tasks}

[extension]
# Planar noise, remapped, or programs where they lose less and are planned to take so long at most, in s.
method = "auto"
seconds = {seconds}
"""


def write_job(
    where: str | None,
    epsilon_per_km: float | None,
    hide_metres: float | None,
    box: str | None,
    seconds: float,
    output: Path | None,
    *,
    overwrite: bool,
    observer: Observer,
) -> dict[str, Any]:
    """Write a job file, and return what the job will come to.

    Parameters
    ----------
    where
        A place, a file or folder of roads, or a built-in network; asked for if None.
    epsilon_per_km, hide_metres
        ε in 1/km, or 1/ε in m; asked for if both are None.
    box
        West, south, east, north in degrees, between commas.
    seconds
        How long programs may be planned to take, in s.
    output
        The job file, which names job and store; default: of the place's name, and of the box if there is one,
        in the working folder.
    overwrite
        Whether a file that is there is replaced.
    observer
        Called with notes.

    Returns
    -------
    See :func:`mdpext_dask.pipeline.plan.prospect`; and `job`, `store`, `where`, `epsilon_per_km`; and
    `log_odds`, by how much the logarithm of odds may change between places so many km apart.

    Raises
    ------
    SpecError, DataError
        If something is missing or wrong, or this machine cannot run the job; nothing is written then.
    """
    where = (where or _asked("A place, such as 'Rome, Italy', or a file of roads", "WHERE")).strip()
    if epsilon_per_km is None and hide_metres is None:
        hide_metres = _number(_asked("Hide within how many metres", "--epsilon or --hide"))
    epsilon = _epsilon(epsilon_per_km, hide_metres)
    domain = _domain_of(where, box)
    name = _name_of(where, domain.get("bbox")) if output is None else _name_after(output.stem)
    output = output or Path(f"{name}.toml")
    check_new(output, overwrite=overwrite)
    spec = JobSpec.of(domain=domain, privacy={"epsilon_per_km": epsilon}, extension={"seconds": seconds})
    geometry = build_geometry(spec)
    assert isinstance(geometry, RoadGeometry)  # it has roads
    tasks = min(spec.loss.tasks, len(geometry.nodes_inside))
    facts = prospect(spec.replace(loss={"tasks": tasks}), geometry, observer)
    if facts["refused"] is not None:
        raise SpecError(facts["refused"])
    # Both places may have been moved towards their records.
    log_odds = {f"{km:g}": epsilon * (km + 2 * facts["max_quantisation_km"]) for km in _TOLD_KM}
    facts |= {
        "loss_tasks": tasks,
        "job": str(output),
        "where": where,
        "epsilon_per_km": epsilon,
        "store": f"{name}.zarr",
        "log_odds": log_odds,
    }
    roads = domain.get("roads", BUILTIN_PREFIX)
    if not (roads.startswith(BUILTIN_PREFIX) or Path(roads).is_absolute()):
        # Where the job file looks for it, whatever links lead there.
        domain["roads"] = os.path.relpath(Path(roads).resolve(), output.parent.resolve())
    with whole_file(output) as file:
        file.write(_text_of(name, domain, facts, seconds).encode())
    return facts


def _asked(question: str, missing: str) -> str:
    """Return what is answered on a terminal.

    Raises
    ------
    SpecError
        If there is none.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SpecError(f"give {missing}; questions are asked on a terminal only")
    return str(typer.prompt(question, err=True))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"--hide: must be a number of metres, got {printable(text)}") from None


def _epsilon(epsilon: float | None, hide_metres: float | None) -> float:
    if epsilon is not None and hide_metres is not None:
        raise SpecError("give either --epsilon or --hide, not both")
    if hide_metres is not None:
        if not 1000 / _MOST_EPSILON <= hide_metres <= 1000 / _LEAST_EPSILON:
            least, most = 1000 / _MOST_EPSILON, 1000 / _LEAST_EPSILON
            raise SpecError(f"--hide: must be from {least:g} to {most:,.0f} metres, got {hide_metres:g}")
        return float(f"{1000 / hide_metres:.4g}")
    assert epsilon is not None
    if not _LEAST_EPSILON <= epsilon <= _MOST_EPSILON:
        meant = f"; {epsilon:g} per metre is {1000 * epsilon:g}" if 0 < epsilon < _LEAST_EPSILON else ""
        raise SpecError(
            f"--epsilon: must be from {_LEAST_EPSILON:g} to {_MOST_EPSILON:g} per km, got {epsilon:g}{meant}"
        )
    return epsilon


def _domain_of(where: str, box: str | None) -> dict[str, Any]:
    """Return the section of a job that says where its roads are from.

    Raises
    ------
    SpecError
        If what looks like a file is not there, or the box is none.
    """
    domain: dict[str, Any] = {}
    if not where:
        raise SpecError("WHERE: must name a place, or a file of roads")
    if where.startswith(BUILTIN_PREFIX) or _is_there(Path(where)):
        domain["roads"] = where
    elif os.sep in where or re.fullmatch(r"\S*\.[A-Za-z][A-Za-z0-9]{1,7}", where):
        # A name of a file is not sent to whoever finds places.
        raise SpecError(f"WHERE: {printable(where)}: no such file or folder of roads")
    elif re.fullmatch(r"[-+\d.,\s]+", where):
        raise SpecError(
            "WHERE: a box needs a network: name a place or a file of roads, and give --box W,S,E,N"
        )
    else:
        domain["place"] = where
    if box is not None:
        try:
            domain["bbox"] = [float(side) for side in box.split(",")]
        except ValueError:
            raise SpecError(f"--box: must be W,S,E,N in degrees, got {printable(box)}") from None
    return domain


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than names of files may be, or in a folder that may not be read
        return False


def _name_of(where: str, box: Sequence[float] | None) -> str:
    """Return a name for job and store; boxes of one place have names of their own, always the same ones."""
    last = Path(where.removeprefix(BUILTIN_PREFIX)).name
    name = _plain(re.sub(r"\.(osm|pbf|bz2|gz|graphml|gpkg|csv)\b.*", "", last).partition(",")[0])
    if box is None:
        return name
    return f"{name}-{_digits_of(json.dumps(list(box)))}"


def _name_after(stem: str) -> str:
    """Return a name for job and store after a file; where letters are lost, not that of another file."""
    name = _plain(stem)
    return name if stem.isascii() and len(stem) <= _NAME_LENGTH else f"{name}-{_digits_of(stem)}"


def _digits_of(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGITS]


def _plain(text: str) -> str:
    """Return a text in letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "city"


def _text_of(name: str, domain: Mapping[str, Any], facts: Mapping[str, Any], seconds: float) -> str:
    written = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in domain.items())
    return _FILE.format(
        title=f"{printable(facts['where'])}, epsilon = {facts['epsilon_per_km']:g} per km",
        name=json.dumps(name),
        # Of JSON's texts, those with this one character are none of TOML.
        domain="\n".join(written).replace("\x7f", "\\u007f"),
        spacing=metres(facts["spacing_km"]),
        moved=metres(facts["max_quantisation_km"]),
        cell_km=facts["cell_km"],
        refine=facts["refine"],
        meaning=", ".join(_odds(facts)),
        epsilon=facts["epsilon_per_km"],
        outputs=f"{facts['outputs']:,}",
        seconds=seconds,
        tasks=facts["loss_tasks"],
    )


def _odds(facts: Mapping[str, Any]) -> list[str]:
    odds = facts["log_odds"].items()
    return [f"{factor_in_words(log)} where they are {metres(float(km))} apart" for km, log in odds]


def prospect_screen(facts: dict[str, Any]) -> Screen:
    """Return what a job will come to at a glance."""
    moved = metres(facts["max_quantisation_km"])
    ours, plain = facts["loss_km_about"], facts["plain_loss_km_about"]
    beside = "" if ours < plain else ": at this epsilon there is nothing to gain"
    one, eight = (readable_seconds(facts["seconds_by_workers"][count]["total"]) for count in "18")
    apart = f"{metres(facts['spacing_km'])} apart; a place is moved by at most {moved}"
    rows = [
        ("records", f"{facts['records']:,}, {apart}"),
        ("reports", f"{facts['outputs']:,} of {facts['road_nodes']:,} road nodes"),
        ("error", f"about {metres(ours)} in road distance; programs may lower it"),
        ("plain noise", f"about {metres(plain)}, at the nearest road node{beside}"),
        ("epsilon", f"{facts['epsilon_per_km']:g} per km: a report changes odds of two places by at most"),
        *(("", f"x {said}") for said in _odds(facts)),
        ("takes", f"about {one} in one process, {eight} in eight"),
        ("on disk", f"at most {decimal(facts['store_bytes'])}"),
    ]
    commands = [
        (called("run", near(facts["job"])), "build and prove it"),
        (called("show", near(facts["store"])), "look at it"),
    ]
    return Screen(f"{facts['job']} is written for {facts['where']}", GOOD, rows, commands)
