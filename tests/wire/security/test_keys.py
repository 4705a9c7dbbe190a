"""Keys are made with one command and kept private; an unusable key file is refused with a sentence."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from april import config as configuration
from april.broker.server import Server
from april.cli import main
from april.config import ConfigError
from april.wire.security import allow_list, keygen
from april.wire.security.allow_list import AllowList
from april.wire.security.keys import ALLOW_LIST, ROLES, RUN_KEYS, is_open_to_others, load_keys
from april.wire.sockets import base
from april.wire.sockets.base import remove_socket_folder, socket_address
from tests.support.refusals import refusal


def test_one_command_makes_the_keys_of_all_parts_and_nobody_else_may_read_them(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keygen", str(folder)]) == 0
    written = [tmp_path / line for line in capsys.readouterr().out.split()]
    assert sorted(path.name for path in written) == sorted([ALLOW_LIST, "broker.key", *(f"{r}.key" for r in ROLES)])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    listed = AllowList(folder / ALLOW_LIST)
    broker = load_keys(folder, "broker")
    for role in ROLES:
        keys = load_keys(folder, role)
        assert listed.find(keys.public).role == role and keys.broker == broker.public
    assert listed.find(broker.public).role == ""


def test_a_further_worker_gets_a_file_of_its_own_that_needs_no_folder(keys, tmp_path, capsys):
    assert main(["keygen", str(keys), "--role", "worker", "--name", "w7"]) == 0
    moved = tmp_path / "elsewhere.key"
    (keys / "w7.key").rename(moved)
    found = load_keys(moved, "worker")
    assert (found.name, found.broker) == ("w7", load_keys(keys, "broker").public)
    assert AllowList(keys / ALLOW_LIST).find(found.public).name == "w7"


def test_keys_are_never_replaced(keys, capsys):
    before = (keys / "broker.key").read_bytes()
    assert "broker.key" in refusal(capsys, "keygen", str(keys))
    keygen.add_peer(keys, "worker", "w7")
    assert "w7" in refusal(capsys, "keygen", str(keys), "--role", "worker", "--name", "w7")
    assert (keys / "broker.key").read_bytes() == before


@pytest.mark.parametrize("options", [["--role", "worker"], ["--name", "w7"], ["--role", "worker", "--name", "a/b"]])
def test_a_peer_without_role_or_valid_name_is_refused(keys, capsys, options):
    assert "--name" in refusal(capsys, "keygen", str(keys), *options)


def test_a_secret_is_never_printed(keys):
    found = load_keys(keys, "worker")
    assert found.secret not in repr(found)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.chmod(0o644), "chmod 600.*another 'run.dir'"),
        (lambda path: path.unlink(), "cannot be read.*by the run's folder"),
        (lambda path: path.write_text("role = 3"), "no key file"),
        (lambda path: path.write_bytes(b"\xff"), "no key file"),
        (lambda path: path.write_text(path.read_text().replace('secret = "', 'secret = "x')), "not one"),
        (lambda path: path.write_text(path.read_text().replace('"worker"', '"learner"')), "of a learner"),
    ],
)
def test_an_unusable_key_file_is_refused(keys, damage, named):
    damage(keys / "worker.key")
    with pytest.raises(ConfigError, match=named) as error:
        load_keys(keys, "worker")
    assert "worker.key" in str(error.value)


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "refused"),
    [(0o600, 7, 7, False), (0o640, 7, 7, True), (0o440, 0, 7, False), (0o444, 0, 7, True), (0o440, 0, 0, True)],
)
def test_a_group_may_read_only_a_key_file_of_root(monkeypatch, mode, owner, reader, refused):
    monkeypatch.setattr(os, "geteuid", lambda: reader)
    assert is_open_to_others(os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))) is refused


@pytest.mark.parametrize("line", ["short worker w", "{key} worker", "{key} boss w", "{key} worker w more", "{key}"])
def test_an_invalid_line_of_the_allow_list_is_refused_at_the_start(tmp_path, line):
    path = tmp_path / ALLOW_LIST
    path.write_text("# comment\n\n" + line.format(key="k" * 40))
    with pytest.raises(ConfigError, match="line 3"):
        AllowList(path)


def test_the_allow_list_follows_its_file_and_is_kept_when_the_file_is_broken(keys, monkeypatch):
    monkeypatch.setattr(allow_list, "SETTLE_S", 0)
    listed, worker = AllowList(keys / ALLOW_LIST), load_keys(keys, "worker")
    path = listed.path
    full = path.read_text()
    path.write_text(f"{full}{'k' * 40} monitor watcher # of the team\n")
    assert listed.refresh() == 1 and listed.find("k" * 40).name == "watcher"
    assert listed.refresh() == 1
    for broken in (f"{full}nonsense\n", "", "# nobody\n", full[:-1] + full):
        path.write_text(broken)
        assert listed.refresh() == 1 and listed.find("k" * 40).role == "monitor"
    path.unlink()
    assert listed.refresh() == 1 and listed.find(worker.public).role == "worker"
    path.write_text("\n".join(line for line in full.splitlines() if " worker " not in line))
    assert listed.refresh() == 2 and listed.find(worker.public).role == ""


def test_a_file_that_is_being_written_admits_its_new_keys_and_removes_none(keys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(allow_list.clock, "now", lambda: now)
    listed, worker = AllowList(keys / ALLOW_LIST), load_keys(keys, "worker")
    path = listed.path
    full = path.read_text()
    copied = f"{'k' * 40} monitor watcher\n{full}"
    for size in range(0, len(copied) + 1, 7):
        path.write_text(copied[:size])
        now += 0.9 * allow_list.SETTLE_S
        listed.refresh()
        assert listed.find(worker.public).role == "worker"
    assert listed.find("k" * 40).role == "monitor"
    path.write_text(full.replace(" worker worker", " learner worker"))
    listed.refresh()
    assert listed.find(worker.public).role == "worker" and listed.find("k" * 40).role
    now += allow_list.SETTLE_S
    listed.refresh()
    assert listed.find(worker.public).role == "learner" and not listed.find("k" * 40).role


@pytest.mark.full
def test_a_run_whose_keys_do_not_fit_is_refused_before_anything_starts(keys, config_file, tmp_path, capsys):
    run = ["run", str(config_file), "--security.keys"]
    assert "april keygen" in refusal(capsys, *run, str(tmp_path / "nowhere"))
    listed = (keys / ALLOW_LIST).read_text()
    (keys / ALLOW_LIST).write_text("\n".join(line for line in listed.splitlines() if " learner " not in line))
    assert "learner.key" in refusal(capsys, *run, str(keys))
    (keys / ALLOW_LIST).write_text(listed)
    (keys / "scorer.key").unlink()
    assert "scorer.key" in refusal(capsys, *run, str(keys), "--reward.where", "scorer")
    (keys / "monitor.key").unlink()
    assert "monitor.key" in refusal(capsys, *run, str(keys))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("key", "value"), [("broker.bind", "tcp://0.0.0.0:5555"), ("weights.host", "10.0.0.1")])
def test_a_configuration_that_opens_a_port_without_keys_is_refused(config_file, key, value):
    with pytest.raises(ConfigError, match=rf"'{key}' = .*april keygen"):
        configuration.load(config_file, [f"--{key}", value, "--security.keys", "off"])


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "eth0", "*", "trainer.example"])
def test_a_port_open_to_the_network_needs_keys(keys, config_file, capsys, host):
    bind = ["--broker.bind", f"tcp://{host}:5555"]
    for key, options in (("broker.bind", bind), ("weights.host", ["--weights.host", host])):
        error = refusal(capsys, "run", str(config_file), *options, "--security.keys", "off")
        assert key in error and host in error and "april keygen" in error and "127.0.0.1" in error
        configuration.load(config_file, [*options, "--security.keys", str(keys)])
    made = configuration.load(config_file, [*bind, "--weights.host", host])
    assert made.keys == made.run_dir / RUN_KEYS and not made.keys.exists()


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "ipc"])
def test_peers_of_a_tcp_broker_need_keys_that_are_made_and_a_unix_socket_is_in_a_private_folder(config_file, bind):
    config = configuration.load(config_file, ["--broker.bind", bind])
    server = Server(config)
    server.write_address()
    places = server.address, str(config.run_dir)
    joined = [configuration.with_run_keys(configuration.load(config_file), place) for place in places]
    folder = config.run_dir / RUN_KEYS
    if bind == "ipc":
        assert server.access_control is None and {one.keys for one in joined} == {None} and not folder.exists()
        folder = Path(server.address.removeprefix("ipc://")).parent
    else:
        assert server.access_control and {one.keys for one in joined} == {folder}
        assert load_keys(folder, "worker") and all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    server.close()
    again = Server(config)
    assert again.address == server.address, "peers reconnect to it"
    again.close()
    remove_socket_folder(server.address)


def test_a_part_that_joins_before_the_broker_has_made_its_keys_waits_for_them(config_file, monkeypatch):
    config = configuration.load(config_file, ["--broker.bind", "tcp://127.0.0.1:*"])
    servers = []

    def start_broker(_):
        servers.append(Server(config))
        servers[0].write_address()

    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=time.monotonic, sleep=start_broker))
    joined = configuration.with_run_keys(configuration.load(config_file), str(config.run_dir))
    assert joined.keys == config.run_dir / RUN_KEYS and load_keys(joined.keys, "worker")
    servers[0].close()


@pytest.mark.parametrize("make", [keygen.make_folder_once, keygen.make_secret_once])
@pytest.mark.parametrize("first", [False, True])
def test_what_is_made_once_survives_killed_makers_two_at_once_and_no_hard_links(tmp_path, monkeypatch, make, first):
    """A container's processes have the same ids again; another start may win while this one makes its draft."""
    path = tmp_path / "run" / "made"
    path.parent.mkdir()
    (path.parent / f".made-{os.getpid()}").write_text("left by a killed process")
    held = []

    def no_link(draft, target):
        if first:
            monkeypatch.undo()
            make(path)
            held.append(path.stat().st_ino)
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", no_link)
    make(path)
    assert path.stat().st_ino in held or not first
    assert sorted(entry.name for entry in path.parent.iterdir()) == [f".made-{os.getpid()}", "made"]


