"""A fault-free run of a schedule, from its first group to its last batch, and two sources of empty prompts for it."""

import itertools
from collections.abc import Callable

from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import Sample
from april.broker.plan import make_schedule
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Schedule, choose_sample, ended_rounds
from april.config import ConfigError, ScheduleSection
from april.config.checks import check_schedule
from april.wire.message import Version

# --- prompt sources ---------------------------------------------------------------------------------------------------


class NumberedPrompts:
    """A dataset of `rows` empty prompts, drawn for `epochs` epochs."""

    def __init__(self, rows: int, epochs: int):
        self.rows, self.epochs = rows, epochs

    def draw(self, cursor):
        epoch, row = cursor
        if row >= self.rows:
            epoch, row = epoch + 1, 0
        return None if epoch >= self.epochs else (epoch, row, b"")


class SubmittedPromptsStub:
    """Prompt source that draws the prompts submitted to a ledger, without their token ids (empty bytes)."""

    rows = 1 << 30
    """Upper limit of the number of prompts; no test submits as many."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def draw(self, cursor):
        _, row = cursor
        return (0, row, b"") if row in self.ledger.prompts.submitted else None


# --- the run ----------------------------------------------------------------------------------------------------------


STEPS, SLOTS, MANY_PROMPTS = 10, 6, 1000
PASSES = 20_000
"""Most loop iterations of a run, after which it counts as stuck; far more than any run needs."""

WORKLOADS: dict[str, Callable[[Sample], int]] = {
    "mixed": lambda sample: 1 + (sample.group.id * 7 + sample.index * 3) % 11 * 3,
    "equal": lambda sample: 6,
    "stragglers": lambda sample: 80 if sample.group.id % 6 == 2 and not sample.index else 1 + sample.group.id % 4,
}
"""Name of a workload -> function that returns the final length of a sample's response, in tokens."""


def advance(schedule: Schedule, ledger: Ledger) -> bool:
    """Advance the schedule as the broker's service does; returns whether a round ended."""
    return bool(list(ended_rounds(schedule, ledger)))


def run_to_the_end(
    section: ScheduleSection,
    staleness: int = 5,
    prompts: int = MANY_PROMPTS,
    steps: int = STEPS,
    workload: str = "mixed",
    slots: int = SLOTS,
) -> Ledger:
    """Run one worker with `slots` slots and a learner until the schedule is finished; returns the ledger. `staleness`:
    largest staleness; `prompts`: number of prompts; `steps`: most batches; `workload`: key of `WORKLOADS`.

    Raises AssertionError if the schedule never finishes, or finishes early with prompts left.
    """
    section = section.model_copy(update={"max_steps": steps, "max_staleness": staleness})
    schedule = make_schedule(section, NumberedPrompts(prompts, 1))
    ledger = Ledger(Rules(section.rollout_batch_size, section.n_samples_per_prompt, max_staleness=staleness))
    ledger.start_learner(0)
    lengths: dict[int, int] = {}
    for _ in range(PASSES):
        before = progress(ledger)
        if advance(schedule, ledger):
            for lease_id in lengths:
                ledger.end_lease(lease_id, "abort")
            lengths.clear()
        if schedule.finished(ledger) and ledger.steps.consumed == ledger.steps.next:
            break
        work(schedule, ledger, lengths, WORKLOADS[workload], slots)
        if ledger.steps.consumed < ledger.steps.next:
            ledger.consume(ledger.steps.consumed)
        assert lengths or progress(ledger) != before, (
            f"the run stands still before batch {ledger.steps.next} of {steps}: nothing is leased, the learner has "
            f"trained every batch, and {len(ledger.ready)} groups are complete"
        )
    else:
        raise AssertionError(f"the run does not end before batch {ledger.steps.next} of {steps}")
    assert ledger.account.closed
    if prompts == MANY_PROMPTS:
        assert ledger.steps.consumed == steps
        assert sum(len(groups) for groups in ledger.deliveries.values()) == steps * section.rollout_batch_size
    return ledger


def progress(ledger: Ledger) -> tuple[int, ...]:
    """Counters of a run: last lease id, round, batches made, batches trained, and complete groups that wait for a
    batch. A run in which none of them grows stands still, even if tokens are generated."""
    steps = ledger.steps
    return ledger.serials.last_lease_id, ledger.rounds.number, steps.next, steps.consumed, len(ledger.ready)


def work(
    schedule: Schedule, ledger: Ledger, lengths: dict[int, int], final_length: Callable[[Sample], int], slots: int
) -> None:
    """Fill the worker's `slots` slots, and generate one token of each response in them. `lengths`: final length in
    tokens of each response in generation, by lease id; `final_length`: function that gives it for a newly leased
    sample."""
    version = Version(0, ledger.steps.consumed)
    while len(lengths) < slots and (sample := choose_sample(schedule, ledger, version)):
        lease = ledger.lease(sample, "w", version.step, 0.0)
        lengths[lease.id] = final_length(sample)
    for lease_id in list(lengths):
        sample = ledger.leases[lease_id].sample
        done = sample.length + 1 >= lengths[lease_id]
        assert ledger.add_chunk(lease_id, sample.length, 1, version, "stop" if done else "") is Verdict.OK
        if done:
            ledger.score(lease_id, 1.0)
            del lengths[lease_id]


# --- the runs of a check ----------------------------------------------------------------------------------------------

BATCH = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
LONG_STEPS = 30


def try_schedule(section: ScheduleSection, steps: int = LONG_STEPS) -> None:
    """Run a schedule for `steps` small batches under each workload (distribution of response lengths), with few and
    with many slots, and with several limits on staleness.

    Raises AssertionError for a run that stands still, and ScheduleFailed for a schedule that raises an exception.
    """
    small = section.model_copy(update=BATCH | {"over_sampling_batch_size": None, "in_flight": None})
    dial = SCHEDULES.find(section.kind).dial
    for factor in (1, 2, 4) if dial else (1,):
        own = {dial.key: factor * dial.one_batch_value(small)} if dial else {}
        for staleness, workload, slots in itertools.product((1, 3), WORKLOADS, (SLOTS, 64)):
            tried = small.model_copy(update=own | {"max_staleness": staleness})
            try:
                check_schedule(tried)
            except ConfigError:
                continue
            run_to_the_end(tried, staleness, steps=steps, workload=workload, slots=slots)
