"""torchrun as `april run` starts it: the same launcher, ended by the kernel when `april run` dies."""

from april.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
