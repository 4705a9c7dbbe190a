"""`april broker` that also notes how much each of its syncs puts on disk: `python batches.py SIZES.npy CONFIG`."""

import os
import sys
from functools import wraps

import numpy as np

from april.cli import main


class SyncSizes:
    """Counts the bytes that `os` writes between two calls of `fdatasync`."""

    def __init__(self):
        self.sizes: list[int] = []
        self._written = 0
        for name in ("write", "pwrite", "writev", "pwritev"):
            setattr(os, name, self._counting(getattr(os, name)))
        os.fdatasync = self._closing(os.fdatasync)

    def _counting(self, write):
        @wraps(write)
        def counting(*arguments):
            count = write(*arguments)
            self._written += count
            return count

        return counting

    def _closing(self, fdatasync):
        @wraps(fdatasync)
        def closing(file):
            fdatasync(file)
            self.sizes.append(self._written)
            self._written = 0

        return closing


if __name__ == "__main__":
    syncs = SyncSizes()
    status = main(["broker", sys.argv[2]])
    np.save(sys.argv[1], np.array(syncs.sizes))
    sys.exit(status)
