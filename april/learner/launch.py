"""torchrun as `april run` starts it: the same launcher, ended by the kernel when `april run` dies."""

import os

from april.process import SUPERVISED, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.environ[SUPERVISED] = str(os.getpid())
    from torch.distributed.run import main

    main()
