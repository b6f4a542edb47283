"""The seed linear program: the mechanism on the corners of the source cells."""
