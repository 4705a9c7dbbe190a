"""Object stores for tests: a folder, this process's memory and, if s3fs is installed, an S3 server."""

import re
import sys
import time
import uuid
from contextlib import contextmanager
from importlib.util import find_spec
from subprocess import Popen

from april.util.lifetime import end_with_parent

KINDS = ["file", "memory", *(["s3"] if find_spec("s3fs") and find_spec("moto") else [])]
BUCKET = "checkpoints"
SECRET = "not-to-be-seen-anywhere"


@contextmanager
def s3_server(log):
    """The address of an S3 server on loopback."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as file, Popen(command, stdout=file, stderr=file, preexec_fn=end_with_parent) as server:
        try:
            while not (found := re.search(r"Running on (http://[\d.:]+)", log.read_text())):
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            server.kill()


def new_bucket(server, monkeypatch):
    """Set the environment variables of S3 clients; returns a URL in a new bucket of the server at this address."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
