"""Answers that are there: one small file for every method and repetition, named by what decides it.

So a comparison that was killed at any moment goes on where it stopped, and answers to other questions may lie
beside it in the same folder.
"""

import hashlib
import json
import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import mdpext_dask
from mdpext_dask.job.spec import JobSpec, fingerprint_of
from mdpext_dask.reports.compare.methods import entry_of, with_settings

# The row that is no method.
BOUND = "lower-bound"
# What a method that is no store of ours does not depend on.
_OURS_ALONE = ("extension", "seed", "store")
# Of an answer of a method, what there must be, and what there may be.
_FIGURES, _WORDS = ("loss_km", "seconds"), ("verdict", "guarantee", "note")
_MAY_BE_NONE = ("violation_ratio", "sampled_standard_error_km")


@dataclass(frozen=True)
class Case:
    """One problem to compare on.

    Parameters
    ----------
    name
        What it is called.
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
        """Whether repetitions differ in anything; k-means of the prior begins elsewhere in each."""
        outputs, loss = self.spec.outputs, self.spec.loss
        return outputs.choose in ("road-nodes", "prior") or (
            loss.kind == "travel" and loss.tasks_file is None
        )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return self.spec.identity()

    def key(self, method: str) -> str:
        """Return what identifies a method on this problem: the SHA-256 of all that decides its answers."""
        entry = None if method == BOUND else entry_of(method)
        identity = self._identity
        if entry is None or entry.made_by is not None:
            identity = {name: keys for name, keys in identity.items() if name not in _OURS_ALONE}
            identity["privacy"] = {k: v for k, v in identity["privacy"].items() if k != "budget"}
        else:
            identity = with_settings(identity, entry.settings)
        return fingerprint_of({"software": _software(), "method": method, **identity})


@cache
def _software() -> str:
    """Return the SHA-256 of this package's modules: another version may answer otherwise."""
    digest = hashlib.sha256()
    for path in sorted(Path(mdpext_dask.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Answers:
    """A folder of answers.

    Parameters
    ----------
    folder
        Where they are.
    """

    folder: Path

    def path(self, case: Case, method: str, repetition: int) -> Path:
        """Return where an answer is, or will be."""
        return self.folder / method / case.key(method)[:16] / f"{repetition}.json"

    def read(self, case: Case, method: str, repetition: int) -> dict[str, Any] | None:
        """Return an answer, if it is there and whole."""
        return read_answer(self.path(case, method, repetition))

    def all_of(self, case: Case, method: str, repeats: int) -> Iterator[dict[str, Any]]:
        """Yield the answers of all repetitions that are there, in order."""
        for repetition in range(repeats):
            answer = self.read(case, method, repetition)
            if answer is not None:
                yield {"repetition": repetition, **answer}


def read_answer(path: Path) -> dict[str, Any] | None:
    """Return an answer, if it is there and whole."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and _is_whole(answer) else None


def _is_whole(answer: dict[str, Any]) -> bool:
    """Whether an answer has all that is read of it; one that was damaged since is made again."""
    if answer.get("completed") is False:
        limit = answer.get("limit_seconds", None if answer.get("limited") else 0)
        return _is_figure(limit) and isinstance(answer.get("reason"), str)
    if answer.get("completed") is not True or not _is_figure(answer.get("given_seconds", 0)):
        return False
    if "lower_bound_km" in answer:
        figures = _is_figure(answer["lower_bound_km"]) and _is_figure(answer.get("expected_km"))
        return figures and type(answer.get("stride")) is int
    audited = answer.get("epsilon_audited", "")
    return (
        all(_is_figure(answer.get(name)) for name in _FIGURES)
        and all(isinstance(answer.get(name), str) for name in _WORDS)
        and (audited is None or audited == "inf" or _is_figure(audited))
        and all(answer.get(name) is None or _is_figure(answer[name]) for name in _MAY_BE_NONE)
    )


def _is_figure(value: Any) -> bool:
    # True is an int to Python, and its JSON reads not-a-number.
    return type(value) in (int, float) and 0 <= value < math.inf


def write_answer(path: Path, values: dict[str, Any]) -> None:
    """Write an answer under a name of its own first: nobody reads half of it, and others may write it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    beside.write_text(json.dumps(values, allow_nan=False), encoding="utf-8")
    beside.replace(path)


def is_settled(answer: dict[str, Any] | None, limit_seconds: float) -> bool:
    """Whether an answer is one, or would be no other with so much time.

    A method that says that it cannot be done may say so because of the time; and what has gone wrong around
    it need not go wrong again.
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
