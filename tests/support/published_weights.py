"""A fake learner that publishes versions of a tiny model, and a fake receiver of a weight channel."""

from queue import SimpleQueue

from april.weights.canary import Canary, canary_tokens
from april.weights.source import StagedWeights
from april.workers.engines.conformance.harness import V0, V1, V2, VOCABULARY
from april.workers.engines.conformance.scores import a_step_further


class Receiver:
    """Fake receiver: stages the given versions, and records refusals and requests."""

    def __init__(self, *versions):
        self.staged = [StagedWeights(version, {}, 0.0) for version in versions]
        self.held, self.reported, self.refused = None, [], SimpleQueue()

    @property
    def has_staged(self):
        return bool(self.staged)

    @property
    def staged_version(self):
        return self.staged[0].version if self.staged else None

    def connect(self, address, key=""):
        pass

    def offer(self, folders):
        pass

    def put_off(self, puts_off):
        self.reported += ["put off"] if puts_off else []

    def take(self):
        return self.staged.pop(0) if self.staged else None

    def loaded(self, version):
        self.held = version

    def refuse(self, why, wrong=False):
        self.reported.append(why)

    def forget(self):
        self.held = None
        self.reported.append("forget")


TEXT = canary_tokens(VOCABULARY)


class Learner:
    """Fake learner that publishes versions of a tiny model, each one training step later."""

    def __init__(self, model):
        weights = {name: tensor.clone() for name, tensor in model.weights().items() if name != "lm_head.weight"}
        self.model, self.weights = model, {V0: weights}
        for before, version in ((V0, V1), (V1, V2)):
            self.weights[version] = a_step_further(self.weights[before], seed=version.step)

    def sends(self, version, tensors=None):
        """Weights of a version as a worker stages them; `tensors` replaces the version's own tensors."""
        published = self.weights[version]
        logprobs = self.model.logprobs_under(published, TEXT.tolist()).tolist()
        canary = Canary(TEXT.tolist(), logprobs, "float32")
        return StagedWeights(version, tensors or published, 0.0, canary=canary, digest=str(version.step))
