"""Stands in for SGLang's compiled kernels on a CPU: SGLang imports names from here but runs its plain torch forms."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel, which a CPU installation does not have")

    return missing
