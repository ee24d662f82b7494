"""TLS: encrypted connections, clients' certificates, and files that change while the server runs."""

import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from strandline.errors import ConfigError
from strandline.server.config import ServerConfig
from strandline.server.http.tls import RefreshedContext, TlsFiles
from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server


class Authority:
    """An authority that issues the certificates of a server and of its clients."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def write(self, directory: Path) -> TlsFiles:
        """Write a new certificate of a server, its key, and the authority's certificate."""
        issued = self._ca.issue_cert("127.0.0.1", "localhost")
        cert, key, authority = (directory / name for name in ("cert.pem", "key.pem", "ca.pem"))
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        authority.write_bytes(self._ca.cert_pem.bytes())
        return TlsFiles(str(cert), str(key), str(authority), ssl.CERT_REQUIRED)

    def client_context(self, *, issuer: "Authority | None" = None) -> ssl.SSLContext:
        """Return the context of a client that trusts this authority.

        Args:
            issuer: issuer of its own certificate; None: it has none.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._ca.configure_trust(context)
        if issuer is not None:
            issuer._ca.issue_cert("client@example.com").configure_cert(context)
        return context


def can_connect(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = "localhost") -> bool:
    """Return whether a handshake succeeds, and the server reads what the client then writes."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name)
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(4):
            for side in (theirs, ours):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        theirs.write(b"hello")
        return ours.read(5) == b"hello"
    except ssl.SSLError:
        return False


@pytest.fixture
def authority() -> Authority:
    return Authority()


def test_certificate_is_checked_at_clients_and_theirs_at_the_server(authority: Authority, tmp_path: Path) -> None:
    context = authority.write(tmp_path).context()
    assert can_connect(context, authority.client_context(issuer=authority))
    assert not can_connect(context, authority.client_context())
    assert not can_connect(context, authority.client_context(issuer=Authority()))
    assert not can_connect(context, Authority().client_context(issuer=authority))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_changed_files_hold_for_new_connections(authority: Authority, tmp_path: Path, name: str) -> None:
    refreshed = RefreshedContext(authority.write(tmp_path))
    assert can_connect(refreshed.context, authority.client_context(issuer=authority), name)
    other = Authority()
    other.write(tmp_path)
    refreshed.refresh()
    assert can_connect(refreshed.context, other.client_context(issuer=other), name)
    assert not can_connect(refreshed.context, authority.client_context(issuer=authority), name)
    assert not can_connect(refreshed.context, other.client_context(issuer=authority), name)
    assert not can_connect(refreshed.context, other.client_context(), name)


def damage_key(directory: Path) -> None:
    (directory / "key.pem").write_text("no key")


def exchange_key(directory: Path) -> None:
    (directory / "other").mkdir()
    Authority().write(directory / "other")
    os.replace(directory / "other" / "key.pem", directory / "key.pem")


def remove_certificate(directory: Path) -> None:
    (directory / "cert.pem").unlink()


@pytest.mark.parametrize("damage", [damage_key, exchange_key, remove_certificate])
def test_files_that_are_not_valid_together_are_not_used(
    authority: Authority, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    refreshed = RefreshedContext(authority.write(tmp_path))
    client = authority.client_context(issuer=authority)
    damage(tmp_path)
    refreshed.refresh()
    refreshed.refresh()
    assert can_connect(refreshed.context, client)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    authority.write(tmp_path)
    refreshed.refresh()
    assert can_connect(refreshed.context, client)


def test_encrypted_key_is_an_error_and_asks_for_no_password(tmp_path: Path, authority: Authority) -> None:
    files = authority.write(tmp_path)
    key = tmp_path / "key.pem"
    # The headers alone make OpenSSL ask for a password.
    lines = key.read_text().splitlines()
    header = ["Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-256-CBC,00112233445566778899AABBCCDDEEFF", ""]
    key.write_text("\n".join([lines[0], *header, *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match=r"--ssl-certfile, --ssl-keyfile: cannot use .*key.pem.*not encrypted"):
        files.context()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ssl_keyfile": "k"}, "need --ssl-certfile"),
        ({"enable_ssl_refresh": True}, "need --ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "--ssl-cert-reqs must be 0, 1 or 2, got 3"),
    ],
)
def test_flags_that_lack_others_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**flags)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tls_server(bytes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Authority]]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority()
    files = authority.write(directory)
    flags = ["--ssl-certfile", files.certfile, "--ssl-keyfile", str(files.keyfile), "--ssl-ca-certs"]
    flags += [str(files.ca_certs), "--ssl-cert-reqs", "2", "--enable-ssl-refresh"]
    with running_server(bytes_dir, directory / "log", *flags) as server:
        yield server, authority


def test_server_streams_over_mutual_tls(tls_server: tuple[ServerProcess, Authority]) -> None:
    server, authority = tls_server
    assert server.url.startswith("https://127.0.0.1:")
    body = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True}
    with httpx.Client(verify=authority.client_context(issuer=authority), timeout=TIMEOUT_S) as client:
        answer = client.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


def test_client_without_certificate_gets_no_answer(tls_server: tuple[ServerProcess, Authority]) -> None:
    server, authority = tls_server
    with (
        httpx.Client(verify=authority.client_context(), timeout=TIMEOUT_S) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get(f"{server.url}/health")
    with httpx.Client(verify=authority.client_context(issuer=authority), timeout=TIMEOUT_S) as client:
        assert client.get(f"{server.url}/health").status_code == 200
