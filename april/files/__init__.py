"""Files on disk and in object stores: writing, syncing and atomic replacement."""
