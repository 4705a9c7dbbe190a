"""Bytes on disk, whatever they mean: appended, synced, put in the place of others."""
