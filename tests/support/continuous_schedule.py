"""A `continuous` schedule on a ledger, without a broker."""

from april.broker.conformance.runs import NumberedPrompts
from april.broker.ledger.ledger import Ledger, Rules
from april.broker.plan import make_schedule
from april.broker.schedules.schedule import choose_sample
from april.config import ScheduleSection
from april.wire.message import Version

N, GROUP_SIZE, STALENESS = 2, 2, 1


class Run:
    """A ledger under the schedule `continuous`, with batches of 2 groups of 2 and staleness at most 1; tests decide
    when a leased sample is finished."""

    def __init__(self, prompts=1000, in_flight=100, longest=1000, staleness=STALENESS, **section):
        self.section = ScheduleSection(
            kind="continuous", rollout_batch_size=N, n_samples_per_prompt=GROUP_SIZE, max_staleness=staleness,
            in_flight=in_flight, **section,
        )  # fmt: skip
        self.prompts = NumberedPrompts(prompts, 1)
        self.schedule = make_schedule(self.section, self.prompts)
        self.ledger = Ledger(Rules(N, GROUP_SIZE, staleness, max_response_tokens=longest))
        self.ledger.start_learner(0)
        self.schedule.advance(self.ledger)

    def lease(self, step=0, worker="w"):
        sample = choose_sample(self.schedule, self.ledger, Version(0, step))
        return sample and self.ledger.lease(sample, worker, step, 0.0)

    def fill(self, step=0):
        leases = []
        while lease := self.lease(step):
            leases.append(lease)
        return leases

    def finish(self, *leases):
        for lease in leases:
            self.ledger.add_chunk(lease.id, lease.sample.length, 3, Version(0, lease.step), "stop")
            self.ledger.score(lease.id, 1.0)
        return self.schedule.advance(self.ledger)

    def consume(self):
        self.ledger.consume(self.ledger.steps.consumed)
        return self.schedule.advance(self.ledger)
