"""torchrun over several machines: `python -m april.learner.across --nnodes N ... -m april.learner ...`.

As plain torchrun, but ended by the kernel when its keeper dies, and with the exit status of ranks that refuse to work.
"""

import os
import sys

from april.processes.lifetime import REFUSED, SUPERVISED, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        sys.exit(REFUSED if REFUSED in statuses else 1)
