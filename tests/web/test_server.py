"""The server of the pages: whom it lets in, and what it sends."""

import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cli.server_process import command, refused
from web.harness import get, password

from dataserver.addresses import split_address
from dataserver.security import Watched, load_tokens, server_context
from dataserver.web.assets import load_assets
from dataserver.web.server import Query, RequestError, WebServer
from dataserver.web.visitors import TokenDoor

TOKEN = "t" * 32
SCRIPTS = re.compile(r"<script(?![^>]* src=)|<style|\son\w+=|javascript:|style=|https?://(?!www\.w3\.org)")


def echo(query: Query) -> Any:
    if "bad" in query:
        raise RequestError("bad is not a field")
    if "broken" in query:
        raise KeyError("a defect")
    if "nan" in query:
        return float("nan")
    return dict(query)


@contextmanager
def serving(host: str = "127.0.0.1", **options: Any) -> Iterator[WebServer]:
    server = WebServer(host, 0, {"/api/echo": echo}, **options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as server:
        yield server.address


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/echo", "/nothing-here", "/api/echo?bad=1"])
def test_every_answer_forbids_scripts_frames_and_strangers(address: str, path: str) -> None:
    headers = get(address, path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_pages_hold_no_inline_script_and_fetch_nothing_from_elsewhere(address: str) -> None:
    page = get(address, "/").body.decode()
    assert not SCRIPTS.findall(page)
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(named) >= 4
    for name in named:
        found = get(address, f"/{name}")
        assert found.status == 200, name
    scripts = [name for name in load_assets() if name.endswith(".js") and not name.startswith("/uPlot")]
    assert len(scripts) >= 7
    for name in scripts:
        text = get(address, name).body.decode()
        for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert markup not in text, f"{name}: {markup}"
    assert get(address, "/uPlot.LICENSE").body.startswith(b"The MIT License")


@pytest.mark.parametrize(
    "path",
    [
        *("/../server.py", "/%2e%2e/server.py", "/static/app.js", "//etc/passwd", "/app.js/..", "/\\..\\server.py"),
        *("/api/echo/", "/__init__.py", "*"),
    ],
)
def test_a_path_is_a_name_in_a_table_and_no_file(address: str, path: str) -> None:
    assert get(address, path).status == 404


def test_fields_come_as_they_are_and_wrong_ones_are_refused_in_words(address: str) -> None:
    assert get(address, "/api/echo?a=%3Cb%3E&c=").json() == {"a": "<b>", "c": ""}
    for query, status in [
        ("a=1&a=2", 400), ("a=%ff", 400), ("x=" + "y" * 9000, 400), ("&".join(f"f{n}=1" for n in range(40)), 400),
        ("bad=1", 400), ("broken=1", 500), ("nan=1", 500),
    ]:  # fmt: skip
        found = get(address, f"/api/echo?{query}")
        assert (found.status, list(found.json())) == (status, ["error"]), query
        assert "Traceback" not in found.body.decode()
        assert "KeyError" not in found.body.decode()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_but_get_is_answered(address: str, method: str) -> None:
    found = get(address, "/api/echo", method)
    assert found.status == 501
    assert "content-security-policy" in found.headers


def test_what_is_no_request_is_refused_in_the_same_form(address: str) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 70_000 + b"\r\n\r\n"):
        with socket.create_connection(split_address(address), timeout=60) as connection:
            connection.sendall(sent)
            said = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b'{"error":' in said


def test_a_request_with_too_long_headers_is_cut_off(address: str) -> None:
    for length, answered in ((650, True), (1600, False)):
        head = b"".join(b"X-%02d: %s\r\n" % (n, b"x" * length) for n in range(90))
        found = b""
        with socket.create_connection(split_address(address), timeout=60) as connection:
            connection.sendall(b"GET /api/echo HTTP/1.0\r\nHost: localhost\r\n" + head + b"\r\n")
            try:
                while piece := connection.recv(65536):
                    found += piece
            except ConnectionResetError:  # there is more that nobody read
                assert not answered
        assert found.startswith(b"HTTP/1.0 200") == answered


def test_head_has_no_body(address: str) -> None:
    found = get(address, "/api/echo?a=1", "HEAD")
    assert (found.status, found.body, found.headers["content-length"]) == (200, b"", "9")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "", "127.0.0.1.evil.example", "10.0.0.1:80", "[::"]
)
def test_on_loopback_other_names_are_strangers(address: str, host: str) -> None:
    assert get(address, "/api/echo", Host=host).status == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8420", "127.0.0.1", "[::1]:8420", "[::1]"])
