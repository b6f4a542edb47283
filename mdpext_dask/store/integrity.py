"""Whether a store still is what was certified.

The parts of a store are compared with each other, so a change is found wherever the rest was not changed to
match. Who rewrites all of it consistently (digests, attributes, receipts and certificate) has made another
store, which cannot be found here: a signature tells (:mod:`mdpext_dask.store.signature`), or a copy of the
root's attributes that is kept elsewhere.

Figures that promise nothing, such as `loss_km`, `seconds` or how the seed was solved, are not compared; nor
is `spatial_ref`, which only mapping software reads, beyond its description.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, StoreError
from mdpext_dask.job.spec import fingerprint_of, is_job_of
from mdpext_dask.seed.budget import vector_norm
from mdpext_dask.store import objects, receipts, schema
from mdpext_dask.store.blocks import Block
from mdpext_dask.store.loss import is_problem_of
from mdpext_dask.store.mechanism_store import COMPLETE, REFUSED, ROOT_KEY, MechanismStore
from mdpext_dask.store.receipts import Receipt
from mdpext_dask.store.schema import PROBABILITY, is_number

# The certificate as it was when the store was last audited.
CERTIFICATE = "audit/certificate.json"
# States in which a store has been finished, whatever came of it.
FINISHED = (COMPLETE, REFUSED)
# Attributes that identify a finished store.
_SAME_STORE = "fingerprint", "chunk_hashes"
_SAME_PLACE_KM = 1e-3
_ROUNDING = 1e-6
# Of each kind of damage, in a message.
_NAMED = 5
# Ranges of missing blocks, in a message.
_NAMED_RANGES = 8


def inconsistencies(store: MechanismStore, certified: float | None = None) -> list[str]:
    """Return the attributes that do not belong to each other, or to the receipts of a finished store.

    Parameters
    ----------
    store
        The store.
    certified
        What a finished store's certificate has just been found to be; default: what its last audit says.
    """
    found = store.read_receipts() if store.state in FINISHED else {}
    wrong = _at_odds(store, found, certified)
    if not np.array_equal(store.read("inside"), store.grid.vertices_of(store.kept)):
        wrong.append("inside")
    if store.state not in FINISHED:
        return wrong
    if not store.has_seed():
        wrong.append("seed")
    elif not _seed_rows_fit_scores(store):
        wrong.append("seed/probability")
    return wrong + _described_otherwise(store)


def require_evidence(store: MechanismStore, found: Mapping[int, Receipt] | None = None) -> None:
    """Refuse a finished store unless certificate, receipts, description of the rows and attributes fit.

    No shard is read: that the rows are those of the receipts is what :func:`verify` looks at.

    Parameters
    ----------
    store
        The store.
    found
        Its receipts, if they have been read.

    Raises
    ------
    GuaranteeViolation
        If receipts or the certificate are gone, as in a store that was copied in part or written anew by
        other software, or if they belong to something else. `worst` has the `blocks` without a receipt and
        the `attributes` that do not fit.
    StoreError
        If something cannot be read.
    """
    if found is None:
        found = store.read_receipts()
    _require_whole(store, found)
    if wrong := _at_odds(store, found, None):
        raise GuaranteeViolation(
            f"{store.url}: {_changed(wrong)}; run mdpext audit {store.url}",
            worst={"blocks": [], "attributes": wrong},
        )


def _require_whole(store: MechanismStore, found: Mapping[int, Receipt]) -> None:
    blocks = [index for index in range(store.plan.blocks) if index not in found]
    lost = [f"the receipts of {len(blocks)} of {store.plan.blocks} blocks"] if blocks else []
    if not objects.exists(store.objects, CERTIFICATE):
        lost.append("its certificate")
    if lost:
        raise GuaranteeViolation(
            f"{store.url}: says that it is {store.state}, but has lost {' and '.join(lost)}: nothing shows "
            "that its rows are those that were certified; copy the whole store, with receipts/ and audit/, "
            f"or prove what its rows keep with mdpext audit {store.url}",
            worst={"blocks": blocks, "attributes": []},
        )


def _changed(wrong: Sequence[str]) -> str:
    return f"{', '.join(wrong)} has changed since the store was certified"


def _at_odds(store: MechanismStore, found: Mapping[int, Receipt], certified: float | None) -> list[str]:
    """Return what does not belong to the rest, of all that takes little to read; see `inconsistencies`."""
    attributes, grid = store.attributes, store.grid
    identity = attributes["identity"]
    axes = {"x": grid.x_km(), "y": grid.y_km(), "output": np.arange(store.outputs)}
    belongs = {
        "fingerprint": fingerprint_of(identity) == attributes["fingerprint"],
        "epsilon_per_km": identity.get("privacy", {}).get("epsilon_per_km") == attributes["epsilon_per_km"],
        "metric_p": identity.get("domain", {}).get("metric_p") == attributes["metric_p"],
        "projection": _outputs_fit_projection(store),
        "job": is_job_of(identity, attributes["job"]),
        **_figures_fit(store, certified),
        "units": attributes.get("units", schema.UNITS) == schema.UNITS,
        **{name: np.array_equal(store.read(name), values) for name, values in axes.items()},
    }
    if store.state in FINISHED:
        content = store.content_digest(found)
        known = {content}
        if not schema.says_its_cells(attributes):  # nor does the digest of the oldest describe their array
            known.add(receipts.digest_of(found, b""))
        belongs["chunk_hashes"] = store.content_sha256 in known
        if certified is None:
            belongs[CERTIFICATE] = _is_certificate_of(store, content)
    return [name for name, fits in belongs.items() if not fits]


def _is_certificate_of(store: MechanismStore, content: str) -> bool:
    """Whether the certificate, where there is one, was made for this job and these receipts."""
    report = objects.get_json(store.objects, CERTIFICATE)
    expected = {
        "fingerprint": store.fingerprint,
        "content_sha256": content,
        "records": store.grid.records,
        "outputs": store.outputs,
    }
    # Older ones do not say all of it.
    return not isinstance(report, Mapping) or all(
        report.get(key, value) == value for key, value in expected.items()
    )


def _described_otherwise(store: MechanismStore) -> list[str]:
    """Return the documents that describe arrays and groups otherwise than the copies of them in the root.

    Other readers go by the copies, written when the store was finished; this package reads the documents.
    """
    root = objects.get_json(store.objects, ROOT_KEY)
    consolidated = _mapping(_mapping(root).get("consolidated_metadata"))
    copies = _mapping(consolidated.get("metadata"))
    keys = [f"{name}/{ROOT_KEY}" for name in copies]
    documents = objects.get_many_json(store.objects, keys)
    return [
        key
        for key, document, copy in zip(keys, documents, copies.values(), strict=True)
        if not document or _described(_mapping(document)) != _described(_mapping(copy))
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _described(document: Mapping[str, Any]) -> dict[str, Any]:
    # The copy of a group has copies of its own, of nothing.
    return {key: value for key, value in document.items() if key != "consolidated_metadata"}


def _figures_fit(store: MechanismStore, certified: float | None) -> dict[str, bool]:
    """Return, by attribute, whether a figure is that of the grid, the plane and the certificate."""
    attributes, grid, limit = store.attributes, store.grid, store.planar_limit()
    half = grid.spacing_km / 2
    expected: dict[str, float] = {
        "quantisation_km": vector_norm(half, half, store.metric_p),
        "epsilon_planar_per_km": limit,
        # Without a plane on Earth nothing is charged.
        "distortion": float(attributes["epsilon_per_km"]) / limit - 1,
        "source_cells_kept": int(store.kept.sum()),
        "records_inside": grid.count_vertices_of(store.kept),
    }
    if attributes["state"] in FINISHED:
        if certified is None:
            certified = _epsilon_of_last_audit(store)
        # No store is complete without a certificate within the limit.
        expected["epsilon_certified"] = certified if is_number(certified) and certified <= limit else math.nan
    # Older stores lack some of them.
    return {key: _is(attributes[key], value) for key, value in expected.items() if key in attributes}


def _epsilon_of_last_audit(store: MechanismStore) -> Any:
    """Return what the last audit has certified; None if it did not hold, or was of another promise."""
    report, attributes = objects.get_json(store.objects, CERTIFICATE), store.attributes
    if not isinstance(report, Mapping) or report.get("holds") is not True:
        return None
    alike = all(report.get(key) == attributes[key] for key in ("epsilon_per_km", "metric_p"))
    return report.get("epsilon_certified") if alike else None


def _is(figure: Any, expected: float) -> bool:
    """Whether a figure is what was expected: to rounding, and versions of PROJ, unless it is a count."""
    if isinstance(expected, int):
        return bool(figure == expected)
    return is_number(figure) and math.isclose(figure, expected, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _seed_rows_fit_scores(store: MechanismStore) -> bool:
    """Whether the corners' rows, which nothing is computed from, are those of their log scores."""
    if not schema.has_scores(store.seed_attributes.get("extension", ())):
        return True  # no corners
    try:
        step = store.array("seed/score").chunks[0]
        for first in range(0, store.grid.seeds_shape[0], step):
            part = slice(first, first + step)
            rows, scores = store.read("seed/probability", part), store.read("seed/score", part)
            if rows.shape != scores.shape or not np.allclose(np.exp(scores), rows, rtol=_ROUNDING, atol=0):
                return False
    except StoreError:
        return False
    return True


