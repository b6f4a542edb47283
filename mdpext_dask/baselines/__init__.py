"""Mechanisms of the literature, on the same problem as ours; each module is a method and names its source."""
