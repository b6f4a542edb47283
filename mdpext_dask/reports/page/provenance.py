"""How a store was made, as plain values."""

from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from mdpext_dask.events import STAGES
from mdpext_dask.job.spec import JobSpec
from mdpext_dask.store.mechanism_store import MechanismStore
from mdpext_dask.store.schema import PROBABILITY, software_versions

# The store has the seconds of these stages; the rest of the total is shown apart.
_STAGE_NAMES = {
    "domain": "reading roads, making the problem",
    "loss": "cost of the seeds",
    "seed": "seed programs and budgets",
    "cells": "seed programs and cell programs",
    "extend": "extending to all records",
    "boundary": "comparing shared rows",
    "audit": "certificate",
    "evaluate": "expected loss",
}
_LICENCES = {"Map data (c) OpenStreetMap contributors, ODbL 1.0": "https://www.openstreetmap.org/copyright"}


def making_of(store: MechanismStore) -> dict[str, Any]:
    """Return stages, software, job, seed and layout of a store."""
    attributes, seed, plan = store.attributes, store.seed_attributes, store.plan
    rows = store.array(PROBABILITY)
    return {
        "stages": _stages(attributes.get("seconds") or {}),
        "software": dict(attributes.get("software") or {}),
        "software_now": software_versions(),
        "job_toml": job_toml(attributes["job"], attributes["identity"]),
        "notes": [str(note) for note in attributes["notes"]],
        "attribution": store.attribution,
        "licence": _LICENCES.get(store.attribution),
        "seed": [
            ("seeds", f"{store.grid.seeds:,}"),
            ("seed programs solved", f"{seed.get('solves', 0)}"),
            ("seed program’s loss", _km(seed.get("primal_km"))),
            ("seed program’s dual bound", _km(seed.get("dual_km"))),
            ("solver", str(seed.get("solver", "unknown"))),
        ],
        "layout": [
            ("format version", str(attributes["format_version"])),
            ("records", " × ".join(f"{n:,}" for n in store.grid.shape) + f" = {store.grid.records:,}"),
            ("spacing of records", f"{1000 * store.grid.spacing_km:.4g} m"),
            ("outputs", f"{store.outputs:,}"),
            (
                "source cells",
                f"{store.grid.source_cells:,} of {store.grid.cell_km:g} km, {int(store.kept.sum()):,} kept",
            ),
            ("blocks", f"{plan.blocks:,}, of which {len(plan.skipped):,} outside the region are not stored"),
            ("numbers", f"float32, {plan.store_bytes / 1e6:,.1f} MB before compression"),
            ("shard, chunk", f"{rows.shards} and {rows.chunks} records × records × outputs"),
            ("plane", _plane(store)),
        ],
    }


def _stages(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    known = {name: float(seconds.get(name, 0.0)) for name in STAGES if seconds.get(name)}
    total = float(seconds.get("total", 0.0))
    rest = total - sum(known.values())
    rows = [(_STAGE_NAMES[name], value) for name, value in known.items()]
    if rest > 0.005 * total:
        rows.append(("starting workers, and the rest", rest))
    most = max((value for _, value in rows), default=0.0) or 1.0
    return [{"name": name, "seconds": value, "share": value / most} for name, value in rows]


def _plane(store: MechanismStore) -> str:
    projection = store.projection
    if projection is None:
        return "as in the loss file, nowhere on Earth"
    turned = f", turned by {projection.rotation_deg:g}°" if projection.rotation_deg else ""
    return (
        f"azimuthal equidistant around {projection.centre_lat:.6f}, {projection.centre_lon:.6f} (lat, lon), "
        f"WGS 84{turned}"
    )


def _km(value: Any) -> str:
    return "unknown" if value is None else f"{float(value):.6g} km"


def job_toml(job: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Return a job as TOML, with names and digests of files and folders instead of their paths.

    Parameters
    ----------
    job
        As the store has it, with whole paths.
    identity
        The same with digests of what paths name.
    """
    import tomli_w

    lines = []
    known = [*JobSpec.model_fields, *job]
    shown = {section: _without_nulls(job[section]) for section in sorted(job, key=known.index)}
    for section, keys in shown.items():
        for key, value in keys.items():
            kinds = PurePosixPath, PureWindowsPath
            if not isinstance(value, str) or not any(kind(value).is_absolute() for kind in kinds):
                continue
            keys[key] = PureWindowsPath(value).name  # which takes both kinds of separators
            digest = identity.get(section, {}).get(key)
            content = f"; its content is {digest}" if str(digest).startswith("sha256:") else ""
            lines.append(f"# {section}.{key}: only its name{content}")
    return "\n".join([*lines, tomli_w.dumps({name: keys for name, keys in shown.items() if keys})])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_nulls(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item != {}}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value if item is not None]
    return value
