"""HTTP(S) with ranges. Every answer is checked against what was asked for, and redirects go to named hosts alone.

obstore has an HTTP store, too; it follows redirects to any host, and does not tell what a store asked to wait.
"""

import errno
import http.client
import io
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from dataserver.dataset.errors import DatasetError, printable
from dataserver.dataset.storage.client_interface import (
    ChangedError,
    ObjectInfo,
    UnavailableError,
    check_length,
    check_version,
)

HOSTS_VARIABLE: Final = "DISTTRAIN_REDIRECT_HOSTS"
"""Names further hosts that redirects may lead to, with commas; `*.example.com` stands for all below it.
A host stands for the usual ports and that of the server that redirects, HOST:PORT for another one."""
SILENCE_S: Final = 10.0
"""Seconds without a byte after which an answer is given up."""
BASE_S: Final = 10.0
BYTES_PER_S: Final = 1 << 17
"""An answer may take `BASE_S`, and a second for so many bytes."""
MAX_REDIRECTS: Final = 5
MAX_IDLE: Final = 64
"""Most connections that stay open while nobody uses them."""
LONGEST_WAIT_S: Final = 120.0
"""Longest wait that a server's answer may ask for."""
_PORTS: Final = {"http": 80, "https": 443}
_IS_PRINTABLE: Final = re.compile(r"[!-~]+")
_PIECE: Final = 1 << 18
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_GONE: Final = (404, 410)


class Answer(NamedTuple):
    """An answer whose body was read."""

    status: int
    headers: Mapping[str, str]
    """Headers by their names in lower case."""
    body: bytes
    url: str
    """URL that the answer came from, behind all redirects."""
    linked: Mapping[str, str]
    """Headers of the first redirect that has X-Linked-ETag, or else of the first one; empty without any."""


