"""What a mechanism on the corners of the source cells costs the records between them."""

from mdpext_dask.evaluation.baselines.problem import Array, Problem
from mdpext_dask.problem.loss import assemble_seed_cost, corner_costs


def seed_cost(problem: Problem) -> Array:
    """Return C = Wᵀ diag(π) L of a problem, float64 of shape (J, K), in km, as a store's seed has it."""
    grid = problem.grid
    cells = slice(0, grid.cells_x), slice(0, grid.cells_y)
    return assemble_seed_cost(grid, corner_costs(grid, problem.loss, problem.prior, cells))
