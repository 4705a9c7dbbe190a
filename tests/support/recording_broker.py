"""An in-memory broker for trainers: fixed batches, and a record of all calls."""

import numpy as np

from april.learner.batch import TrainingBatch, TrainSample
from april.wire.message import Version


def sample(tokens, prompt_tokens, reward, segments):
    response = len(tokens) - prompt_tokens
    logprobs = np.arange(-1, -1 - response, -1, np.float32)
    return TrainSample(np.array(tokens, np.int32), prompt_tokens, logprobs, reward, segments)


def batch_of(step):
    """A batch of one group: a response of two versions with an observation between them, and a shorter one."""
    first = sample([5, 6, 7, 8, 9], 2, 1.0, ((0, 1, Version(0, 3)), (2, 3, Version(0, 4))))
    return TrainingBatch(step, [[first, sample([5, 6, 7], 2, 0.0, ((0, 1, Version(0, 4)),))]], [(step, b"\xa4mine")])


class RecordingBroker:
    """A batch source and weight publisher that records its calls."""

    def __init__(self, steps, frontier=0):
        self.steps, self.frontier, self.calls, self.weights, self.prompts = steps, frontier, [], {}, 0
        self.leftover, self.metrics, self.images = [], [], {}

    def start(self, checkpoint_step):
        self.calls.append(("start", checkpoint_step))
        return 1, self.frontier

    def fetch(self, step):
        return batch_of(step) if step < self.steps else None

    def submit(self, first, prompts, ids, images):
        self.images |= images
        self.calls.append(("submit", first, [prompt.prompt_tokens for prompt in prompts], ids.tolist()))
        self.prompts = max(self.prompts, first + len(prompts))
        return self.prompts

    def alive(self):
        pass

    def consumed(self, step, metrics, discarded=""):
        self.calls.append(("consumed", step))
        self.metrics.append(metrics)

    def durable(self, step, oldest):
        self.calls.append(("durable", step, oldest))

    def publish(self, version, tensors, canary):
        self.calls.append(("publish", version.step))
        self.weights[version.step] = tensors
        return {}

    def announce(self, version, canary):
        self.calls.append(("announce", version.step))
        self.canary = canary

    def externally_loaded(self):
        self.calls.append(("externally_loaded",))
        return {}
