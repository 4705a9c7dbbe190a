import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank():
    """A process group whose only rank is this process."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
