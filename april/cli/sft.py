"""`april sft`: supervised fine-tuning on this machine, or a dry run of it."""

import contextlib
import sys
from pathlib import Path

from april.cli.command import CONFIG, INTERRUPTED, command, load_config, option
from april.util.lifetime import REFUSED


@command(
    CONFIG,
    option(
        "--dry-run",
        action="store_true",
        help="Start nothing; look at all rows, and print what would be trained and what is missing. Exit status 2 if "
        "anything is.",
    ),
    option("--resume", action="store_true", help="Continue the run whose folder already has this name."),
    lists_keys=True,
)
def sft(config: list[Path], dry_run: bool, resume: bool, overrides: list[str]) -> int:
    """Fine-tune on conversations, with the learner of `april run` and without broker or workers."""
    from april.cli.run import report_end
    from april.config.hub import Fetcher
    from april.launch import preflight
    from april.launch.devices import place_parts, visible_devices
    from april.launch.sft.start import SftRun, check_sft_resume, describe_sft, examine_sft, policy_folders
    from april.launch.supervisor import RunFailed
    from april.util.files import keep_private

    fetcher = Fetcher("tokenizer" if dry_run else "weights", "rows")
    loaded = load_config(
        config, overrides, inputs=() if dry_run else ("model", "data"), fetch=fetcher, resumed=resume, supervised=True
    )
    for fact in fetcher.facts:
        print(f"from a hub: {fact}", flush=True)
    devices = visible_devices()
    if dry_run:
        print(describe_sft(loaded))
        found = examine_sft(loaded, devices, everything=True, resumes=resume)
        for line in (
            *found.lines(),
            *map("remark: {}".format, found.warnings),
            *map("missing: {}".format, found.errors),
        ):
            print(line)
        print("something is missing" if found.errors else "nothing is missing")
        return REFUSED if found.errors else 0
    keep_private(loaded.run_dir)
    failure, state = "", "failed"
    with contextlib.ExitStack() as folder:
        if resume:
            check_sft_resume(loaded)
            folder.enter_context(preflight.lock_run_folder(loaded))
        found = examine_sft(loaded, devices, everything=False, resumes=resume)
        found.refuse()
        if not resume:
            loaded = preflight.make_run_folder(loaded)
            folder.enter_context(preflight.lock_run_folder(loaded))
        for line in (*found.lines(), *map("remark: {}".format, found.warnings)):
            print(line, flush=True)
        try:
            placed = place_parts(loaded, devices)
            state = SftRun(loaded, placed.get("learner", ()), lambda line: print(line, flush=True)).run()
        except RunFailed as error:
            failure = str(error)
            print(f"april sft: {failure}", file=sys.stderr)
        report_end(loaded.run_dir, state, failure)
    for exported in policy_folders(loaded) if state == "finished" else ():
        print(f"exported: {exported}")
    return {"finished": 0, "stopped": INTERRUPTED}.get(state, 1)
