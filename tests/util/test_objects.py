"""An object store keeps files complete; each call ends in time, and errors name the URL."""

import re
import subprocess
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from april.util.objects import ObjectStore, StoreError, StoreLacks, StoreRefused
from tests.support.object_stores import KINDS

ROOT = Path(__file__).parents[2]
SECRET = "a-secret-of-the-environment"


class Shaky(MemoryFileSystem):
    """A file system that raises or calls the next entry of `faults` before each operation."""

    protocol = "shaky"
    faults: list = []  # noqa: RUF012

    def _fault(self, callback=None):
        fault = self.faults.pop(0) if self.faults else None
        if callable(fault):
            fault(callback)
        elif fault:
            raise fault

    def put_file(self, lpath, rpath, callback=None, **options):
        self._fault(callback)
        return super().put_file(lpath, rpath, callback=callback, **options)

    def cat_file(self, path, **options):
        self._fault()
        return super().cat_file(path, **options)


@pytest.fixture
def shaky():
    fsspec.register_implementation("shaky", Shaky, clobber=True)

    def store(*faults, timeout_s=30.0):
        Shaky.faults = list(faults)
        return ObjectStore("shaky://bucket/run", timeout_s, delays_s=(0.0, 0.0))

    return store


def test_a_store_has_what_it_was_given_and_nothing_that_was_removed(objects, tmp_path):
    assert objects.names() == set()
    objects.probe()
    (tmp_path / "file").write_bytes(bytes(range(256)) * 9000)
    for name in ("step/a", "step/b", "other/a"):
        objects.put(tmp_path / "file", name)
    objects.write("step/list", b"of files")
    assert objects.names() == {"step/a", "step/b", "other/a", "step/list"}, "the probe has left nothing"
    objects.fetch("step/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    assert objects.read("step/list") == b"of files"
    objects.write("step/list", b"anew")
    assert objects.read("step/list") == b"anew"
    for _ in range(2):
        objects.remove_file("step/list")
        objects.remove("step", {"a", "b"})
    assert objects.names() == {"other/a"} and objects.retries == 0
    for ask in (lambda: objects.read("step/a"), lambda: objects.fetch("step/a", tmp_path / "none")):
        with pytest.raises(StoreLacks, match=re.escape(f"{objects.url}/step/a cannot be read")):
            ask()
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "copy", "the store"}, "no half of a file is left"


@pytest.mark.store
@pytest.mark.timeout(1200)
def test_an_s3_store_passes_the_same_tests():
    """Run those with an S3 store where its server is installed; this test, which has the mark, is not among them."""
    python = ROOT / ".venv-store/bin/python"
    tests = [__file__, str(ROOT / "tests/learner/test_checkpoint_store.py")]
    command = [python, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "-m", "not store", "-k", "s3", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_a_store_has_what_it_was_given_and_nothing_that_was_removed[s3] PASSED" in done.stdout
    assert "test_training_resumes_bitwise_after_all_disks_are_lost[s3] PASSED" in done.stdout


def test_temporary_errors_are_retried_and_counted(shaky, caplog):
    store = shaky(ConnectionError("reset"), OSError(5, "slow down"))
    store.write("name", b"data")
    assert store.read("name") == b"data" and store.retries == 2
    assert "shaky://bucket/run/name cannot be read: reset; tried again" in caplog.text
    with pytest.raises(StoreError, match=r"run/name .*read: gone"):
        Shaky.faults = [ConnectionError("gone")] * 3
        store.read("name")


@pytest.mark.parametrize("error", [PermissionError("not yours"), FileNotFoundError("no bucket"), ValueError("no name")])
def test_permanent_errors_are_not_retried(shaky, error):
    store = shaky(error)
    with pytest.raises(StoreRefused, match=f"shaky://bucket/run/name .*read: {error}"):
        store.read("name")
    assert store.retries == 0 and Shaky.faults == []


@pytest.mark.full
def test_a_call_without_progress_is_retried_and_a_slow_one_with_progress_is_waited_for(shaky, tmp_path):
    (tmp_path / "file").write_bytes(b"data")
    silence = threading.Event()

    def moves(callback):
        for _ in range(8):
            callback.relative_update(1)
            silence.wait(0.2)

    store = shaky(moves, timeout_s=0.8)
    store.put(tmp_path / "file", "name")
    assert store.retries == 0
    Shaky.faults = [lambda callback: silence.wait(60)]
    store.put(tmp_path / "file", "name")
    assert store.retries == 1 and store.read("name") == b"data"
    Shaky.faults = [lambda callback: silence.wait(60)] * 3
    with pytest.raises(StoreError, match=r"within 0\.8 s"):
        store.put(tmp_path / "file", "name")
    silence.set()


def test_errors_contain_no_secrets(shaky, monkeypatch, caplog):
    monkeypatch.setenv("SOME_SECRET_KEY", SECRET)
    store = shaky(ConnectionError(f"https://me:{SECRET[:6]}x@host/x?sig=abcdef failed for {SECRET}"))
    store.delays_s = ()
    with pytest.raises(StoreError) as caught:
        store.read("name")
    texts = f"{caught.value}{caplog.text}"
    assert not any(word in texts for word in (SECRET, "sig=", f"{SECRET[:6]}x", "me:"))
    assert "https://…@host/x?… failed for …" in texts


@pytest.mark.parametrize(
    "url, said",
    [
        ("nothing://bucket/run", "Protocol not known: nothing"),
        ("absent://bucket/run", "Install absentfs"),
        ("file:///proc/run", "cannot be written"),
    ],
)
def test_an_unusable_store_gives_the_reason_at_the_first_call(url, said, monkeypatch):
    lacking = {"class": "absentfs.AbsentFileSystem", "err": "Install absentfs"}
    monkeypatch.setitem(known_implementations, "absent", lacking)
    with pytest.raises(StoreError, match=said) as caught:
        ObjectStore(url).tried_once().probe()
    assert str(caught.value).startswith(f"{url}/")


if "s3" in KINDS:

    def test_what_s3_refuses_is_said_in_one_sentence(s3, monkeypatch):
        with pytest.raises(StoreLacks, match=r"s3://missing/run/"):
            ObjectStore("s3://missing/run").tried_once().probe()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StoreError, match="endpoint URL"):
            ObjectStore(s3).tried_once().probe()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(StoreRefused, match="credentials"):
            ObjectStore(s3).tried_once().probe()
