"""The versions of what outlives a process or leaves it, and the April that each belongs to."""
