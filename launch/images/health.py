"""Of a container with a part of April: exits with 0 while the part runs, and is not ill by its own word.

`april part` and `april run` are the container's first process; while they wait to start a part again it has no child. A
broker that serves /health (operations.http) is asked for it.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path

HEALTH = "http://127.0.0.1:9500/health"


def has_child(pid: int) -> bool:
    """Whether a process has one that is no zombie."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            return True
    return False


def says_it_is_ill(url: str) -> bool:
    """Also where it listens and does not answer."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return not isinstance(error.reason, ConnectionRefusedError)
    except OSError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(not has_child(1) or says_it_is_ill(HEALTH))
