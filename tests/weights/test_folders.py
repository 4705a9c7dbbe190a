"""What ranks write into `weights.folder` is what workers read, bit by bit, or it is not used. Over a folder, an object
store and memory."""

import shutil
import threading
import time

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from april.broker.ledger.transitions import OFFERED_FOLDERS
from april.config import Config
from april.config.stored import CHECKSUMS_FILE
from april.learner.snapshot_writing import MOST_BYTES, model_files
from april.util import clock
from april.util.objects import ObjectStore, StoreError
from april.weights import folders as folders_module
from april.weights.folders import CANARY_FILE, INDEX_FILE, KEPT, SnapshotFolders, name_of
from april.weights.puller import SnapshotPuller
from april.weights.snapshot import ReusedBuffers, SnapshotError, pack
from april.wire.message import Version
from tests.support.harmed_files import CANARY, HARMS, PATIENCE_S, flip
from tests.support.run_processes import wait_until


def weights(step):
    """What each of two ranks holds of the weights of a step."""
    generator = torch.Generator().manual_seed(step)
    first = {
        "odd.weight": torch.randn(3, 5, generator=generator).bfloat16(),
        "wide.weight": torch.randn(300, 7, generator=generator),
        "empty.weight": torch.zeros(0, 4),
    }
    return first, {"norm.weight": torch.randn(11, generator=generator), "bias": torch.tensor(2.5)}


def write(folders, version, canary=CANARY, others=None):
    files = [
        file
        for rank, part in enumerate(weights(version.step))
        for file in folders.write_part(pack(version, part), rank)
    ]
    return folders.complete(version, files, canary, others or {})


def same(found, step):
    expected = {name: tensor for part in weights(step) for name, tensor in part.items()}
    assert found.keys() == expected.keys()
    return all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in expected.items())


def test_what_is_read_is_what_was_written(objects, monkeypatch):
    monkeypatch.setattr(folders_module, "FILE_BYTES", 2000)
    folders = SnapshotFolders(objects)
    written = write(folders, Version(1, 7))
    found = folders.read(written, ReusedBuffers(), PATIENCE_S)
    assert same(found.tensors, 7) and found.canary == CANARY
    files = {name for name in objects.names() if name.endswith(".safetensors")}
    assert len(files) == 4, "the wide tensor has a file of its own"


@pytest.fixture
def folders(tmp_path):
    return SnapshotFolders(ObjectStore(str(tmp_path / "weights"), delays_s=()))


def test_transformers_loads_a_snapshot_as_it_is(folders, policy_folder, tmp_path):
    model, version = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32), Version(0, 3)
    state = {name: tensor + 0.5 for name, tensor in load_file(policy_folder / "model.safetensors").items()}
    names = sorted(state)
    parts = [{name: state[name] for name in names[rank::2]} for rank in range(2)]
    files = [file for rank, part in enumerate(parts) for file in folders.write_part(pack(version, part), rank)]
    folders.complete(version, files, CANARY, model_files(policy_folder))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / name_of(version), dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in found.state_dict().items())


def test_a_snapshot_has_no_foreign_or_large_file_of_the_model_s_folder(tmp_path):
    taken = {"config.json", "tokenizer.json", "chat_template.jinja", "modeling_own.py"}
    others = {CANARY_FILE, CHECKSUMS_FILE, ".DS_Store", "tf_model.h5", "model.onnx", "rust_model.ot", "model.gguf"}
    for name in taken | others | {"video.mp4"}:
        (tmp_path / name).write_bytes(b"x" * (MOST_BYTES + 1 if name in ("tokenizer.json", "video.mp4") else 1))
    assert model_files(tmp_path).keys() == taken


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["model-0000-0000.safetensors", "model-0001-0000.safetensors", CANARY_FILE,
                                  CHECKSUMS_FILE])  # fmt: skip
def test_a_damaged_file_is_refused(folders, tmp_path, name, harm):
    written = write(folders, Version(0, 1))
    HARMS[harm](tmp_path / "weights" / name_of(written.version) / name)
    with pytest.raises((SnapshotError, StoreError), match=name):
        folders.read(written, ReusedBuffers(), PATIENCE_S)


def test_no_file_is_being_read_any_more_once_a_snapshot_has_been_given_up(folders, tmp_path, monkeypatch):
    written = write(folders, Version(0, 1))
    (tmp_path / "weights" / name_of(written.version) / "model-0000-0000.safetensors").unlink()
    failed, ended, read_file = threading.Event(), [], SnapshotFolders._read_file

    def read(self, folder, name, *others):
        if "model-0001" in name:
            failed.wait(PATIENCE_S)
            time.sleep(0.2)  # the other file is still being read when the first has failed
        try:
            return read_file(self, folder, name, *others)
        finally:
            failed.set()
            ended.append(name)

    monkeypatch.setattr(SnapshotFolders, "_read_file", read)
    with pytest.raises(StoreError, match="model-0000"):
        folders.read(written, ReusedBuffers(), PATIENCE_S)
    assert len(ended) == 2


def test_a_consistent_forgery_is_refused(folders, tmp_path):
    """Whoever can write the folder can write another list of checksums, and not the checksum of the list."""
    written, other = write(folders, Version(0, 1)), write(folders, Version(0, 2))
    target = tmp_path / "weights" / name_of(written.version)
    shutil.rmtree(target)
    shutil.copytree(tmp_path / "weights" / name_of(other.version), target)
    with pytest.raises(SnapshotError, match=CHECKSUMS_FILE):
        folders.read(written, ReusedBuffers(), PATIENCE_S)


