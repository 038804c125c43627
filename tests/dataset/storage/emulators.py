"""Stores of others on loopback: each knows one protocol as its clients in the field meet it."""

import base64
import hashlib
import hmac
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import pytest
from loaders.installing import FOLDER
from moto.server import ThreadedMotoServer
from ports import free_addresses
from stores import AWS, ask

from dataserver.dataset.storage.urls import Url

AZURITE: Final = "azurite@3.37.0"
AZURITE_FOLDER: Final = FOLDER.parent / "azurite"
AZURE_ACCOUNT: Final = "devstoreaccount1"
AZURE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every emulator of Azure, as its documentation says."""
AZURE_VERSION: Final = "2021-08-06"
CONTENT_TYPE: Final = "application/octet-stream"
Environment = Mapping[str, str]


class Emulated(NamedTuple):
    """An empty bucket."""

    url: Url
    environment: Environment
    """What names its server, and gives credentials."""
    upload: Callable[[str, bytes], None] | None = None
    """Puts an object under a key, where the server does not take it from the clients of its users."""


@contextmanager
def moto(_: pytest.FixtureRequest) -> Iterator[Emulated]:
    """In the S3 of moto."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
        ask(f"{address}/{path}", method)
    yield Emulated(Url("s3://bucket"), {**AWS, "AWS_ENDPOINT_URL": address})
    server.stop()


@contextmanager
def azurite(request: pytest.FixtureRequest) -> Iterator[Emulated]:
    """In Azurite; a container."""
    program = AZURITE_FOLDER / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists() and request.config.getoption("--install") and shutil.which("npm"):
        line = ["npm", "install", "--prefix", AZURITE_FOLDER, "--no-audit", "--no-fund", "--ignore-scripts", AZURITE]
        subprocess.run(line, check=True, capture_output=True, timeout=300)
    if not program.exists():
        pytest.skip("azurite is not installed; --install does, with npm")
    (address,) = free_addresses(1)
    host, port = address.split(":")
    url = f"http://{address}"
    with _running(program, "--blobHost", host, "--blobPort", port, "--inMemoryPersistence", "--silent"):
        target = f"{AZURE_ACCOUNT}/bucket"
        ask(
            f"{url}/{target}?restype=container", "PUT", headers=_signed(f"/{AZURE_ACCOUNT}/{target}\nrestype:container")
        )
        environment = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}
        yield Emulated(Url(f"az://{AZURE_ACCOUNT}/bucket"), environment)


@contextmanager
def fake_gcs(request: pytest.FixtureRequest) -> Iterator[Emulated]:
    """In fake-gcs-server, which takes no PUT that is not signed by the key of a service account."""
    python_with: Callable[[str], Path] = request.getfixturevalue("python_with")
    (program,) = python_with("fake-gcs").parents[1].rglob("fake-gcs-server-linux-amd64")
    program.chmod(0o755)
    (address,) = free_addresses(1)
    host, port = address.split(":")
    url = f"http://{address}"
    flags = ["-scheme", "http", "-host", host, "-port", port, "-backend", "memory", "-external-url", url]
    with _running(program, *flags, "-public-host", address):
        json = {"Content-Type": "application/json"}
        ask(f"{url}/storage/v1/b?project=test", "POST", b'{"name": "bucket"}', json)

        def upload(key: str, data: bytes) -> None:
            ask(f"{url}/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(key, safe='')}", "POST", data)

        yield Emulated(Url("gs://bucket"), {"GOOGLE_BASE_URL": url, "GOOGLE_BEARER_TOKEN": "any"}, upload)


def _signed(resource: str) -> Environment:
    """Headers of a PUT without a body, signed with the key of the account."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": AZURE_VERSION}
    signed = "".join(f"{header}:{value}\n" for header, value in headers.items())
    text = f"PUT\n\n\n\n\n{CONTENT_TYPE}\n\n\n\n\n\n\n{signed}{resource}"
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    authorization = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    return {**headers, "Content-Type": CONTENT_TYPE, "Content-Length": "0", "Authorization": authorization}


@contextmanager
def _running(*command: str | Path) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()