def _outputs_fit_projection(store: MechanismStore) -> bool:
    """Whether degrees and plane of the outputs belong together, and to the projection."""
    names = "output_lon", "output_lat", "output_x", "output_y"
    read = [store.read(name) for name in names]
    if any(values.shape != (store.outputs,) for values in read):
        return False
    lonlat, xy = np.stack(read[:2], axis=-1), np.stack(read[2:], axis=-1)
    if store.projection is None:
        # Without a centre no distortion is charged, so there must not have been one.
        return not np.isfinite(lonlat).any()
    # Versions of PROJ differ by less than this, and a metre is no gain.
    return bool(np.abs(store.projection.to_plane(lonlat) - xy).max() <= _SAME_PLACE_KM)


def reopened(store: MechanismStore) -> MechanismStore:
    """Return a finished store opened for writing.

    Raises
    ------
    StoreError
        If it cannot be written, or another store has taken its place.
    """
    writable = MechanismStore.open(store.url, mode="r+")
    if any(writable.attributes.get(key) != store.attributes.get(key) for key in _SAME_STORE):
        raise StoreError(f"{store.url}: another store has taken its place")
    return writable


def require_all_blocks(store: MechanismStore) -> dict[int, Receipt]:
    """Return the receipts of all blocks; refuse to go on while one is missing.

    Raises
    ------
    IncompleteStoreError
        With all missing blocks, or if not even the seed is solved.
    """
    done = store.read_receipts()
    blocks = store.plan.blocks
    missing = [index for index in range(blocks) if index not in done]
    if missing:
        store.seed_sha256()  # without one there is nothing to extend yet
        ranges = ranges_of(missing)
        named = ", ".join(ranges[:_NAMED_RANGES]) + (", ..." if len(ranges) > _NAMED_RANGES else "")
        some, on = ("1 range", "") if len(ranges) == 1 else (f"{len(ranges)} ranges", " and so on")
        raise IncompleteStoreError(
            f"{store.url}: {len(missing)} of {blocks} blocks are missing, in {some}: {named}; run the job "
            f"again, or mdpext partition {shlex.quote(store.url)} --range {ranges[0]}{on}",
            missing=missing,
        )
    return done


