import logging

import pytest
import torch.distributed as dist

from tests.support.learner.small_learner import make_policy

logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # a line per tensor otherwise


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def one_rank():
    """A process group whose only rank is this process."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