def test_a_snapshot_that_is_read_too_slowly_is_given_up(folders):
    with pytest.raises(StoreError, match=r"weights\.transfer_deadline_s"):
        folders.read(write(folders, Version(0, 1)), ReusedBuffers(), timeout_s=0.0)


@pytest.fixture
def puller(folders, monkeypatch):
    monkeypatch.setattr("april.weights.puller.RETRY_S", 0.1)
    puller = SnapshotPuller(folders, PATIENCE_S)
    yield puller
    puller.close()


def taken(puller):
    wait_until(lambda: puller.has_staged)
    return puller.take()


def test_a_worker_uses_the_snapshot_before_a_damaged_one_until_that_is_whole(puller, folders, tmp_path):
    before, newest = write(folders, Version(0, 1)), write(folders, Version(0, 2))
    harmed = tmp_path / "weights" / name_of(newest.version) / "model-0001-0000.safetensors"
    whole = harmed.read_bytes()
    flip(harmed)
    puller.offer([newest, before])
    staged = taken(puller)
    assert staged.version == before.version and same(staged.tensors, 1) and staged.canary == CANARY
    version, why = puller.refused.get(timeout=PATIENCE_S)
    assert version == newest.version and harmed.name in why
    harmed.write_bytes(whole)
    staged = taken(puller)
    assert staged.version == newest.version and same(staged.tensors, 2)


def test_an_engine_gets_lost_and_refused_weights_again_and_no_others_twice(puller, folders):
    first, second = write(folders, Version(0, 1)), write(folders, Version(0, 2))
    puller.offer([first])
    puller.loaded(taken(puller).version)
    puller.offer([second, first])
    assert taken(puller).version == second.version
    puller.refuse("not these", wrong=True)
    assert puller.refused.get(timeout=PATIENCE_S) == (second.version, "not these")
    puller.loaded(taken(puller).version)
    puller.offer([second, first])
    puller.forget()
    assert taken(puller).version == second.version and not puller.has_staged


def test_a_refusal_is_of_the_version_that_the_engine_was_given(puller, folders):
    first, second = write(folders, Version(0, 1)), write(folders, Version(0, 2))
    puller.offer([first])
    taken(puller)
    puller.offer([second, first])
    wait_until(lambda: puller.has_staged)
    puller.refuse("not these")
    assert puller.refused.get(timeout=PATIENCE_S) == (first.version, "not these")
    assert taken(puller).version == second.version


def test_nothing_is_read_for_an_engine_that_is_down(folders):
    up = [False]
    puller = SnapshotPuller(folders, PATIENCE_S, lambda: up[0])
    puller.offer([write(folders, Version(0, 1))])
    up[0] = True
    assert taken(puller).version == Version(0, 1)
    puller.close()


def test_old_snapshots_are_removed_once_nobody_can_be_reading_them(folders, monkeypatch):
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    folders.write_part(pack(Version(0, 0), weights(0)[0]), 0)  # the learner was killed here
    versions = [Version(0, 1), Version(0, 2), Version(1, 2), Version(1, 3)]
    for version in versions:
        write(folders, version)
    folders.prune(versions[-2:], reading_s=30.0)
    assert {name.partition("/")[0] for name in folders.objects.names()} == {
        name_of(version) for version in [Version(0, 0), *versions]
    }
    now += 31.0
    write(folders, Version(1, 4))
    folders.prune([versions[-1], Version(1, 4)], reading_s=30.0)
    kept = [Version(1, 2), *versions[-1:], Version(1, 4)]  # the first of them has just been superseded
    assert {name.partition("/")[0] for name in folders.objects.names()} == set(map(name_of, kept))
    assert INDEX_FILE in {name.rpartition("/")[2] for name in folders.objects.names()} and KEPT == OFFERED_FOLDERS


def test_a_run_keeps_the_snapshots_that_it_has_told_of_beside_those_of_an_earlier_run(folders):
    for earlier_or_untold in (Version(5, 90), Version(5, 91), Version(0, 3)):
        write(folders, earlier_or_untold)
    told = [Version(0, 1), Version(0, 2)]
    for version in told:
        write(folders, version)
    folders.prune(told, reading_s=0.0)
    assert {name.partition("/")[0] for name in folders.objects.names()} == set(map(name_of, told))


class SilentFiles(LocalFileSystem):
    """A file system that never answers how large a file is."""

    def size(self, path):
        threading.Event().wait()


def test_a_read_that_stalls_is_given_up(folders, policy_folder, monkeypatch):
    written = write(folders, Version(0, 1))
    reading = SnapshotFolders.to_read(config_of(policy_folder, "weights", "run", transfer_deadline_s=0.2))
    reading.objects.url = folders.objects.url
    monkeypatch.setattr("april.util.objects.connect", lambda url: SilentFiles())
    with pytest.raises(StoreError, match="no answer"):
        reading.read(written, ReusedBuffers(), PATIENCE_S)


@pytest.mark.parametrize("folder", ["auto", "weights", "memory://bucket/weights"])
def test_each_run_has_a_place_of_its_own(folder, policy_folder):
    urls = {SnapshotFolders.of(config_of(policy_folder, folder, name)).objects.url for name in ("one", "two")}
    assert len(urls) == 2


def config_of(policy_folder, folder, name, **keys):
    sections = {"model": {"path": policy_folder}, "data": {"path": policy_folder}, "run": {"name": name}}
    return Config.model_validate(sections | {"weights": {"transport": "pull", "folder": folder} | keys})
