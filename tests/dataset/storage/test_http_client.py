"""What the HTTP client takes for an answer, against a socket that says what a test wants."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.storage import http_client
from dataserver.dataset.storage.client_interface import ObjectInfo, UnavailableError
from dataserver.dataset.storage.http_client import HttpClient
from dataserver.dataset.storage.hub_client import HubClient


@contextmanager
def answering(*answers: bytes, pause_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Give each connection the next answer; yields the address and the request lines as they come."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    asked.append(connection.recv(1 << 16).decode().partition("\r\n")[0])
                    try:
                        for start in range(0, len(answer), 1 if pause_s else len(answer)):
                            connection.sendall(answer[start : start + 1] if pause_s else answer)
                            time.sleep(pause_s)
                    except OSError:
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/", asked


def said(status: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *headers, "", ""]).encode() + body


def part(etag: str, body: bytes = b"ab") -> bytes:
    return said("206 Partial", f"ETag: {etag}", "Content-Length: 2", "Content-Range: bytes 0-1/2", body=body)


def test_an_object_without_a_version_is_refused() -> None:
    with (
        answering(said("200 OK", "Content-Length: 2")) as (base, _),
        pytest.raises(OSError, match="neither ETag nor Last-Modified"),
    ):
        HttpClient(base).head("a")


@pytest.mark.parametrize("target", ["http://[bad/", "http://HOST:abc/", "http://HOST/a b", "/\xe9"])
def test_a_redirect_that_is_no_url_is_named(target: str) -> None:
    answer = said("302 Found", "Location: TARGET", "Content-Length: 0").replace(b"TARGET", target.encode("latin-1"))
    with answering(answer) as (base, _), pytest.raises(OSError, match=r"redirects to .* which is no URL"):
        HttpClient(base).head("a")


def test_a_redirect_to_another_port_is_refused() -> None:
    with (
        answering(said("302 Found", "Location: http://127.0.0.1:22/", "Content-Length: 0")) as (base, _),
        pytest.raises(PermissionError, match=r"DISTTRAIN_REDIRECT_HOSTS=127\.0\.0\.1:22"),
    ):
        HttpClient(base).head("a")


@pytest.mark.parametrize("base", ["http://[bad/", "http://HOST:abc/"])
def test_a_server_without_a_port_is_refused(base: str) -> None:
    with pytest.raises(DatasetError, match="correct the URL"):
        HttpClient(base)


@pytest.mark.parametrize("refusal", ["412 No", "416 No", "403 No", "206 Partial"])
def test_a_redirect_that_leads_to_another_version_is_asked_for_again(refusal: str) -> None:
    old = part('"old"') if refusal.startswith("206") else said(refusal, "Content-Length: 0")
    redirect = said("302 Found", "Location: /there", "Content-Length: 0")
    with answering(redirect, part('"new"'), old, part('"new"')) as (base, asked):
        client = HttpClient(base)
        wanted = ObjectInfo("a", 2, '"new"', 0)
        assert [client.get(wanted, 0, 2) for _ in range(2)] == [b"ab", b"ab"]
    assert [line.split()[1] for line in asked] == ["/a", "/there", "/there", "/a"]


def test_an_answer_that_is_an_error_is_never_the_object() -> None:
    answer = said("400 Bad Request", 'ETag: "v"', "Content-Length: 2", body=b"no")
    with answering(answer) as (base, _), pytest.raises(OSError, match="/a answers 400"):
        HttpClient(base).get(ObjectInfo("a", 2, '"v"', 0), 0, 2)


def test_repeated_headers_are_one_list() -> None:
    with answering(said("200 OK", 'Link: <x>; rel="next"', 'Link: <y>; rel="last"', "Content-Length: 0")) as (base, _):
        assert HttpClient(base).ask("GET", f"{base}a", 0).headers["link"] == '<x>; rel="next", <y>; rel="last"'


def test_headers_that_drip_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "BASE_S", 0.2)
    with (
        answering(said("200 OK", *["X: y"] * 90, "Content-Length: 0"), pause_s=0.01) as (base, _),
        pytest.raises(UnavailableError, match="too slowly"),
    ):
        HttpClient(base).ask("GET", f"{base}a", 0)


def test_the_hub_names_the_version_in_any_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = said("307 Moved", "Location: /renamed", "Content-Length: 0", 'ETag: "page"')
    linked = said("302 Found", "Location: /cdn", "Content-Length: 0", 'X-Linked-ETag: "sha"', "X-Linked-Size: 7")
    with answering(moved, linked, said("200 OK", "Content-Length: 7", 'ETag: "cdn"')) as (base, _):
        monkeypatch.setenv("HF_ENDPOINT", base)
        client = HubClient("datasets/ORG/NAME")
        client._commit = "c0ffee"
        assert client.head("a") == ObjectInfo("a", 7, "sha", 0)


def test_a_file_of_the_hub_without_a_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(said("200 OK", "Content-Length: 7")) as (base, _):
        monkeypatch.setenv("HF_ENDPOINT", base)
        client = HubClient("datasets/ORG/NAME")
        client._commit = "c0ffee"
        with pytest.raises(OSError, match="no ETag"):
            client.head("a")
