"""An S3-compatible server in this process: moto's."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "strandline-tests"


@contextmanager
def object_server() -> Iterator[str]:
    """Run a server with a bucket; yield its URL."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("obstore")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with _client(url) as client:
        client.create_bucket(Bucket=BUCKET)
    try:
        yield url
    finally:
        server.stop()


@contextmanager
def _client(url: str) -> Iterator[Any]:
    """Connect to a server by AWS's own library."""
    keys = {"aws_access_key_id": "id", "aws_secret_access_key": "secret"}
    client = pytest.importorskip("boto3").client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    try:
        yield client
    finally:
        client.close()


def delete_objects(store_url: str, *, keeps: int = 0) -> int:
    """Delete what an object store holds, as a bucket's rules would; return how many objects that were.

    Args:
        keeps: number deleted after each that is kept; 0: all are deleted.
    """
    with _client(os.environ["AWS_ENDPOINT_URL"]) as client:
        listed = client.list_objects_v2(Bucket=BUCKET, Prefix=store_url.rsplit("/", 1)[1]).get("Contents", ())
        for each in [each for index, each in enumerate(listed) if not keeps or index % (keeps + 1)]:
            client.delete_object(Bucket=BUCKET, Key=each["Key"])
    return len(listed)


def environment(url: str, certificates: Path) -> dict[str, str]:
    """Return what leads clients to a server.

    Args:
        certificates: a file with one at least: without any, the client does not start, also where it needs none.
    """
    return {
        "SSL_CERT_FILE": str(certificates),
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
