"""Extension operators: seed rows in, fine rows out, one block of source cells at a time."""
