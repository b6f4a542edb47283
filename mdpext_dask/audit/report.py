"""What an audit answers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdpext_dask.audit.certificate import BlockCertificate, Place, log_probability
from mdpext_dask.budget import vector_norm
from mdpext_dask.errors import GuaranteeViolation, StoreError
from mdpext_dask.integrity import inconsistencies
from mdpext_dask.rows import rows_of
from mdpext_dask.spec import json_number
from mdpext_dask.store import MechanismStore


@dataclass(frozen=True)
class AuditReport:
    """Outcome of an audit of a store.

    Parameters
    ----------
    method
        Which auditor.
    holds
        Whether the certificate is within the limit and the bytes are those of the receipts.
    epsilon_per_km
        The promise, for ground distance, in 1/km.
    epsilon_planar_per_km
        The limit in the plane: the promise over (1 + distortion).
    epsilon_certified
        Smallest planar ε for which the certificate holds, rounded outward; may be infinite.
    metric_p
        Exponent of the metric.
    triples_checked
        Ordered triples (x, x', y) that the answer covers.
    violations, violation_ratio
        (Fine cell, output) pairs above the limit, and their share of all.
    worst
        The worst triple.
    changed
        Keys of shards whose bytes are not those of their receipts, and of other parts that do not belong to
        what was certified.
    blocks_at_fault
        Blocks above the limit or with changed bytes.
    seconds
        How long it took.
    """

    method: str
    holds: bool
    epsilon_per_km: float
    epsilon_planar_per_km: float
    epsilon_certified: float
    metric_p: float
    triples_checked: int
    violations: int
    violation_ratio: float
    worst: dict[str, Any]
    changed: tuple[str, ...]
    blocks_at_fault: tuple[int, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; infinity as ``"inf"``."""
        return {
            **self.__dict__,
            "epsilon_certified": json_number(self.epsilon_certified),
            "metric_p": json_number(self.metric_p),
            "changed": list(self.changed),
            "blocks_at_fault": list(self.blocks_at_fault),
        }

    def sentence(self) -> str:
        """Return the outcome in one line of words."""
        if self.holds:
            return (
                f"holds for all pairs: certified at {self.epsilon_certified:.6g}/km in the plane, "
                f"promised {self.epsilon_per_km:g}/km on the ground"
            )
        parts = []
        if self.changed:
            named = ", ".join(self.changed[:3])
            more = f" and {len(self.changed) - 3} more" if len(self.changed) > 3 else ""
            parts.append(f"bytes changed since they were written: {named}{more}")
        if not self.epsilon_certified <= self.epsilon_planar_per_km:
            parts.append(
                f"certificate {self.epsilon_certified:.6g}/km exceeds {self.epsilon_planar_per_km:.6g}/km"
            )
        worst = self.worst
        between = f"records {worst['record']} and {worst['record_prime']}"
        kept = isinstance(worst["log_ratio"], float) and worst["log_ratio"] <= worst["bound"]
        parts.append(
            f"worst triple: output {worst['output']} between {between}, log ratio {worst['log_ratio']} "
            f"against bound {worst['bound']:.6g}"
            + (" (kept by this pair, but not proved for all of its cell)" if kept else "")
        )
        return "does not hold: " + "; ".join(parts)

    def violation(self) -> GuaranteeViolation:
        """Return the error that says so."""
        return GuaranteeViolation(self.sentence(), worst=self.worst)


def summarise_certificate(
    store: MechanismStore, certificates: Iterable[BlockCertificate], seconds: float
) -> AuditReport:
    """Reduce block certificates to one report.

    Parameters
    ----------
    store
        The store.
    certificates
        Those of all its blocks.
    seconds
        How long they took.
    """
    ordered = sorted(certificates, key=lambda c: c.block)
    limit = store.planar_limit()
    epsilon = max(c.epsilon for c in ordered)
    changed = [c for c in ordered if c.changed]
    keys = [key for c in changed for key in c.changed] + inconsistencies(store, epsilon)
    within = epsilon <= limit
    # If the bytes have changed but still pass, the place to look at is in the changed blocks.
    candidates = changed if changed and within else ordered
    worst = max(candidates, key=lambda c: c.epsilon)
    grid = store.grid
    violations = sum(c.violations for c in ordered)
    cells = (grid.shape[0] - 1) * (grid.shape[1] - 1)
    return AuditReport(
        method="certificate",
        holds=bool(within and not keys),
        epsilon_per_km=float(store.attributes["epsilon_per_km"]),
        epsilon_planar_per_km=limit,
        epsilon_certified=epsilon,
        metric_p=store.metric_p,
        triples_checked=grid.records * (grid.records - 1) * store.outputs,
        violations=violations,
        violation_ratio=violations / (cells * store.outputs),
        worst=describe_cell(store, worst.place, limit),
        changed=tuple(dict.fromkeys(keys)),
        blocks_at_fault=tuple(c.block for c in ordered if c.changed or not c.epsilon <= limit),
        seconds=seconds,
    )


def describe_cell(store: MechanismStore, place: Place, epsilon: float) -> dict[str, Any]:
    """Return the pair of a fine cell's records with the largest |log ratio| / distance, as values.

    Parameters
    ----------
    store
        The store.
    place
        The fine cell and the output.
    epsilon
        ε of the bound, in 1/km.
    """
    part_x, part_y = slice(place.i, place.i + 2), slice(place.j, place.j + 2)
    x, y = store.read("x", part_x), store.read("y", part_y)
    try:
        rows = rows_of(store, part_x, part_y)
    except StoreError:
        rows = np.full((2, 2, store.outputs), np.nan, dtype=np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = log_probability(rows)[:, :, place.output]
    corners = [(a, b) for a in (0, 1) for b in (0, 1)]
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    for position, first in enumerate(corners):
        for second in corners[position + 1 :]:
            distance = vector_norm(x[first[0]] - x[second[0]], y[first[1]] - y[second[1]], store.metric_p)
            ratio = abs(float(logs[first] - logs[second]))
            # Not-a-number is the worst there is.
            rank = math.inf if math.isnan(ratio) else ratio / distance
            if rank > best[0]:
                best = (
                    rank,
                    {
                        "x": [float(x[first[0]]), float(y[first[1]])],
                        "x_prime": [float(x[second[0]]), float(y[second[1]])],
                        "record": [place.i + first[0], place.j + first[1]],
                        "record_prime": [place.i + second[0], place.j + second[1]],
                        "output": place.output,
                        "log_ratio": ratio if math.isfinite(ratio) else "inf",
                        "bound": epsilon * distance,
                        "distance_km": distance,
                    },
                )
    return best[1]
