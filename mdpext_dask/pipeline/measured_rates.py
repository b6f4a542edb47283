"""Seconds that a job's parts take, each measured alone on one core of a server processor of 2024.

They scale a plan, they do not promise. ``workflows/benchmarks/plan_check.py`` holds them against jobs on the
machine at hand; what it finds is in docs/scaling.md.
"""

# Seconds for one element of the (records x outputs) array and one worker.
EXTEND = 2.0e-8
# What operators that make scores of their own take more, in extending and in trials.
SCORES = 3.5e-8
AUDIT = 1.9e-8
EVALUATE = 0.7e-8
LOSS = 0.9e-8
# Reading and checking one element of a loss file.
READ = 1.0e-8
# Seconds for one task, whatever it does: opening the store, reading the corners, writing small objects.
TASK_OF_LOSS, TASK_OF_EXTEND, TASK_OF_AUDIT, TASK_OF_EVALUATE, TASK_OF_TRIAL = (
    0.005,
    0.012,
    0.010,
    0.007,
    0.008,
)
# What client and scheduler do for a task, one after the other, whoever runs it.
DISPATCH = 2.5e-3
# What the client does for a block when a store is finished: lists it, reads its receipt, compares its sides.
CLOSE, CLOSE_BLOCK = 0.05, 1.0e-3
# Reading a network costs so much a node; a shortest-path tree, so much a node again; the libraries that it
# takes; and the prior, a record.
NODE, TREE_NODE, LIBRARIES, RECORD = 6e-6, 1.7e-7, 0.35, 1.2e-8
# The structured solver: measured 0.1 s at 132 x 20, 0.9 s at 200 x 64, 5 s at 625 x 100, 65 s at 2,401 x 100.
SEED_ENTRY, SEED_FLOP = 5e-5, 2.5e-9
# An element of a trial; a program of a round of refining, as a share of one from the start.
TRIAL, PROGRAM = 6e-8, 0.5
# Cell programs: a number of a lattice in a try.
CELL = 4e-6
# Starting processes, and what they import.
START = 2.2
