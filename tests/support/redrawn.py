"""Makes the draws of a run again, from its journal."""

from april.broker.ledger.events import GroupOpened
from april.broker.ledger.ledger import Ledger
from april.broker.plan import ledger_rules
from april.broker.prompts import open_prompts
from april.config import load
from tests.support.journal_events import events


def redrawn(config_file, overrides=()):
    """Row numbers of the fresh training prompts: as the journal has them, and as a sampler draws them from the ledger
    that the events before each make."""
    config = load(config_file, list(overrides))
    prompts, ledger = open_prompts(config), Ledger(ledger_rules(config))
    prompts.bind(ledger, read=None)
    drawn, again = [], []
    for event in events(config.run_dir):
        if isinstance(event, GroupOpened) and not event.evaluation and event.replaces is None:
            drawn.append(event.number)
            epoch, row, _ = ledger.next_prompt(prompts)
            again.append(prompts.row_number(epoch, row))
        ledger.apply(event)
    return drawn, again
