"""Loss files, and jobs that are made from them."""

from pathlib import Path
from typing import Any

import numpy as np


def write(path: Path, shape: tuple[int, int], *, spacing: float = 0.5, **more: Any) -> dict[str, Any]:
    """Write and return a problem with a random loss."""
    rng = np.random.default_rng(7)
    x, y = -2.0 + spacing * np.arange(shape[0]), 30.0 + spacing * np.arange(shape[1])
    outputs = rng.uniform((x[0], y[0]), (x[-1], y[-1]), (4, 2))
    loss = rng.uniform(0, 5, (*shape, 4)).astype(np.float32)
    problem = {"x_km": x, "y_km": y, "output_xy_km": outputs, "loss_km": loss, "prior": rng.random(shape)}
    np.savez(path, **(problem := {**problem, **more}))
    return problem


def job(file: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = {
        "domain": {"refine": [2]}, "privacy": {"epsilon_per_km": 1.0, "budget": "bound"},
        "loss": {"kind": "file", "file": str(file)}, "cluster": {"kind": "inline"},
    }  # fmt: skip
    for name, keys in sections.items():
        document.setdefault(name, {}).update(keys)
    return document
