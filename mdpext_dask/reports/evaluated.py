"""What ``mdpext evaluate --json`` has found earlier, checked before a page shows it."""

import json
import re
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from mdpext_dask.errors import SpecError, first_line
from mdpext_dask.evaluation.bound.kept import kept_bound
from mdpext_dask.store.mechanism_store import MechanismStore

_ROUNDING = 1e-6
_WHEN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", re.ASCII)
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


def read_kept_bound(store: MechanismStore, loss_km: float) -> dict[str, Any] | None:
    """Return the bound that an evaluation has left in a store; None if there is none that can be right."""
    document = kept_bound(store) or {}
    found = {**{key: document.get(key) for key in _SHOWN}, "adversary": None}
    try:
        _EVALUATION.validate_python(found, strict=True)
    except ValidationError:
        return None
    certified, computed = found["lower_bound_certified_km"], str(document.get("computed"))
    # A loss is a sum of rounded numbers; `evaluate` looks closer.
    if certified is None or not 0 <= certified <= loss_km * (1 + _ROUNDING) or not _WHEN.fullmatch(computed):
        return None
    return {**found, "bound_computed": computed}


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
    if store.content_sha256 is None or document["content_sha256"] != store.content_sha256:
        raise SpecError(
            f"--evaluation: {path}: is about other bytes than those of {store.name}; evaluate it again"
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
