"""An HTTP server with ranges that misbehaves as it is told: for tests of faults, and for timings with a delay.

It also answers as S3 does to whoever lists a bucket or puts an object: `/BUCKET/KEY`, without signatures.
"""

import hashlib
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_TO_THE_END = 1 << 62
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


@dataclass
class Stored:
    """One object, and what the server says of it."""

    data: bytes
    etag: str | None
    """ETag with its quotes; None where the server gives none."""
    modified: float = 1.7e9


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    range: tuple[int, int] | None
    """First byte and end that were asked for."""
    headers: dict[str, str]
    """Headers by their names in lower case."""


@dataclass
class State:
    """What a server holds, does and has seen."""

    objects: dict[str, Stored] = field(default_factory=dict)
    """Objects by path, with the slash before it."""
    faults: list[str] = field(default_factory=list)
    """What becomes of the next requests for ranges, one each: see `_Handler.misbehave`."""
    of_paths: dict[str, str] = field(default_factory=dict)
    """What becomes of all others for these objects."""
    always: str = ""
    """What becomes of the rest."""
    expired: str = ""
    """Requests whose Authorization holds this are refused, as S3 refuses credentials that are over."""
    delay_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, path: str, data: bytes, with_etag: bool = True) -> None:
        """Store an object, with an ETag of its content."""
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"' if with_etag else None
        self.objects[path] = Stored(data, etag)

    def put_folder(self, prefix: str, folder: Path, suffixes: tuple[str, ...] = (".tar", ".parquet")) -> None:
        """Store the files of a folder."""
        for file in sorted(folder.rglob("*")):
            if file.suffix in suffixes and file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())

    def ranges(self) -> list[Asked]:
        """Return the requests for bytes among all."""
        return [one for one in self.asked if one.method == "GET" and one.range is not None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write nothing: nobody reads it."""

    def setup(self) -> None:
        super().setup()
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        path = unquote(urlsplit(self.path).path)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("x-amz-decoded-content-length"):
            self.send_error(501)
            return
        self.state.put(path, data)
        self._send(200, b"", {"ETag": self.state.objects[path].etag or ""})

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if parts.query != "delete":
            self.send_error(501)
            return
        keys = re.findall(r"<Key>(.*?)</Key>", text)
        for key in keys:
            self.state.objects.pop(f"{parts.path}/{unescape(key)}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._send(200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {"Content-Type": "application/xml"})

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        wanted = (int(found[1]), int(found[2] or _TO_THE_END) + 1) if found else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        state = self.state
        with state.lock:
            state.asked.append(Asked(method, self.path, wanted, headers))
            fault = ""
            if state.faults and wanted is not None and method == "GET":
                fault = state.faults.pop(0)
            elif wanted is not None or method == "HEAD":
                fault = state.of_paths.get(path, state.always)
        time.sleep(state.delay_s)
        if state.expired and state.expired in headers.get("authorization", ""):
            self._send(400, _EXPIRED, {"Content-Type": "application/xml"})
            return
        query = parse_qs(parts.query)
        if "list-type" in query:
            self._list(path.strip("/"), query)
            return
        stored = state.objects.get(path)
        if fault and self.misbehave(fault, stored, wanted):
            return
        if stored is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        self._whole_or_range(method, stored, wanted)

    def _whole_or_range(self, method: str, stored: Stored, wanted: tuple[int, int] | None) -> None:
        headers = self._about(stored)
        size = len(stored.data)
        if wanted is None or method == "HEAD":
            self._send(200, stored.data, headers, body=method == "GET")
        elif wanted[0] >= size:
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
        else:
            start, end = wanted[0], min(wanted[1], size)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self._send(206, memoryview(stored.data)[start:end], headers)

    def _about(self, stored: Stored) -> dict[str, str]:
        headers = {"Last-Modified": formatdate(stored.modified, usegmt=True), "Accept-Ranges": "bytes"}
        return headers if stored.etag is None else {**headers, "ETag": stored.etag}

    def misbehave(self, fault: str, stored: Stored | None, wanted: tuple[int, int] | None) -> bool:
        """Do one wrong thing; whether the request is answered by it.

        `STATUS` or `STATUS:RETRY_AFTER`; `short`: a 206 with half of the bytes; `cut`: the connection ends in the
        middle; `reset`; `long`: more bytes are declared and sent; `whole`: 200 for a range; `shifted`: another range;
        `drip`: a byte at a time; `other`: another version's bytes and ETag; `redirect:URL`; `wait:SECONDS` before the
        right answer.
        """
        kind, _, value = fault.partition(":")
        if kind == "wait":
            time.sleep(float(value))
            return False
        if kind.isdigit():
            self._send(int(kind), b"<Error/>", {"Retry-After": value} if value else {})
            return True
        if kind == "redirect":
            self._send(302, b"", {"Location": value + self.path})
            return True
        if stored is None or wanted is None:
            return False
        self._send_wrong(kind, stored, wanted)
        return True

    def _send_wrong(self, kind: str, stored: Stored, wanted: tuple[int, int]) -> None:
        start, end = wanted[0], min(wanted[1], len(stored.data))
        data, headers, size = stored.data[start:end], self._about(stored), len(stored.data)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        if kind == "short":
            half = len(data) // 2
            headers["Content-Range"] = f"bytes {start}-{start + half - 1}/{size}"
            self._send(206, data[:half], headers)
        elif kind == "long":
            self._send(206, data + b"xxxx", headers)
        elif kind == "whole":
            self._send(200, stored.data, self._about(stored))
        elif kind == "shifted":
            headers["Content-Range"] = f"bytes {start + 1}-{end}/{size}"
            self._send(206, data, headers)
        elif kind == "other":
            headers["ETag"] = '"another"'
            self._send(206, bytes(len(data)), headers)
        else:
            self._send(206, data, headers, body=False)
            if kind == "drip":
                for i in range(len(data)):
                    self.wfile.write(data[i : i + 1])
                    time.sleep(0.05)
                return
            self.wfile.write(data[: len(data) // 2])
            if kind == "reset":
                self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        limit = int(query.get("max-keys", ["1000"])[0])
        begin = f"/{bucket}/"
        names = [path.removeprefix(begin) for path in sorted(self.state.objects) if path.startswith(begin)]
        if not names:
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>", {})
            return
        names = [name for name in names if name.startswith(prefix) and name > after]
        entries = "".join(self._entry(name, self.state.objects[begin + name]) for name in names[:limit])
        more = len(names) > limit
        token = f"<NextContinuationToken>{escape(names[limit - 1])}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<Name>{bucket}</Name><KeyCount>{len(names[:limit])}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        )
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _entry(self, name: str, stored: Stored) -> str:
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.modified))
        etag = "" if stored.etag is None else f"<ETag>{escape(stored.etag)}</ETag>"
        return (
            f"<Contents><Key>{escape(name)}</Key><LastModified>{date}</LastModified>{etag}"
            f"<Size>{len(stored.data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    def _send(self, status: int, data: bytes | memoryview, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)
            with self.state.lock:
                self.state.sent_bytes += len(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may go at any time."""


def range_server(state: State) -> AbstractContextManager[str]:
    """Serve what a state holds, as `handled_by`."""
    return handled_by(_Handler, state=state)


@contextmanager
def handled_by(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """Serve on a free port of this machine with a handler that has these attributes; yields http://127.0.0.1:PORT."""
    with _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), attributes)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def main() -> int:
    """Serve the shards of a folder at /bucket/shards until stdin ends; print the address first.

    A folder behind the delay is served at /bucket/copy. Each line on stdin is answered by how many requests there were,
    and how many bytes of objects were sent.
    """
    folder, delay_s = Path(sys.argv[1]), float(sys.argv[2])
    state = State(delay_s=delay_s)
    state.put_folder("/bucket/shards", folder)
    for copy in sys.argv[3:4]:
        state.put_folder("/bucket/copy", Path(copy), suffixes=(".mds", ".json"))
    with range_server(state) as address:
        print(address, flush=True)
        for _ in sys.stdin:
            print(len(state.asked), state.sent_bytes, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
