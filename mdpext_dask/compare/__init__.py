"""Every method on equal terms: the same records, outputs, prior, loss and ε, and one table."""
