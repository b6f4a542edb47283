"""Answers: one small file for every method and repetition, named by a digest of what decides it.

A comparison that was killed at any moment resumes from them, and answers to other questions may lie in the
same folder.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, model_validator

import mdpext_dask
from mdpext_dask.files import whole_file
from mdpext_dask.job.spec import JobSpec, fingerprint_of
from mdpext_dask.reports.compare.methods import entry_of, with_settings

# The case that is the job itself.
ITSELF = "the job"
# The row that is no method.
BOUND = "lower-bound"
# Sections of a job that only our own methods depend on.
_OURS_ALONE = ("extension", "seed", "store")


@dataclass(frozen=True)
class Case:
    """One problem to compare on.

    Parameters
    ----------
    name
        Name of the case.
    spec
        Its job; repetitions only draw other outputs and tasks.
    methods
        Which methods.
    default
        Which of them the job's own settings make.
    """

    name: str
    spec: JobSpec
    methods: tuple[str, ...]
    default: str

    def repetition(self, number: int) -> JobSpec:
        """Return the job of one repetition: other outputs and tasks."""
        spec = self.spec
        outputs = spec.outputs.model_copy(update={"random_seed": spec.outputs.random_seed + number})
        loss = spec.loss.model_copy(update={"random_seed": spec.loss.random_seed + number})
        return spec.model_copy(update={"outputs": outputs, "loss": loss})

    @property
    def draws(self) -> bool:
        """Whether repetitions differ; k-means of the prior starts elsewhere in each."""
        outputs, loss = self.spec.outputs, self.spec.loss
        travels = loss.kind == "travel" and loss.tasks_file is None
        return outputs.choose in ("road-nodes", "prior") or travels

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self.spec.identity()

    def key(self, method: str) -> str:
        """Return the SHA-256 of all that decides the answers of a method on this problem."""
        entry = None if method == BOUND else entry_of(method)
        identity = self._identity
        if entry is None or entry.made_by is not None:
            identity = {name: keys for name, keys in identity.items() if name not in _OURS_ALONE}
            identity["privacy"] = {k: v for k, v in identity["privacy"].items() if k != "budget"}
        else:
            identity = with_settings(identity, entry.settings)
        return fingerprint_of({"software": software(), "method": method, **identity})

    def answer_path(self, folder: Path, method: str, repetition: int) -> Path:
        """Return where an answer is in a folder of answers, or will be."""
        return folder / method / self.key(method)[:16] / f"{repetition}.json"


@cache
def software() -> str:
    """Return the SHA-256 of this package's modules: another version may answer otherwise."""
    digest = hashlib.sha256()
    for path in sorted(Path(mdpext_dask.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


class _Failed(BaseModel):
    completed: Literal[False]
    reason: str
    limited: bool = False
    limit_seconds: _Figure | None = None

    @model_validator(mode="after")
    def _limits_are_known(self) -> "_Failed":
        if self.limited and self.limit_seconds is None:
            raise ValueError("limited by what?")
        return self


class _Bound(BaseModel):
    completed: Literal[True]
    lower_bound_km: _Figure
    expected_km: _Figure
    stride: Annotated[int, Field(strict=True)]
    given_seconds: _Figure = 0


class _Done(BaseModel):
    completed: Literal[True]
    loss_km: _Figure
    seconds: _Figure
    verdict: str
    guarantee: str
    note: str
    epsilon_audited: _Figure | Literal["inf"] | None
    violation_ratio: _Figure | None = None
    sampled_standard_error_km: _Figure | None = None
    given_seconds: _Figure = 0


_ANSWER = TypeAdapter[_Failed | _Bound | _Done](_Failed | _Bound | _Done)


def read_answer(path: Path) -> dict[str, Any] | None:
    """Return an answer, or None if it is missing or damaged; then it is made again."""
    try:
        content = path.read_bytes()
        _ANSWER.validate_json(content)
        answer: dict[str, Any] = json.loads(content)
    except (OSError, ValueError):
        return None
    return answer


def write_answer(path: Path, values: dict[str, Any]) -> None:
    """Write an answer whole or not at all, while others may write it too.

    Raises
    ------
    DataError
        If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(json.dumps(values, allow_nan=False).encode())


def is_settled(answer: dict[str, Any] | None, limit_seconds: float) -> bool:
    """Whether an answer is there and would be the same with this time limit.

    A method may have failed for lack of time; and what went wrong around it need not go wrong again.
    """
    if answer is None or answer.get("passing"):
        return False
    key = "given_seconds" if answer["completed"] else "limit_seconds"
    return float(answer.get(key, limit_seconds)) >= limit_seconds


def given_up(path: Path, limit_seconds: float) -> str | None:
    """Return why another repetition of the same did not end within its limits, if one did not."""
    for other in sorted(path.parent.glob("*.json")):
        answer = None if other == path else read_answer(other)
        if answer and answer.get("limited") and float(answer["limit_seconds"]) >= limit_seconds:
            return str(answer["reason"])
    return None
