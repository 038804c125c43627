"""A bucket of so many objects that they are made up as they are listed, for tests; there is nothing to read in it."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from benchmarks.range_server import handled_by

PAGE = 1000
"""Objects of one answer, as S3's."""
_ENTRY = (
    '<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{}"</ETag><Size>70000</Size>'
    "<StorageClass>STANDARD</StorageClass></Contents>"
)


@dataclass
class Listed:
    """What a listing shows, and who asked for it."""

    count: int
    suffix: str
    fails: frozenset[int] = frozenset()
    """Numbers of requests that are answered by 503."""
    in_circles: bool = False
    """Whether each answer is the first page again, with more behind it."""
    asked: list[str] = field(default_factory=list)
    """Queries."""

    def page(self, query: dict[str, list[str]]) -> str:
        """The answer of ListObjectsV2 below `many/`."""
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        first = int(after.removeprefix("many/")[:8]) + 1 if after and not self.in_circles else 0
        last = min(first + min(PAGE, int(query.get("max-keys", ["1000"])[0])), self.count)
        keys = [f"many/{number:08}{self.suffix}" for number in range(first, last)]
        more = last < self.count
        token = f"<NextContinuationToken>{keys[-1]}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>bucket</Name>'
            f"<KeyCount>{len(keys)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{''.join(_ENTRY.format(key, key) for key in keys)}</ListBucketResult>"
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    listed: Listed

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nobody reads it."""

    def do_GET(self) -> None:
        """As S3 does to who lists; there is no object."""
        parts, listed = urlsplit(self.path), self.listed
        query = parse_qs(parts.query)
        number = len(listed.asked)
        listed.asked.append(parts.query)
        status = 404 if "list-type" not in query else 503 if number in listed.fails else 200
        body = listed.page(query).encode() if status == 200 else b"<Error/>"
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def bucket_of(listed: Listed) -> AbstractContextManager[str]:
    """Serve a listing; yields the endpoint of S3."""
    return handled_by(_Handler, listed=listed)