class HttpClient:
    """Requests to one server. Fulfils `Client`; it cannot list or write."""

    lists_at_once = True

    def __init__(self, base: str, hosts: tuple[str, ...] = (), headers: Mapping[str, str] | None = None) -> None:
        """Make a client; nothing is asked yet.

        Args:
            base: URL of what keys are relative to, with a slash at its end.
            hosts: patterns of further hosts that redirects may lead to.
            headers: sent to the host of `base` alone.
        """
        self._base = base
        try:
            own = urlsplit(base)
            self._port = own.port
        except ValueError:
            raise DatasetError(f"{printable(base, 100)} names no host and port; correct the URL") from None
        named = os.environ.get(HOSTS_VARIABLE, "")
        self._hosts = (own.hostname or "", *hosts, *(h.strip() for h in named.split(",") if h.strip()))
        self._origin = own.scheme, own.netloc
        self._headers = dict(headers or {})
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._resolved: dict[str, str] = {}
        """By key: where a redirect led to."""
        self._tls = ssl.create_default_context()

    def objects(self, prefix: str, after: str) -> Iterator[ObjectInfo]:  # noqa: ARG002
        """Refuse: HTTP has no listing."""
        raise OSError(
            errno.EOPNOTSUPP, f"HTTP lists no files: name the shards, such as {self._base}{prefix}/{{00000..00099}}.tar"
        )

    def head(self, key: str) -> ObjectInfo:
        """Return the present version of an object."""
        answer = self.ask("HEAD", self.url_of(key), 0)
        if answer.status in (405, 501):
            answer = self.ask("GET", self.url_of(key), 1, {"Range": "bytes=0-0"})
        self.check(answer, self.url_of(key))
        total = _total(answer) if answer.status == 206 else _number(answer.headers.get("content-length"))
        if total is None:
            raise OSError(errno.EINVAL, f"{self.url_of(key)} does not say how long it is; its server must")
        info = self.info(key, answer, total)
        if not info.version and not info.modified_ns:
            raise OSError(
                errno.EINVAL,
                f"{self.url_of(key)} has neither ETag nor Last-Modified, so a new version could not be told from it;"
                " its server must send one",
            )
        return info

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """Read a range of an object, unless the object has another version."""
        known = self._resolved.get(wanted.key)
        if known:
            try:
                return self._get(wanted, start, length, known)
            except UnavailableError:
                raise
            except OSError:  # signed URLs expire, and what they name may be of a version before
                self._resolved.pop(wanted.key, None)
        return self._get(wanted, start, length, self.url_of(wanted.key))

    def _get(self, wanted: ObjectInfo, start: int, length: int, url: str) -> bytes:
        key = wanted.key
        answer = self.ask("GET", url, length, {"Range": f"bytes={start}-{start + length - 1}"})
        if answer.status in (412, 416):
            raise ChangedError(f"its server answers {answer.status}")
        self.check(answer, self.url_of(key))
        if answer.status != 206:
            self._check_whole(wanted, start, length)
        elif _range(answer) != (start, start + length):
            raise UnavailableError(
                f"{self.url_of(key)}: bytes {start} to {start + length} were asked for, the answer has"
                f" {printable(answer.headers.get('content-range', 'none'), 60)}"
            )
        declared = _number(answer.headers.get("content-length"))
        if declared is not None and declared != length:
            raise UnavailableError(f"{self.url_of(key)}: an answer declares {declared} bytes instead of {length}")
        total = _total(answer) if answer.status == 206 else len(answer.body)
        self.check_version(wanted, answer, wanted.num_bytes if total is None else total)
        if answer.linked:
            self._resolved[key] = answer.url
        return check_length(answer.body, length)

    def put(self, key: str, source: Path) -> ObjectInfo:
        """HTTP servers take no files."""
        raise PermissionError(errno.EACCES, f"{self.url_of(key)} cannot be written ({source.name})")

    def remove(self, key: str) -> None:
        """HTTP servers take no changes."""
        raise PermissionError(errno.EACCES, f"{self.url_of(key)} cannot be removed")

    def url_of(self, key: str) -> str:
        """Return the URL of an object."""
        return self._base + quote(key)

    def info(self, key: str, answer: Answer, num_bytes: int) -> ObjectInfo:
        """What the headers of an answer say of an object."""
        return ObjectInfo(key, num_bytes, answer.headers.get("etag", ""), _date_ns(answer.headers.get("last-modified")))

    def check(self, answer: Answer, url: str) -> None:
        """Raise what the status of an answer means, unless it is a success."""
        status = answer.status
        if status in (200, 206):
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise OSError(errno.EINVAL, f"{url} is sent with the encoding {printable(encoding, 30)}; switch it off")
        elif status in _GONE:
            raise FileNotFoundError(errno.ENOENT, f"there is no {url}")
        elif status in (401, 403):
            hint = ": check its token, and renew it if it has expired" if "Authorization" in self._headers else ""
            raise PermissionError(errno.EACCES, f"its server refuses access to {url} ({status}){hint}")
        elif status in (408, 425, 429) or status >= 500:
            raise UnavailableError(f"{url} answers {status}", _wait_s(answer.headers.get("retry-after")))
        else:
            raise OSError(errno.EINVAL, f"{url} answers {status}")

    def _check_whole(self, wanted: ObjectInfo, start: int, length: int) -> None:
        if start or length != wanted.num_bytes:
            raise OSError(
                errno.EINVAL,
                f"{self.url_of(wanted.key)}: its server ignores Range and sends whole files; one that answers 206 is"
                " required",
            )

    def check_version(self, wanted: ObjectInfo, answer: Answer, num_bytes: int) -> None:
        """Raise ChangedError unless an answer is of the version that was asked for."""
        found = self.info(wanted.key, answer, num_bytes)
        check_version(wanted, found.version, found.num_bytes, found.modified_ns)

    def ask(self, method: str, url: str, length: int, headers: Mapping[str, str] | None = None) -> Answer:
        """Send one request, follow its redirects, and read the answer's body, of at most `length` bytes.

        Raises:
            UnavailableError: no answer, or one that was cut or too slow.
            PermissionError: a redirect leads to a host that is not named.
        """
        began = monotonic()
        until = began + BASE_S + length / BYTES_PER_S
        linked: Mapping[str, str] = {}
        for _ in range(MAX_REDIRECTS + 1):
            if monotonic() > until:
                raise UnavailableError(f"{self._base}: its redirects took longer than {until - began:.0f} s")
            answer = self._once(method, url, length, headers or {}, until)
            if answer.status not in _REDIRECTS:
                return answer._replace(linked=linked)
            if "x-linked-etag" not in linked:
                linked = answer.headers if "x-linked-etag" in answer.headers else linked or answer.headers
            url = self._redirected(url, answer.headers.get("location", ""))
        raise OSError(errno.ELOOP, f"{self._base} leads through more than {MAX_REDIRECTS} redirects")

    def _redirected(self, url: str, target: str) -> str:
        try:
            found = urljoin(url, target)
            parts = urlsplit(found)
            port = parts.port or _PORTS.get(parts.scheme)
            is_url = _IS_PRINTABLE.fullmatch(found) is not None
        except ValueError:
            is_url = False
        if not is_url:
            shown = printable(target.partition("?")[0], 100)
            raise OSError(errno.EINVAL, f"{self._base} redirects to {shown!r}, which is no URL")
        host = parts.hostname or ""
        usual = port in (*_PORTS.values(), self._port)
        asked = f"{host}:{port}"
        is_named = any(fnmatchcase(asked, h) or (usual and fnmatchcase(host, h)) for h in self._hosts)
        secure = parts.scheme == "https" or (parts.scheme == "http" and self._origin[0] == "http")
        if not secure or parts.username is not None or not is_named:
            where = printable(f"{parts.scheme}://{host if usual else asked}", 100)
            raise PermissionError(
                errno.EACCES,
                f"{self._base} redirects to {where}, which is none of {', '.join(self._hosts)}; if it should be asked,"
                f" set {HOSTS_VARIABLE}={printable(host if usual else asked, 80) or 'HOST'}",
            )
        return found

    def _once(self, method: str, url: str, length: int, headers: Mapping[str, str], until: float) -> Answer:
        parts = urlsplit(url)
        origin = parts.scheme, parts.netloc
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        given = {"Accept-Encoding": "identity", "User-Agent": "disttrain", **headers}
        if origin == self._origin:
            given |= self._headers
        shown = url.partition("?")[0]
        for fresh in (False, True):
            try:
                connection = self._connection(*origin, fresh)
            except http.client.InvalidURL as error:
                raise OSError(errno.EINVAL, f"{shown}: {_why(error)}") from None
            reused = connection.sock is not None
            connection.response_class = partial(_TimedResponse, until)  # type: ignore[assignment]
            try:
                connection.request(method, path, headers=given)
                answer = connection.getresponse()
            except (http.client.InvalidURL, UnicodeError) as error:
                raise OSError(errno.EINVAL, f"{shown} cannot be asked for: {_why(error)}") from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if reused and not isinstance(error, TimeoutError):
                    continue  # it was closed while it was idle
                raise UnavailableError(f"{shown}: {_why(error)}") from None
            break
        try:
            body = answer.read(0) if method == "HEAD" else _body(answer, length, until, shown)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if isinstance(error, UnavailableError):
                raise
            raise UnavailableError(f"{shown}: {_why(error)}") from None
        if answer.will_close or not answer.isclosed():
            connection.close()
        else:
            with self._lock:
                idle = self._idle.setdefault(origin, [])
                if len(idle) < MAX_IDLE:
                    idle.append(connection)
                else:
                    connection.close()
        return Answer(answer.status, _headers(answer), body, url, {})

    def _connection(self, scheme: str, netloc: str, fresh: bool) -> http.client.HTTPConnection:
        with self._lock:
            idle = self._idle.setdefault((scheme, netloc), [])
            if fresh:
                while idle:
                    idle.pop().close()
            elif idle:
                return idle.pop()
        if scheme == "https":
            return http.client.HTTPSConnection(netloc, timeout=SILENCE_S, context=self._tls)
        return http.client.HTTPConnection(netloc, timeout=SILENCE_S)


