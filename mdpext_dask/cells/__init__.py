"""Cell programs: re-optimising rows between seeds, a patch of the lattice at a time."""
