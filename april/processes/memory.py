"""Memory limit of processes that run user code."""

import resource


def limit_memory(memory_mb: int) -> None:
    """Limit this process's address space, and disable core files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