def ranges_of(blocks: Sequence[int]) -> list[str]:
    """Return ascending numbers of blocks as ranges A:B, as ``mdpext partition --range`` takes them."""
    cuts = [k for k in range(1, len(blocks)) if blocks[k] != blocks[k - 1] + 1]
    ends = pairwise([0, *cuts, len(blocks)])
    return [f"{blocks[first]}:{blocks[last - 1] + 1}" for first, last in ends] if blocks else []


def verify(store: MechanismStore) -> None:
    """Compare every shard with the hash its receipt names, and what the store says of itself with itself.

    All shards and all tables of the problem are read once. See the module's text for what cannot be noticed.

    Raises
    ------
    GuaranteeViolation
        If something is not what was certified. The message names up to five of each kind; `worst` all of
        them: the `blocks` at fault, shards that are `changed`, `missing` or `extra`, those of no block among
        the last, and the `attributes`, arrays and documents that do not belong to the rest.
    StoreError
        If something cannot be read at all.
    """
    found, blocks, parts = store.read_receipts(), [], []
    if not found:
        _require_whole(store, found)
    wrong = inconsistencies(store)
    if not is_problem_of(store):
        wrong.append("problem_sha256")
    for block in store.plan:
        damage = damage_against(store, block, found.get(block.index))
        if damage or block.index not in found:
            blocks.append(block)
            parts.append(damage)
    damage = ShardDamage.joined([*parts, ShardDamage(extra=extra_shards(store))])
    said = _said_of_blocks(blocks)
    unproved = [str(block.index) for block in blocks if block.index not in found]
    kinds = {f"{kind} shards": names for kind, names in asdict(damage).items()}
    for what, names in {"no receipt of blocks": unproved, **kinds}.items():
        if names:
            said.append(f"{what}: {_some(names)}")
    if wrong:
        said.append(f"{_changed(wrong)}; run the audit")
    if said:
        raise GuaranteeViolation(
            f"{store.url}: {'; '.join(said)}",
            worst={"blocks": [block.index for block in blocks], **asdict(damage), "attributes": wrong},
        )


