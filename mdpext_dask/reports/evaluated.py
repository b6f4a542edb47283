"""What ``mdpext evaluate --json`` has found earlier, checked before a page shows it."""

import json
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from mdpext_dask.errors import SpecError, first_line
from mdpext_dask.reports.page.contents import store_name
from mdpext_dask.store.mechanism_store import MechanismStore

# What a page shows of it.
_SHOWN = (
    "lower_bound_km", "lower_bound_certified", "lower_bound_standard_error_km", "lower_bound_certified_km",
    "lower_bound_stride", "offsets_used", "offsets_total", "gap", "adversary",
)  # fmt: skip


def _shape(numbers: str, optional: str = "", **others: Any) -> Any:
    """Return a model of a JSON object: keys of numbers, keys of numbers or null, and others by type."""
    fields: dict[str, Any] = dict.fromkeys(numbers.split(), (float, ...))
    fields |= dict.fromkeys(optional.split(), (float | None, ...))
    fields |= {name: (kind, ...) for name, kind in others.items()}
    return create_model("_Shape", **fields)


def _list(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


class _Quantiles(BaseModel):
    most: float = Field(alias="0.95")


_EXACT = _shape("releases", exact=bool)
_ESTIMATE = _shape(
    "releases inference_error_km inference_error_half_width_km vulnerability vulnerability_half_width "
    "entropy_bits entropy_half_width_bits"
)
_EMPTY = _shape("", loss_km=None)
_DISTRICT = _shape("probability loss_km inference_error_km", name=str, loss_quantiles_km=_Quantiles)
_ADVERSARY = _shape(
    "inference_error_km inference_error_lower_km prior_inference_error_km vulnerability prior_vulnerability "
    "leakage_bits capacity_bits conditional_entropy_bits prior_entropy_bits mutual_information_bits "
    "rank_mean rank_quantiles_resolution",
    "error_under_loss_km prior_error_under_loss_km",
    rank_quantiles=dict[float, float],
    beliefs=_list(_shape("inference_error_km", "error_under_loss_km", prior=str)),
    releases=_shape("confidence victims", curve=_list(_ESTIMATE | _EXACT)) | None,
    worst_record=_shape("loss_km x_km y_km", "lon lat") | None,
    districts=_list(_DISTRICT | _EMPTY) | None,
    not_measured=dict[str, str],
)
_NO_BOUND = _shape("", lower_bound_km=None, adversary=_ADVERSARY | None)
_FIGURES = "lower_bound_km lower_bound_certified_km lower_bound_stride offsets_used offsets_total"
_ERROR, _GAP = "lower_bound_standard_error_km", "gap"
_CERTIFIED = _shape(
    _FIGURES, f"{_GAP} {_ERROR}", lower_bound_certified=Literal[True], adversary=_ADVERSARY | None
)
_ESTIMATED = _shape(
    f"{_FIGURES} {_ERROR}", _GAP, lower_bound_certified=Literal[False], adversary=_ADVERSARY | None
)
_EVALUATION: TypeAdapter[Any] = TypeAdapter(_CERTIFIED | _ESTIMATED | _NO_BOUND)


def read_evaluation(store: MechanismStore, path: Path) -> dict[str, Any]:
    """Return what an evaluation has found, if it is about the bytes of this store.

    Raises
    ------
    SpecError
        If it is not, or cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"--evaluation: {path}: cannot be read: {first_line(error)}") from None
    except ValueError:
        raise SpecError(
            f"--evaluation: {path}: is no JSON; give what `mdpext evaluate --json` prints"
        ) from None
    if not isinstance(document, dict) or "content_sha256" not in document:
        raise SpecError(f"--evaluation: {path}: is not what `mdpext evaluate --json` prints")
    digest = (store.attributes.get("chunk_hashes") or {}).get("digest")
    if digest is None or document["content_sha256"] != digest:
        raise SpecError(
            f"--evaluation: {path}: is about other bytes than those of {store_name(store)}; evaluate it again"
        )
    missing = [key for key in _SHOWN if key not in document]
    if missing:
        raise SpecError(f"--evaluation: {path}: {', '.join(missing)} missing; evaluate the store again")
    found = {key: document[key] for key in _SHOWN}
    try:
        _EVALUATION.validate_python(found)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise SpecError(f"--evaluation: {path}: is damaged ({where}); evaluate the store again") from None
    return found
