"""The mechanism store: one Zarr v3 hierarchy with the mechanism, its seed, its problem and its proof.

    probability (x, y, output)     float32; one shard = one block of source cells x all outputs
    x, y, output_x, ..., prior     coordinates and prior
    inside (x, y), kept (cell_x, cell_y)   records and source cells of the region
    seed/                          corner rows (float64), log scores, budgets, objectives
    problem/                       tables of the loss, to evaluate a finished store; roads for maps
    receipts/                      one small object per finished block
    audit/                         certificates and audits, a signature, the best lower bound
    remap/                         the output to report in place of each, if the store is used with a remap
    lock.json                      the run that holds the store, while there is one

Receipts, audits and the remap are JSON objects in groups that have no members.

The client creates the whole hierarchy before any task runs; a task opens it, writes the shards it owns
and its receipt. The state ``complete`` is the last thing written, after the certificate.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import zarr
import zarr.errors
from numpy.typing import NDArray
from zarr.abc.store import Store

from mdpext_dask.errors import GuaranteeViolation, IncompleteStoreError, StoreError, first_line
from mdpext_dask.job.spec import JobSpec, differing_keys, fingerprint_of
from mdpext_dask.problem.domain import Domain
from mdpext_dask.problem.grid import Grid
from mdpext_dask.problem.projection import Projection
from mdpext_dask.seed.budget import planar_epsilon
from mdpext_dask.seed.model import SeedMechanism
from mdpext_dask.store import objects, receipts, schema
from mdpext_dask.store.blocks import Block, Plan, reach_of
from mdpext_dask.store.receipts import Receipt

# The object that holds the attributes of the root.
ROOT_KEY = "zarr.json"
# States in the order in which a store goes through them, after schema.CREATING.
PLANNED, EXTENDING, COMPLETE, REFUSED = "planned", "extending", "complete", "refused"
# Errors that damaged content causes in our code; a TypeError or AttributeError is a fault of that code.
DAMAGED_CONTENT = (ValueError, LookupError, RuntimeError, OSError)
# Errors of Zarr, its codecs and storage for damaged documents or bytes; only around their calls.
DAMAGE = (*DAMAGED_CONTENT, TypeError, AttributeError)


class MechanismStore:
    """An open mechanism store; see :meth:`create` and :meth:`open`.

    Parameters
    ----------
    url
        Local path or URL.
    objects_store
        Its objects, through Zarr's store interface.
    root
        Its root group.
    """

    def __init__(self, url: str, objects_store: Store, root: zarr.Group) -> None:
        self.url = objects.absolute(url)
        self.objects = objects_store
        self._root, self._attributes = root, schema.as_read(root.attrs)

    # --- life cycle -------------------------------------------------------------------------------

    @classmethod
    def create(cls, url: str, spec: JobSpec, domain: Domain, facts: Mapping[str, Any]) -> "MechanismStore":
        """Create the whole hierarchy, with everything in it that does not depend on the seed.

        Parameters
        ----------
        url
            Local path or URL; must be empty or not exist.
        spec, domain
            The job and its problem.
        facts
            Further attributes of the root (planar ε, and so on).

        Raises
        ------
        StoreError
            If it cannot be written.
        """
        store = objects.open_objects(url)
        plan = plan_of(spec, domain.grid, domain.outputs, domain.kept, facts.get(schema.METHOD_CHOSEN))
        try:
            root = zarr.create_group(
                store,
                attributes=cast(Any, schema.as_stored(schema.attributes_of(spec, domain, plan, facts))),
                overwrite=False,
            )
            schema.write_arrays(root, domain, plan)
        except (OSError, zarr.errors.ContainsGroupError) as error:
            raise StoreError(f"{url}: cannot be created: {first_line(error)}") from None
        created = cls(url, store, root)
        created.update(state=PLANNED)
        return created

    @classmethod
    def open(cls, url: str, *, mode: str = "r") -> "MechanismStore":
        """Open an existing store; `mode` is ``"r"`` or ``"r+"``.

        Raises
        ------
        StoreError
            If there is no mechanism store, or one of a newer format.
        """
        objects.require_folder(url)
        store = objects.open_objects(url, read_only=mode == "r")
        found = cls(url, store, _open_root(store, mode, f"{url}: not a mechanism store"))
        schema.check_attributes(found.attributes, url)
        return found

    @classmethod
    def find(cls, url: str, spec: JobSpec) -> "MechanismStore | None":
        """Return the job's own unfinished or finished store at `url`, or None if nothing usable is there.

        Raises
        ------
        StoreError
            If something else is there, or another job's store.
        """
        found = cls.at(url)
        if found is None or found.state == schema.CREATING:
            return None
        identity = spec.identity()
        if found.fingerprint != fingerprint_of(identity):
            keys = ", ".join(differing_keys(found.attributes["identity"], identity))
            raise StoreError(
                f"{url}: belongs to another job, which differs in {keys}; use --overwrite to replace it, or "
                "another --store"
            )
        return found

    @classmethod
    def clear(cls, url: str) -> None:
        """Delete the mechanism store at `url`, finished or half created; anything else never is.

        Raises
        ------
        StoreError
            If something else is there.
        """
        found = cls.at(url)
        if found is None:
            return
        # A half deleted store must not say that it is complete. On a full disk even that does not fit.
        with contextlib.suppress(StoreError):
            found.update(state=schema.CREATING)
        first = receipts.PREFIX.rstrip("/")
        objects.delete_everything(found.objects, found.url, first=first, last=ROOT_KEY)

    @classmethod
    def at(cls, url: str) -> "MechanismStore | None":
        """Return any mechanism store at `url`, half created ones as well; None if nothing is there.

        Raises
        ------
        StoreError
            If something else is there, or it cannot be read.
        """
        store = objects.open_objects(url)
        if objects.is_empty(store):
            return None
        content = objects.get_json(store, ROOT_KEY)
        # Nothing but a lock and partial files, as before a run's first whole write.
        keys = objects.list_keys(store, "") if content is None else [ROOT_KEY]
        if all(key.endswith(objects.LEFTOVER) or key == objects.LOCK for key in keys):
            return None
        attributes = content.get("attributes", {}) if isinstance(content, Mapping) else {}
        if "fingerprint" not in attributes:
            raise StoreError(
                f"{url}: exists and is not a mechanism store; choose another path (it is left as it is)"
            )
        return cls.open(url, mode="r+")

    # --- attributes -------------------------------------------------------------------------------

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the root, as of when the store was opened or last updated here."""
        return dict(self._attributes)

    def update(self, **attributes: Any) -> None:
        """Write attributes of the root in one atomic step, all of them as the present version stores them.

        The metadata document is edited as it is: Zarr would drop the consolidated metadata in it.

        Raises
        ------
        StoreError
            If it is gone or damaged, or cannot be written.
        """
        document = objects.get_json(self.objects, ROOT_KEY)
        if not isinstance(document, dict) or not isinstance(document.get("attributes"), dict):
            raise StoreError(
                f"{self.url}: {ROOT_KEY} is gone or damaged; was this store deleted or replaced?"
            )
        attributes = {**schema.as_read(document["attributes"]), **attributes}
        document["attributes"] = schema.as_stored({**attributes, "format_version": schema.FORMAT_VERSION})
        objects.put_json(self.objects, ROOT_KEY, document)
        self._root = _open_root(self.objects, "r+", f"{self.url}: {ROOT_KEY} is damaged")
        self._attributes = schema.as_read(self._root.attrs)
        self.__dict__.pop("_probability", None)

    @property
    def state(self) -> str:
        """``creating``, ``planned``, ``extending``, ``complete`` or ``refused``."""
        return str(self.attributes["state"])

    def is_finished(self) -> bool:
        """Whether it is complete, and has lost no receipt, nor arrays that skipped blocks follow from.

        Damage to their content is for audits to find.
        """
        if self.state != COMPLETE or len(self.read_receipts()) != self.plan.blocks:
            return False
        names, group = self.seed_attributes.get("extension"), self._node("seed")
        if not self.plan.skipped or not isinstance(names, list):
            return True  # older stores name none
        return isinstance(group, zarr.Group) and set(schema.digested(names)) <= set(group.array_keys())

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the job."""
        return str(self.attributes["fingerprint"])

    @property
    def problem_sha256(self) -> str:
        """Digest of grid, plane, kept cells, outputs, prior and the tables of the loss; "" in the oldest."""
        return str(self.attributes.get("problem_sha256", ""))

    @property
    def content_sha256(self) -> str | None:
        """Digest of a finished store's bytes when it was certified; None where it says none."""
        hashes = self.attributes.get("chunk_hashes")
        digest = hashes.get("digest") if isinstance(hashes, Mapping) else None
        return digest if isinstance(digest, str) else None

    @property
    def attribution(self) -> str:
        """Whom pictures of its map data have to name; may be empty."""
        return str(self.attributes.get("attribution", ""))

    @property
    def name(self) -> str:
        """What to call it where others read it; see :func:`~mdpext_dask.store.objects.shown_name`."""
        return objects.shown_name(self.url)

    def planar_limit(self) -> float:
        """Return the ε to keep in the plane, in 1/km, computed anew from what was promised and the grid."""
        projection = self.projection
        # A plane that is not on Earth has no distortion.
        distortion = 0.0 if projection is None else projection.distortion(self.grid.box.radius_km)
        return planar_epsilon(float(self.attributes["epsilon_per_km"]), distortion)

    def content_digest(self, found: Mapping[int, Receipt]) -> str:
        """Return one SHA-256 (hex) over the hashes of all shards and skipped rows, and their context.

        The context is the description of their array and, with a region, its cells and the seed.
        """
        description = objects.get_bytes(self.objects, f"{schema.PROBABILITY}/{ROOT_KEY}") or b""
        if not self.kept.all():
            description += f"{schema.cells_sha256(self.kept)} {self.seed_attributes.get('sha256')}".encode()
        return receipts.digest_of(found, description)

    @property
    def metric_p(self) -> float:
        """Exponent of the metric."""
        return float(self.attributes["metric_p"])

    @property
    def grid(self) -> Grid:
        """The grid of records."""
        return Grid(**{**self.attributes["grid"], "refine": tuple(self.attributes["grid"]["refine"])})

    @property
    def projection(self) -> Projection | None:
        """The projection from degrees to the plane; None if the loss file gives no centre for it."""
        centre = self.attributes["projection"]
        return None if centre["centre_lon"] is None else Projection(**centre)

    @cached_property
    def plan(self) -> Plan:
        """How the grid is cut into blocks."""
        across, along = self.attributes["block_cells"]
        job = self.attributes["job"]
        # Rows of the oldest stores are of a kind that has no reach, and their jobs may lack sections.
        loss, epsilon = job.get("loss", {}).get("kind", ""), float(self.attributes["epsilon_per_km"])
        method = self.attributes.get(schema.METHOD_CHOSEN) or job["extension"]["method"]
        reach_km = reach_of(method, loss, epsilon)
        return Plan.of(self.grid, self.outputs, (across, along), self.kept, reach_km)

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """Source cells that meet the region, bool of shape (cells_x, cells_y); older stores keep them all.

        Raises
        ------
        GuaranteeViolation
            If they are not those that the store was created with, or not of its grid.
        """
        shape = self.grid.cells_x, self.grid.cells_y
        kept = self.read("kept") if self._node("kept") is not None else np.ones(shape, dtype=bool)
        digest = self.attributes.get("kept_sha256", schema.cells_sha256(np.ones(shape, dtype=bool)))
        if kept.shape != shape or schema.cells_sha256(kept) != digest:
            raise GuaranteeViolation(f"{self.url}: the cells of its region have changed; use --overwrite")
        return kept

    @property
    def outputs(self) -> int:
        """Number K of outputs."""
        return int(self._probability.shape[2])

    def output_xy_km(self) -> NDArray[np.float64]:
        """Return where the outputs lie in the plane, float64 of shape (K, 2), in km."""
        return np.stack([self.read("output_x"), self.read("output_y")], axis=-1)

    def output_lonlat(self) -> NDArray[np.float64]:
        """Return lon and lat of the outputs, float64 of shape (K, 2); NaN where the plane is not on Earth."""
        return np.stack([self.read("output_lon"), self.read("output_lat")], axis=-1)

    @property
    def problem_attributes(self) -> dict[str, Any]:
        """Attributes of the group with the problem's tables; empty where that is missing."""
        group = self._node("problem")
        return dict(group.attrs) if isinstance(group, zarr.Group) else {}

    # --- arrays -----------------------------------------------------------------------------------

    def array(self, name: str) -> "zarr.Array[Any]":
        """Return an array of the store, nothing read of it yet.

        Raises
        ------
        StoreError
            If it is missing, or its description is damaged or not one of this store.
        """
        return self._probability if name == schema.PROBABILITY else self._array(name)

    def _array(self, name: str) -> "zarr.Array[Any]":
        array = self._node(name)
        if not isinstance(array, zarr.Array):
            raise StoreError(
                f"{self.url}: the array {name} is missing; is another run at work on this store?"
            )
        outputs = None if name == schema.PROBABILITY else self.outputs
        schema.check_array(f"{self.url}: {name}/{ROOT_KEY}", name, array, self.grid, outputs)
        return array

    def read(self, name: str, *index: slice) -> NDArray[Any]:
        """Return (a part of) an array of the store.

        Raises
        ------
        StoreError
            If the array is not there or its bytes are damaged.
        """
        array = self.array(name)
        try:
            return np.asarray(array[index] if index else array[...])
        except DAMAGE as error:
            raise StoreError(f"{self.url}: {name} cannot be read: {first_line(error)}") from None

    def _node(self, name: str) -> "zarr.Array[Any] | zarr.Group | None":
        """Return an array or a group, or None if there is none of that name.

        Raises
        ------
        StoreError
            If its description is damaged.
        """
        try:
            return self._root.get(name)
        except DAMAGE as error:
            raise StoreError(f"{self.url}: {name}/{ROOT_KEY} is damaged: {first_line(error)}") from None

    @cached_property
    def _probability(self) -> "zarr.Array[Any]":
        # Described once, when the store is created; behind a URL, every look at the description is a request.
        return self._array(schema.PROBABILITY)

    def write_shards(self, shards: Mapping[str, bytes]) -> dict[str, str]:
        """Write shards, and return the SHA-256 of each.

        Raises
        ------
        StoreError
            If the store refuses the write.
        """
        for key, shard in shards.items():
            # In one piece: readers find the old one or the new one.
            objects.put_bytes(self.objects, key, shard)
        return {key: hashlib.sha256(shard).hexdigest() for key, shard in shards.items()}

    def shard_keys(self, block: Block) -> list[str]:
        """Return the keys of the shards that a block owns.

        Raises
        ------
        StoreError
            If the rows that the block owns are not whole shards; two tasks would write one file.
        """
        array = self._probability
        shard = array.shards
        if shard is None:
            raise StoreError(f"{self.url}: the probability array is not sharded")
        try:
            positions = block.shards(shard[:2], array.shape[:2])
        except ValueError as error:
            raise StoreError(f"{self.url}: block {block.index}: {error}") from None
        return [f"{schema.PROBABILITY}/c/{i}/{j}/0" for i, j in positions]

    # --- seed and problem -------------------------------------------------------------------------

    def write_seed(
        self,
        seed: SeedMechanism,
        attributes: Mapping[str, Any],
        rows: NDArray[np.float64],
        extension: Mapping[str, NDArray[np.float64]],
        records: str | None = None,
    ) -> None:
        """Write the seed; its digest is what receipts refer to.

        Parameters
        ----------
        seed
            The solved LP: its objectives, solver and iterations.
        attributes
            Further attributes.
        rows
            Rows of shape (J, K) to extend: the LP's own, or those made from them.
        extension
            Arrays of what else the extension depends on, by name.
        records
            Name of the existing array of log probabilities of all records, if these are stored.
        """
        rows = rows.reshape(*self.grid.seeds_shape, seed.rows.shape[1])
        self.write_seed_arrays({schema.PROBABILITY: rows, "score": np.log(rows)})
        self.write_extension(extension)
        names = [*extension, *([records] if records else ())]
        digest = schema.seed_sha256(self._seed_digest(names), attributes.get(schema.RECORD_SCORES))
        facts = {"primal_km": seed.primal, "dual_km": seed.dual, "gap": seed.gap, "solver": seed.solver}
        facts |= {"iterations": seed.iterations, "sha256": digest, "extension": names}
        try:
            # The attributes come last: they mark the seed as written.
            self.note_seed({**facts, **attributes})
        except OSError as error:
            raise StoreError(f"{self.url}: the seed cannot be written: {first_line(error)}") from None

    def note_seed(self, attributes: Mapping[str, Any]) -> None:
        """Write attributes of the seed group."""
        self._seed_group().attrs.update(attributes)

    def seed_arrays(self) -> set[str]:
        """Return the names of the arrays in the seed group."""
        return set(self._seed_group().array_keys())

    def has_seed(self) -> bool:
        """Whether the seed is solved and its scores are those that were written."""
        attributes = self.seed_attributes
        names, where = attributes.get("extension", ()), attributes.get(schema.RECORD_SCORES)
        if not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
            return False
        try:
            found = self._seed_digest(names)
            known = {schema.seed_sha256(found, where)}
        except DAMAGED_CONTENT:
            return False
        if isinstance(where, Mapping) and where.get("name") in names:
            known.add(found)  # older stores have where the records' scores are in no digest
        return attributes.get("sha256") in known

    def _seed_digest(self, names: Sequence[str]) -> str:
        return schema.sha256_of(*(self.array(f"seed/{name}") for name in schema.digested(names)))

    def write_seed_cost(self, cost: NDArray[np.float64]) -> None:
        """Write C, float64 of shape (J, K), in km: what the seed LP minimises."""
        self.write_seed_arrays({"cost": cost.reshape(*self.grid.seeds_shape, -1)})

    def delete_seed_arrays(self, *names: str) -> None:
        """Delete arrays of the seed group, those that are there."""
        for name in names:
            if name in self._seed_group():
                del self._seed_group()[name]

    def write_budgets(self, budgets: schema.EdgeBudgets) -> None:
        """Write budgets per directed edge and output; see :class:`mdpext_dask.seed.model.SeedProblem`."""
        self.write_extension(dict(zip(("budget_x", "budget_y"), budgets, strict=True)))

    def write_extension(self, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Write arrays of budgets, per directed edge and output, or numbers into the seed group."""
        for name, values in arrays.items():
            dimensions = tuple(f"{name}_{axis}" for axis in range(values.ndim))
            chunks = (1, *self.plan.seed_chunk_shape)[: values.ndim]
            self.create_seed_array(name, dimensions, chunks, data=np.ascontiguousarray(values))

    def read_seed_cost(self) -> NDArray[np.float64]:
        """Return C, float64 of shape (J, K), in km."""
        return self.read("seed/cost").reshape(self.grid.seeds, -1)

    @property
    def has_seed_cost(self) -> bool:
        """Whether the seed cost is there, whole."""
        return "seed/cost" in self._root and bool(np.isfinite(self.read("seed/cost")).all())

    def _seed_group(self) -> zarr.Group:
        return self._root.require_group("seed")

    def write_seed_arrays(self, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Write arrays of shape (seeds east, seeds north, K) into the seed group."""
        dimensions, chunks = ("seed_x", "seed_y", "output"), self.plan.seed_chunk_shape
        for name, values in arrays.items():
            self.create_seed_array(name, dimensions, chunks, data=np.ascontiguousarray(values))

    def create_seed_array(
        self,
        name: str,
        dimensions: tuple[str, ...],
        chunks: tuple[int, ...],
        fill_value: float = np.nan,  # a chunk that is lost must not read as zeros
        **content: Any,
    ) -> None:
        """Create an array in the seed group: from `data`, or with `shape` and `dtype` for tasks to fill."""
        shape = content["data"].shape if "data" in content else content["shape"]
        try:
            self._seed_group().create_array(
                name,
                chunks=tuple(min(c, max(n, 1)) for c, n in zip(chunks, shape, strict=True)),
                dimension_names=dimensions,
                fill_value=fill_value,
                overwrite=True,
                **content,
            )
        except OSError as error:
            raise StoreError(f"{self.url}: the seed cannot be written: {first_line(error)}") from None

    @property
    def seed_attributes(self) -> dict[str, Any]:
        """Attributes of the seed group; empty while there is no seed."""
        group = self._node("seed")
        return dict(group.attrs) if isinstance(group, zarr.Group) else {}

    def seed_sha256(self) -> str:
        """Return the digest of the seed.

        Raises
        ------
        IncompleteStoreError
            If the seed is not solved yet.
        """
        digest = self.seed_attributes.get("sha256")
        if digest is None:
            raise IncompleteStoreError(f"{self.url}: the seed is not solved yet; run the job again")
        return str(digest)

    def read_receipts(self) -> dict[int, Receipt]:
        """Return the receipts that belong to the present seed, by block."""
        digest = self.seed_attributes.get("sha256")
        found = receipts.read_receipts(self.objects, self.plan.blocks, self.plan.skipped)
        return {block: receipt for block, receipt in found.items() if receipt.seed_sha256 == digest}


def plan_of(
    spec: JobSpec, grid: Grid, outputs: int, kept: NDArray[np.bool_], method: str | None = None
) -> Plan:
    """Return how a job's grid is cut into blocks.

    Parameters
    ----------
    spec
        The job.
    grid, outputs, kept
        The grid, K, and the source cells of the region, bool of shape (cells_x, cells_y).
    method
        The method of extension, where the job leaves it open and it has been chosen.
    """
    reach_km = reach_of(method or spec.extension.method, spec.loss.kind, spec.privacy.epsilon_per_km)
    return Plan.of(grid, outputs, spec.store.block_cells, kept, reach_km)


def _open_root(store: Store, mode: str, complaint: str) -> zarr.Group:
    try:
        # Consolidated metadata is for other readers; this package reads the documents themselves.
        return zarr.open_group(store, mode=cast(Any, mode), zarr_format=3, use_consolidated=False)
    except zarr.errors.GroupNotFoundError:
        raise StoreError(f"{complaint}: there is no Zarr group") from None
    except DAMAGE as error:
        raise StoreError(f"{complaint}: {first_line(error)}") from None