def test_no_key_is_left_on_a_file_system_without_modes(tmp_path, monkeypatch):
    monkeypatch.setattr(keygen, "is_open_to_others", lambda file: True)
    for make in (keygen.make_folder_once, keygen.make_secret_once):
        with pytest.raises(ConfigError, match=r"no modes.*'run\.dir'"):
            make(tmp_path / "made")
    assert not any(tmp_path.iterdir())


def test_of_two_folders_of_keys_that_are_renamed_at_once_the_first_stays(tmp_path, monkeypatch):
    rename = Path.rename

    def late(draft, target):
        monkeypatch.undo()
        keygen.make_folder_once(target)
        return rename(draft, target)

    monkeypatch.setattr(Path, "rename", late)
    keygen.make_folder_once(tmp_path / "keys")
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"] and load_keys(tmp_path / "keys", "worker")


def test_a_folder_of_sockets_that_others_have_made_is_not_used(tmp_path):
    theirs = tmp_path / "april-theirs"
    theirs.mkdir()
    theirs.chmod(0o755)
    address = socket_address(f"ipc://{theirs}/broker")
    assert str(theirs) not in address
    remove_socket_folder(address)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "own").mkdir(mode=0o700)
    address = socket_address(f"ipc://{tmp_path}/link/broker")
    assert str(tmp_path) not in address
    remove_socket_folder(address)
    assert socket_address(f"ipc://{tmp_path}/own/broker") == f"ipc://{tmp_path}/own/broker"


def test_a_broker_whose_last_folder_for_temporary_files_is_gone_takes_another(tmp_path):
    address = socket_address(f"ipc://{tmp_path}/job-17/april-own/broker")
    assert str(tmp_path) not in address
    remove_socket_folder(address)


def test_keys_off_says_what_it_opens(config_file, caplog):
    server = Server(configuration.load(config_file, ["--broker.bind", "tcp://127.0.0.1:*", "--security.keys", "off"]))
    server._signal = "SIGTERM"
    server.service.stop("over", "stopped", 0.0)
    server.serve()
    assert server.access_control is None
    assert f"whoever reaches {server.address} can read prompts, hand in tokens" in caplog.text
