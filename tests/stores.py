"""Object stores for tests: a folder, this process's memory and, if s3fs is installed, an S3 server."""

import re
import sys
import time
import uuid
from importlib.util import find_spec
from subprocess import Popen

import pytest

from april.util.lifetime import end_with_parent
from april.util.objects import ObjectStore

KINDS = ["file", "memory", *(["s3"] if find_spec("s3fs") and find_spec("moto") else [])]
BUCKET = "checkpoints"
SECRET = "not-to-be-seen-anywhere"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """The address of an S3 server on loopback."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as file, Popen(command, stdout=file, stderr=file, preexec_fn=end_with_parent) as server:
        try:
            while not (found := re.search(r"Running on (http://[\d.:]+)", log.read_text())):
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            server.kill()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """Sets the environment variables of S3 clients; a URL in a new bucket."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=KINDS)
def store_url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"file://{tmp_path}/the store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def objects(store_url):
    return ObjectStore(store_url, timeout_s=60)
