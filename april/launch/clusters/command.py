"""`april launch`: a run on a cluster, from the same file; and what is asked of it afterwards."""

from collections.abc import Sequence
from pathlib import Path

from april import config as configuration
from april.config import Config, ConfigError
from april.connections.address import ADDRESS_FILE
from april.launch import preflight
from april.launch.clusters import LAUNCHERS
from april.launch.clusters.launcher import FOLDER, Launcher
from april.launch.clusters.layout import Layout, check
from april.launch.devices import needed_devices
from april.launch.rehearsal import STARTING_S
from april.simulate.automatic import resolve

VERBS = ("status", "logs", "stop", "scale")
WORKERS = "workers="


def launch(paths: Sequence[Path], overrides: list[str], dry_run: bool, resume: bool) -> str:
    """Submit a run, or with `dry_run` show what would be. Raises ConfigError."""
    config = configuration.load(paths, overrides, inputs=())
    kind: type[Launcher] = LAUNCHERS.find(config.launch.on)
    check(config, kind.on_network)
    if dry_run:
        return "\n".join(f"# --- {name}\n{text}" for name, text in launcher_of(config, kind).files().items())
    if resume:
        preflight.check_resume(config)
    if kind.sees_files:
        config, _ = resolve(config, resumed=resume)
        preflight.examine(config, promised_devices(config), STARTING_S).refuse()
    if not resume:
        config = preflight.make_run_folder(config, asks=kind.sees_files)
    launcher = launcher_of(config, kind)
    launcher.layout.config_file.write_text(config.to_toml())
    (config.run_dir / ADDRESS_FILE).unlink(missing_ok=True)
    launcher.write()
    return f"{launcher.submit()}\nits folder: {config.run_dir}"


def promised_devices(config: Config) -> list[str]:
    """As many as the run asks the cluster for; those of this machine say nothing of it."""
    return list(map(str, range(needed_devices(config))))


def look_after(verb: str, words: Sequence[str]) -> str:
    """`status RUN`, `logs RUN [PART]`, `stop RUN`, `scale RUN [workers=N]`. Raises ConfigError."""
    run_dir, *rest = words or [""]
    file = Path(run_dir).resolve() / "config.toml"
    if not (file.parent / FOLDER).is_dir():
        raise ConfigError(f"run {run_dir!r} was not launched from here; give the folder of one that was, as runs/NAME")
    config = configuration.load(file, [], inputs=())
    launcher = launcher_of(config, LAUNCHERS.find(config.launch.on))
    if verb == "scale":
        return launcher.scale(workers_of(rest) if rest else None)
    if verb == "logs":
        return launcher.logs(*rest[:1] or [""])
    return launcher.status() if verb == "status" else launcher.stop()


def workers_of(words: Sequence[str]) -> int:
    number = words[0].removeprefix(WORKERS) if len(words) == 1 and words[0].startswith(WORKERS) else ""
    if not number.isdecimal():
        raise ConfigError(f"{' '.join(words) or 'nothing'} says no number of workers; write {WORKERS}12")
    return int(number)


def launcher_of(config: Config, kind: type[Launcher]) -> Launcher:
    return kind(Layout(config, config.run_dir.resolve() / "config.toml"))
