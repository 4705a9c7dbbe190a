"""Who is in which weight group under which rank, said before a run starts."""

from april.config import Config


def describe_groups(config: Config) -> list[str]:
    """A line for each lane of the workers that `april run` starts; others join the same way."""
    return [f"{lane}: {members(config)}" for i in range(config.worker.count) for lane in config.lanes_of(f"worker-{i}")]


def members(config: Config) -> str:
    engine = config.engine
    if config.broadcasts_to_servers and engine.url:
        return "1 + tp_size ranks: 0 the learner, from 1 on the tensor-parallel ranks that its server says it has"
    if config.broadcasts_to_servers:
        size = engine.tensor_ranks
        server = f"its server's tensor-parallel ranks 0-{size - 1}" if size > 1 else "its server"
        return f"{1 + size} ranks: 0 the learner, {span(1, size)} {server}"
    behind = f", which passes them on to its server ({engine.weights})" if config.worker.engine != "torch" else ""
    return f"2 ranks: 0 the learner, 1 the worker{behind}"


def span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
