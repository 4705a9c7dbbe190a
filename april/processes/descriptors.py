"""The limit of open file descriptors, and the errors of a process that has reached it."""

import errno
import resource

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errno values for a lack of descriptors, which ends once another descriptor is closed."""


def raise_limit() -> int:
    """Raise this process's limit to the hard limit; returns the limit in force.

    Every connection takes a descriptor, even before its handshake.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return hard
