"""File descriptors: as many as the system grants, and what it means when there are none left."""

import errno
import resource

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""refusals that end by themselves, once something is closed"""


def raise_limit() -> int:
    """Let this process open as many as the system's administrator allows; how many that is.

    Every connection takes one, before anybody knows whose it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return hard