class _TimedResponse(http.client.HTTPResponse):
    """An answer whose headers, too, have to come within its time: a byte now and then is no silence."""

    def __init__(self, until: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), until))


class _TimedReader(io.RawIOBase):
    """The bytes of a socket up to a time of `monotonic`; it may take `SILENCE_S` longer. Raises TimeoutError then."""

    def __init__(self, raw: io.RawIOBase, until: float) -> None:
        self._raw = raw
        self._until = until

    def readable(self) -> bool:
        """True: the body is read."""
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int | None:  # type: ignore[override]
        if monotonic() > self._until:
            raise TimeoutError("the answer came too slowly")
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _headers(answer: http.client.HTTPResponse) -> Mapping[str, str]:
    """By names in lower case; those that come several times are one list, as RFC 9110 has it."""
    found: dict[str, str] = {}
    for name, value in answer.getheaders():
        before = found.get(name.lower())
        found[name.lower()] = value if before is None else f"{before}, {value}"
    return found


def _body(answer: http.client.HTTPResponse, most: int, until: float, shown: str) -> bytes:
    """Read a body. What is longer than `most` is cut there, and its connection not used again."""
    pieces, num_bytes = [], 0
    if answer.status not in (200, 206):
        most = 1 << 12  # of a page of an error enough to use the connection again
    while num_bytes < most:
        piece = answer.read1(min(_PIECE, most - num_bytes))
        if not piece:
            break
        pieces.append(piece)
        num_bytes += len(piece)
        if monotonic() > until:
            raise UnavailableError(f"{shown}: {num_bytes} of {most} bytes came in {BASE_S + most / BYTES_PER_S:.0f} s")
    if answer.length == 0:
        answer.read(0)  # lets the connection be used again
    return b"".join(pieces)


def _why(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the answer was cut"
    return printable(str(error) or type(error).__name__, 200)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and len(text) < 19 else None


def _range(answer: Answer) -> tuple[int, int] | None:
    """First byte and end that a Content-Range names."""
    unit, _, rest = answer.headers.get("content-range", "").partition(" ")
    first, _, last = rest.partition("/")[0].partition("-")
    low, high = _number(first.strip()), _number(last.strip())
    return None if unit != "bytes" or low is None or high is None else (low, high + 1)


def _total(answer: Answer) -> int | None:
    return _number(answer.headers.get("content-range", "").rpartition("/")[2].strip())


def _date_ns(text: str | None) -> int:
    try:
        return int(parsedate_to_datetime(text or "").timestamp()) * 1_000_000_000
    except (ValueError, TypeError, OverflowError):
        return 0


def _wait_s(text: str | None) -> float | None:
    """Seconds that a Retry-After asks to wait for, at most `LONGEST_WAIT_S`; None without any."""
    seconds = _number(text)
    if seconds is None and text:
        date = _date_ns(text)
        seconds = None if not date else max(0, round(date / 1e9 - time()))
    return None if seconds is None else min(float(seconds), LONGEST_WAIT_S)
