"""Formats of files that outlive a process or are read by other programs, and their version numbers."""
