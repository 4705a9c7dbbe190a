"""`april broker`: the broker of a run, as one process."""

import logging
import sys
from pathlib import Path

from april.cli.command import CONFIG, command, load_config
from april.util.lifetime import REFUSED, RUN_FAILED, STEPPED_ASIDE

BROKER_PARTS = ("schedule.kind", "schedule.group_filter", "operations.sinks", "operations.alarms")
"""Configuration keys that name parts, such as the schedule, which the broker imports. If all of these parts ship with
April, the broker does without torch; a user-defined one may need it."""


@command(CONFIG, lists_keys=True)
def broker(config: list[Path], overrides: list[str]) -> int:
    """Run the broker of a run alone, without restarts."""
    from april.broker.journal.files import JournalError
    from april.broker.server import BindError, Server
    from april.config.checks import check_schedule
    from april.data.tokenizer import import_without_torch
    from april.simulate.tune import resolve_as_recorded
    from april.util.files import keep_private
    from april.util.lifetime import die_with_parent
    from april.util.logs import log_to_stderr

    die_with_parent()
    loaded = load_config(config, overrides, own_parts=BROKER_PARTS)
    keep_private(loaded.run_dir)
    check_schedule(loaded.schedule)
    loaded, why_automatic = resolve_as_recorded(loaded)
    log_to_stderr("broker", loaded.operations.log_format, run=loaded.run.name)
    if all(loaded.is_shipped(key) for key in BROKER_PARTS):
        import_without_torch()
    if why_automatic:
        logging.getLogger(__name__).info(why_automatic)
    try:
        server = Server(loaded)
    except (JournalError, BindError, OSError) as error:
        print(f"april broker: {error}", file=sys.stderr)
        return 1 if getattr(error, "errno", None) else REFUSED
    try:
        server.serve()
    except JournalError as error:
        print(f"april broker: {error}", file=sys.stderr)
        return 1
    if server.steps_aside:
        return STEPPED_ASIDE
    if server.service.run.state == "failed":
        print(f"april broker: the run has failed: {server.service.run.over}", file=sys.stderr)
        return RUN_FAILED
    return 0