def test_its_own_names_are_answered(address: str, host: str) -> None:
    assert get(address, "/api/echo", Host=host).status == 200


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_a_request_names_one_host(address: str, hosts: list[str]) -> None:
    lines = ["GET /api/echo HTTP/1.1", *(f"Host: {host}" for host in hosts), "", ""]
    with socket.create_connection(split_address(address), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode())
        assert connection.recv(65536).split()[1] == b"403"


def test_beyond_loopback_strangers_names_are_refused_where_no_token_is(tmp_path: Path) -> None:
    def status(server: WebServer, host: str, **headers: str) -> int:
        return get(f"127.0.0.1:{split_address(server.address)[1]}", "/api/echo", Host=host, **headers).status

    with serving("0.0.0.0", names=["pages.example"]) as server:
        for host in ("10.1.2.3:8420", "[fd00::1]:8420", "[fd00::1]", "localhost:8420", "Pages.Example:8420", "0.0.0.0"):
            assert status(server, host) == 200, host
        for host in ("evil.example", "evil.example:8420", "pages.example.evil.example", "10.1.2.3.evil.example"):
            assert status(server, host) == 403, host
    with serving("0.0.0.0", door=tokens(tmp_path)) as server:
        assert status(server, "any.example") == 401
        assert status(server, "any.example", Authorization=password(TOKEN)) == 200
    with serving(names=["pages.example"]) as server:
        assert status(server, "pages.example") == 200, "a proxy may leave the name as it is"


def test_pages_of_other_sites_start_no_work(address: str) -> None:
    for site in ("cross-site", "same-site"):
        assert get(address, "/api/echo", Sec_Fetch_Site=site).status == 403
        assert get(address, "/", Sec_Fetch_Site=site).status == 200, "a link from elsewhere opens the page"
    for site in ("same-origin", "none"):
        assert get(address, "/api/echo", Sec_Fetch_Site=site).status == 200


def test_large_answers_are_compressed_for_those_who_take_it(address: str) -> None:
    plain = get(address, "/uPlot.iife.min.js")
    small = get(address, "/uPlot.iife.min.js", Accept_Encoding="gzip")
    assert small.headers["content-encoding"] == "gzip"
    assert int(small.headers["content-length"]) < len(plain.body) / 2
    assert small.body == plain.body


def tokens(folder: Path) -> Any:
    file = folder / "tokens"
    file.write_text(f"me {TOKEN}\n")
    file.chmod(0o600)
    return TokenDoor(Watched([file], lambda: load_tokens(file)))


def test_with_tokens_nothing_is_shown_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(door=tokens(tmp_path)) as server:
        for path in ("/", "/app.js", "/api/echo", "/nothing-here"):
            found = get(server.address, path)
            assert (found.status, found.headers["www-authenticate"].split()[0]) == (401, "Basic")
            assert "content-security-policy" in found.headers
        for shown in ("Basic", "Basic !!", password("wrong" * 8), "Bearer " + "x" * 32, password(""), "Digest a"):
            assert get(server.address, "/api/echo", Authorization=shown).status == 401, shown
        for shown in (password(TOKEN), f"Bearer {TOKEN}"):
            assert get(server.address, "/api/echo", Authorization=shown).status == 200
    assert "unknown token" in caplog.text
    assert "wrong" not in caplog.text
    assert TOKEN not in caplog.text


def test_over_tls(tmp_path: Path) -> None:
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    context = server_context(tmp_path / "both.pem", tmp_path / "both.pem", None)
    with serving(tls=lambda: context) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        with urlopen(f"{server.url}api/echo?a=1", context=trusting, timeout=60) as answer:
            assert json.load(answer) == {"a": "1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:0"], "add --web-tokens, --web-cert and --web-key, or --insecure"),
        (["--listen", "0.0.0.0:0", "--web-tokens", "tokens", "--insecure"], "tokens would travel unencrypted"),
        (["--web-cert", "a.pem"], "--web-cert and --web-key belong together"),
        (["--interval-s", "0"], "--interval-s is 0"),
        (["--listen", "here"], "HOST:PORT"),
        (["127.0.0.1:1-999"], "1 to 256 are required"),
    ],
)
def test_the_command_refuses_what_would_be_open_or_wrong(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert said in refused("web", "127.0.0.1:1", *options)


def test_the_command_says_where_the_page_is_and_ends_on_sigterm() -> None:
    line = command("web", "127.0.0.1:1", "--listen", "127.0.0.1:0")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"the page is at http://(.*)/\n", process.stdout.readline())
        assert found, process.stderr and process.stderr.read()
        assert get(found[1], "/api/fleet").status == 200
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors
