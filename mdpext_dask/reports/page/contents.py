"""The contents of a page as plain values, from a store and from what was found out about it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdpext_dask.auditors.result import HOLDS, AuditReport, in_words, sentence
from mdpext_dask.reports.page import maps, near, words
from mdpext_dask.reports.page.costs import Findings, costs_of
from mdpext_dask.reports.page.provenance import making_of
from mdpext_dask.reports.page.streets import streets_of
from mdpext_dask.reports.page.thinned import NEAR, Thinned, encoded, quantised
from mdpext_dask.store import objects
from mdpext_dask.store.integrity import CERTIFICATE
from mdpext_dask.store.mechanism_store import MechanismStore

_RADII_KM = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def contents_of(store: MechanismStore, found: Findings, now: str) -> dict[str, Any]:
    """Return all values of the page.

    Parameters
    ----------
    store
        The store.
    found
        What was found out about it.
    now
        Date and time, as text.
    """
    return {
        "made": now,
        **_promised(store, found.certificate),
        **_maps(store, found),
        **costs_of(store, found),
        **making_of(store),
    }


# --- the promise ----------------------------------------------------------------------------------


def _promised(store: MechanismStore, report: AuditReport) -> dict[str, Any]:
    attributes, planar = store.attributes, store.projection is None
    facts: dict[str, Any] = {
        "epsilon_per_km": float(attributes["epsilon_per_km"]),
        "metric": words.metric_in_words(store.metric_p, planar=planar),
        "outputs": store.outputs,
        "quantisation_km": float(attributes["quantisation_km"]),
        "distortion": float(attributes["distortion"]),
        "planar": planar,
    }
    stored = objects.get_json(store.objects, CERTIFICATE)
    stored = stored if isinstance(stored, Mapping) else {}
    return {
        "name": str(attributes["job"]["job"].get("name", "mechanism")),
        "store_name": store.name,
        "verdict": words.headline(store.state, report),
        "records": store.grid.records,
        "records_inside": int(attributes.get("records_inside", store.grid.records)),
        **facts,
        "epsilon_certified": report.epsilon,
        "share_used": report.epsilon / report.limit_per_km,
        "factors": words.factors(facts["epsilon_per_km"], facts["quantisation_km"]),
        "certificate": {
            "outcome": sentence(report),
            "holds": report.verdict == HOLDS,
            "pairs": report.records * (report.records - 1) // 2,
            "limit_per_km": report.limit_per_km,
            "triples": report.triples_checked,
            "violations": report.violations,
            "recomputed": report.recomputed,
            "worst": in_words(report.worst) if report.worst else "",
            "seconds": report.seconds,
            "digest": store.content_sha256,
            "fingerprint": store.fingerprint,
            "changed": [*report.changed, *report.missing, *report.extra],
            "before": stored.get("epsilon_certified"),
        },
    }


# --- maps -----------------------------------------------------------------------------------------


def _maps(store: MechanismStore, found: Findings) -> dict[str, Any]:
    thinned = Thinned.of(store, None if found.remap is None else found.remap.table)
    frame = maps.Frame.of(store)
    a, b = thinned.typical()
    row = thinned.row(a, b)
    output = int(np.nan_to_num(row).argmax())
    held = _held(thinned)
    xy = np.stack(np.meshgrid(thinned.x_km, thinned.y_km, indexing="ij"), axis=-1)
    projection = store.projection
    lonlat = None if projection is None else projection.to_degrees(xy.reshape(-1, 2)).reshape(xy.shape)
    places = _places(store)
    here = frame.place(xy[a, b][None])[0].tolist()
    outputs_km = store.output_xy_km()
    radii, least_km = _radii_km(thinned), thinned.step * store.grid.spacing_km
    within = thinned.within(output, outputs_km[output], radii)
    order = np.argsort(-np.nan_to_num(row), kind="stable")[:12].tolist()
    return {
        "base": maps.base_of(store, frame),
        "streets": streets_of(store, frame),
        "seeds": maps.seeds_path(store, frame),
        "seed_count": store.grid.seeds,
        "cell_km": store.grid.cell_km,
        "spacing_km": store.grid.spacing_km,
        "thinned": {
            "step": thinned.step,
            "records": thinned.prior.size,
            "error": math.expm1(held["step_log"] / 2),
            "near": NEAR if "far" in held else None,
        },
        "typical": {
            "x": here[0],
            "y": here[1],
            "place": place_in_words(xy[a, b], None if lonlat is None else lonlat[a, b]),
            "dots": maps.dots_of(row),
            "near": near.reports_near(frame, row, outputs_km, xy[a, b], least_km),
            "top": [
                {"number": k, "place": places[k], "probability": row[k], "share": row[k] / row[order[0]]}
                for k in order
                if math.isfinite(row[k])
            ],
        },
        "posterior": {
            "output": output,
            "place": places[output],
            "field": maps.posterior_field(frame, thinned, output),
            "near": near.senders_near(
                frame, thinned.posterior(output).ravel(), xy.reshape(-1, 2), outputs_km[output], least_km
            ),
            "within": [
                {"radius_km": radius, "probability": round(share, 9)}
                for radius, share in zip(radii, within, strict=True)
            ],
        },
        "prior_field": maps.prior_field(frame, thinned),
        "errors": _errors(store, frame, thinned, found),
        "certificate_field": maps.certificate_field(frame, store, found.certificate),
        "output_places": places,
        "data": {
            "shape": list(thinned.prior.shape),
            "outputs": store.outputs,
            "typical": [a, b],
            "output": output,
            **held,
            "prior": encoded(thinned.prior.astype(np.float32)),
            "inside": encoded(thinned.kept.astype(np.uint8)),
            "x": frame.place(np.stack([thinned.x_km, np.zeros(len(thinned.i))], axis=-1))[:, 0].tolist(),
            "y": frame.place(np.stack([np.zeros(len(thinned.j)), thinned.y_km], axis=-1))[:, 1].tolist(),
            "x_km": np.round(thinned.x_km, 4).tolist(),
            "y_km": np.round(thinned.y_km, 4).tolist(),
            "lonlat": None if lonlat is None else encoded(lonlat.astype(np.float32)),
            "places": places,
            "outputs_km": np.round(outputs_km, 4).tolist(),
            "radii_km": radii,
            "colours": encoded(maps.colour_table(maps.ON_DARK)),
            "largest": maps.largest_dot(store.outputs),
            "scale": frame.scale,
            "least_km": least_km,
        },
    }


def _errors(
    store: MechanismStore, frame: maps.Frame, thinned: Thinned, found: Findings
) -> dict[str, Any] | None:
    """Return the maps of expected errors; None where either is not known."""
    if found.expected_km is None or found.plain_km is None:
        return None
    prior = np.asarray(store.read("prior"), dtype=np.float64)
    return maps.error_fields(frame, thinned, prior, found.expected_km, found.plain_km)


def _held(thinned: Thinned) -> dict[str, Any]:
    """Return the rows as a page holds them: all codes, or those of near outputs with their numbers."""
    rows, local = thinned.rows, thinned.far.any()
    codes, least_log, step_log = quantised(rows.data if local else rows.toarray())
    held = {"codes": encoded(codes), "least_log": least_log, "step_log": step_log}
    if not local:
        return held
    number = np.uint16 if rows.shape[1] < 2**16 else np.uint32
    return {
        **held,
        "starts": encoded(rows.indptr.astype(np.uint32)),
        "numbers": encoded(rows.indices.astype(number)),
        "far": encoded(thinned.far.astype(np.float32)),
    }


def _radii_km(thinned: Thinned) -> list[float]:
    """Return distances that are larger than a square and smaller than the map, in km."""
    box, side = thinned.grid.box, thinned.step * thinned.grid.spacing_km
    most = math.hypot(box.width_km, box.height_km)
    return [radius for radius in _RADII_KM if 2 * side <= radius <= most]


def _places(store: MechanismStore) -> list[str]:
    """Return where outputs are, in words: degrees, or km in the plane."""
    x, y = store.read("output_x"), store.read("output_y")
    if store.projection is None:
        return [place_in_words(np.array([a, b]), None) for a, b in zip(x, y, strict=True)]
    lonlat = zip(store.read("output_lon"), store.read("output_lat"), strict=True)
    return [place_in_words(np.zeros(2), np.array(place)) for place in lonlat]


def place_in_words(xy_km: NDArray[np.float64], lonlat: NDArray[np.float64] | None) -> str:
    """Return a place as latitude and longitude to about a metre, or in km."""
    if lonlat is None:
        return f"x {xy_km[0]:.3f}, y {xy_km[1]:.3f} km"
    return f"{lonlat[1]:.5f}, {lonlat[0]:.5f}"
