"""Utilities shared by all packages: clock, files, logs, processes, and the registry of parts."""
