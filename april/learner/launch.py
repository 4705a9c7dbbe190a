"""torchrun on one machine, with a store that no other machine reaches; ended by the kernel when `april run` dies, and
silent about a failed rank, which has said itself why."""

import os
import sys

from april.processes.lifetime import REFUSED, SUPERVISED, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    from april.connections import store

    own = store.serve("127.0.0.1")
    try:
        main([f"--master-addr={own.host}", f"--master-port={own.port}", *sys.argv[1:]])
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        sys.exit(REFUSED if REFUSED in statuses else 1)