def _said_of_blocks(blocks: Sequence[Block]) -> list[str]:
    if not blocks:
        return []
    first, *others = blocks
    x, y = first.owned_x, first.owned_y
    plural = "s" if len(others) > 1 else ""
    more = f" and block{plural} {_some([str(block.index) for block in others])}" if others else ""
    where, have = f"records {x.start}..{x.stop - 1} x {y.start}..{y.stop - 1}", "have" if others else "has"
    return [f"block {first.index} ({where}){more} {have} changed since it was certified"]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


@dataclass(frozen=True)
class ShardDamage:
    """Shards at fault, by key; falsy if there are none.

    Parameters
    ----------
    changed
        Those whose bytes are not the ones that the receipt names.
    missing
        Those that are not there.
    extra
        Those that are there although no receipt names them.
    """

    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable["ShardDamage"]) -> "ShardDamage":
        """Return what several blocks and the rest of a store have, as one."""
        kinds = zip(*((part.changed, part.missing, part.extra) for part in (cls(), *parts)), strict=True)
        return cls(*(tuple(key for keys in kind for key in keys) for kind in kinds))

    @property
    def keys(self) -> tuple[str, ...]:
        """All of them, the changed first, then the missing."""
        return self.changed + self.missing + self.extra

    def __bool__(self) -> bool:
        return bool(self.keys)


def damage_of_block(store: MechanismStore, index: int) -> ShardDamage:
    """Compare the shards of one block with its receipt as it is in the store; see :func:`damage_against`.

    Parameters
    ----------
    store, index
        Which block of which store.

    Raises
    ------
    StoreError
        If the description of the array is damaged.
    """
    receipt = receipts.read_receipt(store.objects, index, store.plan.skipped)
    return damage_against(store, store.plan[index], receipt)


def damage_against(store: MechanismStore, block: Block, receipt: Receipt | None) -> ShardDamage:
    """Compare the shards of one block with a receipt of it.

    Parameters
    ----------
    store, block
        Which block of which store.
    receipt
        Its receipt. Without one nothing says what its shards should be: those that are there are extra, those
        that are not are missing. A block that the plan skips must have no shards, whatever a receipt names.

    Raises
    ------
    StoreError
        If the description of the array is damaged.
    """
    named = {} if receipt is None else receipt.shards
    changed, missing, extra = [], [], []
    for key in store.shard_keys(block):
        if block.index in store.plan.skipped or key not in named:
            if objects.exists(store.objects, key):
                extra.append(key)
            elif block.index not in store.plan.skipped:
                missing.append(key)
            continue
        found = receipts.shard_sha256(store.objects, key)
        if found is None:
            missing.append(key)
        elif found != named[key]:
            changed.append(key)
    return ShardDamage(tuple(changed), tuple(missing), tuple(extra))


def extra_shards(store: MechanismStore) -> tuple[str, ...]:
    """Return the keys of objects beside the shards that belong to no block of the plan, sorted.

    Whatever their names, and however deep they lie. What killed writes leave behind (``*.partial``) is none
    of them: nothing ever reads it, and finishing a store sweeps it away. Where a store cannot be listed none
    are found: nothing reads them either, as they belong to no block.

    Parameters
    ----------
    store
        The store.

    Raises
    ------
    StoreError
        If the description of the array is damaged.
    """
    owned = {key for block in store.plan for key in store.shard_keys(block)}
    return tuple(
        key
        for key in objects.list_keys_if_possible(store.objects, f"{PROBABILITY}/c/") or ()
        if key not in owned and not key.endswith(objects.LEFTOVER)
    )
