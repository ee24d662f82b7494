"""What requests may name as a picture, and what is fetched or read for it."""

import base64
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from strandline.errors import RequestError
from strandline.pictures import fetching, references
from strandline.pictures.fetching import is_public
from strandline.pictures.references import MediaAccess
from tests.cpu.pictures.files import encoded, noise

FILE = encoded(noise(40, 30))
DATA_URL = "data:image/png;base64," + base64.b64encode(FILE).decode()


is_over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Serves a picture, redirects to it, or misbehaves."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        status = {"/moved": 302, "/missing": 404}.get(self.path, 200)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/picture.png")
        self.end_headers()
        if self.path == "/slow":
            self.wfile.write(b"a beginning")
            is_over.wait()
        elif status == 200:
            with suppress(ConnectionError):
                self.wfile.write(FILE * (10**4 if self.path == "/huge" else 1))

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        is_over.set()
        server.shutdown()
        thread.join()


def test_data_url_is_read_whatever_its_media_type_says() -> None:
    for url in (DATA_URL, DATA_URL.replace("image/png", "text/plain"), DATA_URL.replace("data:", "DATA:")):
        assert MediaAccess().read(url) == FILE


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png,abc", "must be in base64"),
        ("data:image/png;base64,a*b", "not base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64", "must be in base64"),
        ("ftp://example.com/x.png", "must be a data: URL"),
        ("iVBORw0KGgo=", "must be a data: URL"),
        ("", "must be a data: URL"),
        ("http://example.com/x.png", "not fetched from 'example.com'.*--allowed-media-domains"),
        ("http://[::1/x.png", "malformed"),
        ("http://user:key@example.com/x.png", "no user name or password"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ],
)
def test_other_references_are_refused_by_default(url: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        MediaAccess().read(url)


def test_too_much_data_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(references, "MAX_FILE_BYTES", 1000)
    (tmp_path / "picture.png").write_bytes(FILE)
    for access, url in (
        (MediaAccess(), "data:;base64," + base64.b64encode(bytes(10_000)).decode()),
        (MediaAccess(), "data:;base64," + base64.b64encode(bytes(1001)).decode()),
        (MediaAccess(directory=str(tmp_path)), f"file://{tmp_path}/picture.png"),
    ):
        with pytest.raises(RequestError, match="at most 1,000 bytes"):
            access.read(url)


def test_picture_is_fetched_from_an_allowed_host(site: str) -> None:
    access = MediaAccess(["127.0.0.1"])
    assert access.read(f"{site}/picture.png?size=1") == FILE
    assert Handler.paths[-1] == "/picture.png?size=1"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/moved", "status 302: redirects are not followed"),
        ("/missing", "status 404"),
        ("/huge", "more than 33,554,432 bytes"),
        ("/a b", "spaces"),
        ("/\r\nX: y", "spaces|malformed"),
    ],
)
def test_fetch_that_goes_wrong_is_refused(site: str, path: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        MediaAccess(["127.0.0.1"]).read(site + path)


def test_host_that_sends_too_slowly_is_given_up(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 0.1)
    monkeypatch.setattr(fetching, "CONNECT_S", 60)
    with pytest.raises(RequestError, match=r"it took more than 0\.1 s"):
        MediaAccess(["127.0.0.1"]).read(site + "/slow")


def test_name_of_a_private_address_is_refused(site: str) -> None:
    url = site.replace("127.0.0.1", "localhost")
    num_requests = len(Handler.paths)
    with pytest.raises(RequestError, match="'localhost' is at a private address"):
        MediaAccess(["localhost", "127.0.0.1"]).read(url)
    assert len(Handler.paths) == num_requests


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::10.0.0.1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_private_addresses_are_known_in_every_form(address: str, expected: bool) -> None:
    assert is_public(address) == expected


def test_file_is_read_below_the_allowed_directory_alone(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a picture.png").write_bytes(FILE)
    (tmp_path / "secret.png").write_bytes(FILE)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    access = MediaAccess(directory=str(inside))
    assert access.read(f"file://{inside}/a%20picture.png") == FILE
    assert access.read(f"file://localhost{inside}/a%20picture.png") == FILE
    (inside / "loop").symlink_to("loop")
    os.mkfifo(inside / "pipe")
    for path in ("../secret.png", "%2e%2e/secret.png", "link.png", "missing.png", "", "x\0y", "loop", "pipe", "\ud800"):
        with pytest.raises(RequestError, match="no such file below"):
            access.read(f"file://{inside}/{path}")
    with pytest.raises(RequestError, match="no such file below"):
        access.read(f"file://example.com{inside}/a%20picture.png")
