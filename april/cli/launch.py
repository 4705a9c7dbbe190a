"""`april launch`: submits a run to a cluster, and shows, stops or scales a launched run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from april.cli.command import command, option
from april.util.errors import ConfigError
from april.util.registry import add_import_folders

if TYPE_CHECKING:
    from april.config import Config
    from april.launch.clusters.launcher import Launcher

VERBS = ("status", "logs", "stop", "scale")
WORKERS = "workers="


@command(
    option(
        "words",
        nargs="+",
        metavar="CONFIG",
        help="TOML files of the run to launch; or, for a launched run: status RUN, logs RUN [PART], stop RUN, "
        "scale RUN workers=N.",
    ),
    option(
        "--on",
        help="Cluster: local, ssh, slurm, kubernetes, helm, ray, or yours as package.module:Class "
        "[default: launch.on].",
    ),
    option("--dry-run", action="store_true", help="Submit nothing; print the files that would be submitted."),
    option("--resume", action="store_true", help="Continue the run whose folder already has this name."),
    overrides=True,
)
def launch(words: list[str], on: str | None, dry_run: bool, resume: bool, overrides: list[str]) -> int:
    """Train on a cluster; or show, read the logs of, stop or scale such a run."""
    verb, *rest = words
    if verb in VERBS:
        print(manage(verb, rest))
        return 0
    files = [Path(word) for word in words]
    add_import_folders(*(file.parent for file in files))
    print(submit(files, [*overrides, *(["--launch.on", on] if on else [])], dry_run, resume))
    return 0


def submit(files: Sequence[Path], overrides: list[str], dry_run: bool, resume: bool) -> str:
    """Submit a run and return the cluster's answer; with `dry_run` return the text of the files that would be
    submitted. `resume`: the run of this name goes on. Raises ConfigError."""
    from april.config import load
    from april.config.hub import Fetcher
    from april.config.section import AUTO
    from april.launch import preflight
    from april.launch.clusters import LAUNCHERS
    from april.launch.clusters.launcher import check_launch
    from april.launch.devices import needed_devices
    from april.launch.rehearsal import STARTING_S
    from april.simulate.tune import resolve
    from april.util.files import keep_private
    from april.wire.security.keygen import make_folder_once
    from april.wire.security.keys import RUN_KEYS
    from april.wire.sockets.base import ADDRESS_FILE

    config = load(files, overrides, inputs=(), fetch=Fetcher("commit", "commit"), resumed=resume)
    kind: type[Launcher] = LAUNCHERS.find(config.launch.on)
    makes_keys = config.security.keys == AUTO and kind.sees_files
    check_launch(config, kind.on_network and not makes_keys)
    if dry_run:
        shown = launcher_of(config.without_secrets(), kind)
        return "\n".join(f"# --- {name}\n{text}" for name, text in shown.files().items())
    if kind.sees_files or resume:
        fetcher = Fetcher("weights" if kind.sees_files else "tokenizer", "rows")
        config = load(files, [*overrides, *config.pins], inputs=(), fetch=fetcher, resumed=resume)
    if resume:
        preflight.check_resume(config)
    if kind.sees_files:
        config, _ = resolve(config, resumed=resume)
        requested_devices = list(map(str, range(needed_devices(config))))
        preflight.examine(config, requested_devices, STARTING_S).refuse()
    keep_private(config.run_dir)
    if not resume:
        config = preflight.make_run_folder(config, ask_store=kind.sees_files)
    if makes_keys and (kind.on_network or config.made_keys):
        config = config.with_keys(config.run_dir / RUN_KEYS)
        make_folder_once(config.run_dir / RUN_KEYS)
    launcher = launcher_of(config, kind)
    launcher.layout.config_file.write_text(config.to_toml())
    (config.run_dir / ADDRESS_FILE).unlink(missing_ok=True)
    launcher.write()
    return f"{launcher.submit()}\nits folder: {config.run_dir}"


def manage(verb: str, words: Sequence[str]) -> str:
    """Carry out one of `VERBS` (status, logs, stop, scale) on a launched run and return the cluster's answer. Raises
    ConfigError."""
    from april.config import load
    from april.launch.clusters import LAUNCHERS
    from april.launch.clusters.launcher import FOLDER

    run_dir, *rest = words or [""]
    file = Path(run_dir).resolve() / "config.toml"
    if not (file.parent / FOLDER).is_dir():
        raise ConfigError(f"run {run_dir!r} was not launched from here; give the folder of one that was, as runs/NAME")
    config = load(file, [], inputs=())
    launcher = launcher_of(config, LAUNCHERS.find(config.launch.on))
    if verb == "scale":
        return launcher.scale(worker_count(rest) if rest else None)
    if verb == "logs":
        return launcher.logs(*rest[:1] or [""])
    return launcher.status() if verb == "status" else launcher.stop()


def worker_count(words: Sequence[str]) -> int:
    """The number N in the argument `workers=N`. Raises ConfigError."""
    number = words[0].removeprefix(WORKERS) if len(words) == 1 and words[0].startswith(WORKERS) else ""
    if not number.isdecimal():
        raise ConfigError(f"{' '.join(words) or 'nothing'} says no number of workers; write {WORKERS}12")
    return int(number)


def launcher_of(config: "Config", kind: type["Launcher"]) -> "Launcher":
    from april.launch.clusters.launcher import ClusterLayout

    return kind(ClusterLayout(config, config.run_dir.resolve() / "config.toml"))
