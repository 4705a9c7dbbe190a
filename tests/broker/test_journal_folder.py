"""A journal on another disk (`broker.journal_dir`): the run folder links to it, and another run's journal is never
mistaken for it."""

from contextlib import closing

import pytest

from april.broker.journal.files import JournalError
from april.broker.server import Server
from april.config import ConfigError, load
from april.launch.preflight import check_resume


def test_a_journal_on_another_disk_is_linked_from_the_run_s_folder(config_file, tmp_path):
    disk, options = tmp_path / "disk", ["--broker.journal_dir", str(tmp_path / "disk")]

    def start(*options):
        with closing(Server(load(config_file, options))) as server:
            return server.service.ledger.serials.starts, server.config

    starts, config = start(*options)
    folder = disk / config.run.name
    assert starts == 1 and any(folder.glob("*.msgpack")) and (config.run_dir / "journal").samefile(folder)
    assert start(*options)[0] == 2 and start()[0] == 3, "it is found without the key, too"
    assert not [line for line in check_resume(config) if "given up" in line]
    with pytest.raises(JournalError, match=f"{folder} and not in"):
        start("--broker.journal_dir", str(tmp_path / "other"))
    with pytest.raises(JournalError, match=f"{folder} has another run's"):
        start(*options, "--run.dir", str(tmp_path / "elsewhere"))
    disk.rename(tmp_path / "taken out")
    for go_on in (lambda: start(*options), lambda: check_resume(config)):
        with pytest.raises((JournalError, ConfigError), match="which is not here"):
            go_on()
