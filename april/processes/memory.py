"""How much memory a process that runs foreign code may have."""

import resource


def limit_memory(memory_mb: int) -> None:
    """Of this process's address space; what runs into it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
