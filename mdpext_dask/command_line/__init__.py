"""The commands, by what they are for: making a store, using one."""
