"""torchrun as `april run` starts it: the same launcher, ended by the kernel when `april run` dies, and
silent about a failed rank, which has said itself why."""

import os
import sys

from april.process import REFUSED, SUPERVISED, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main()
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        sys.exit(REFUSED if REFUSED in statuses else 1)
