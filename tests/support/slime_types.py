"""Stand-in for the types of slime that its rollout functions receive and return: slime is not on PyPI.

github.com/THUDM/slime at 624b824a898ab0ec1fcb4d373004c7f3852bf515: `Sample` of slime/utils/types.py, the outputs of
slime/rollout/base_types.py, and how slime/ray/rollout.py reads a sample. `install` registers them under slime's module
names.
"""

import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict = field(default_factory=dict)

    def to_dict(self):
        return self.__dict__ | {"status": self.status.value}

    @staticmethod
    def from_dict(data):
        return Sample(**data | {"status": Sample.Status(data["status"])})


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class Source:
    """Stand-in for slime's data source: numbers groups and samples, and continues from a given number of groups."""

    def __init__(self, size, groups=0):
        self.size, self.groups = size, groups

    def get_samples(self, count):
        groups = []
        for number in range(self.groups, self.groups + count):
            prompt, label = f"{number % 64:02d}*3+60=", str(number % 2)
            indices = range(number * self.size, (number + 1) * self.size)
            groups.append([Sample(number, index, prompt=prompt, label=label) for index in indices])
        self.groups += count
        return groups


def train_data(samples, top_p=1.0):
    """Training data that slime's rollout manager extracts from samples, after checking their lengths."""
    for sample in samples:
        assert len(sample.loss_mask) == sample.response_length == len(sample.rollout_log_probs)
        if top_p != 1.0:
            assert len(sample.rollout_top_p_token_offsets) == sample.response_length + 1
            assert sample.rollout_top_p_token_offsets[-1] == len(sample.rollout_top_p_token_ids)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def install(monkeypatch, evaluate=None):
    own = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.rollout": {},
        "slime.rollout.base_types": {
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
        },
        "slime.rollout.sglang_rollout": {"generate_rollout": evaluate},
    }
    for name, members in own.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
