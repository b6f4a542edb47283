"""Road networks as people have them: what each kind of file holds, read into arrays."""
