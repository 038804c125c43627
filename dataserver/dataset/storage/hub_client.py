"""Datasets of the Hugging Face Hub, over HTTPS: its listing, its files, the token of the environment."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

from dataserver.dataset.errors import DatasetError, is_safe
from dataserver.dataset.storage.client_interface import ObjectInfo, check_version
from dataserver.dataset.storage.http_client import Answer, HttpClient

ENDPOINT: Final = "https://huggingface.co"
HOSTS: Final = ("*.huggingface.co", "*.hf.co")
"""Where the Hub's redirects lead to: its stores of large files."""
MAX_PAGE_BYTES: Final = 64 << 20
MAX_PAGES: Final = 4096


class HubClient(HttpClient):
    """Requests to one dataset of the Hub, at the commit that its revision names when it is first asked."""

    def __init__(self, name: str) -> None:
        """Make a client; nothing is asked yet.

        Args:
            name: datasets/ORG/NAME or datasets/ORG/NAME@REVISION.

        Raises:
            DatasetError: it is no such name.
        """
        kind, _, rest = name.partition("/")
        repository, _, revision = rest.partition("@")
        if kind != "datasets" or repository.count("/") != 1:
            raise DatasetError(f"hf://{name} names no dataset; hf://datasets/ORG/NAME or .../NAME@REVISION is required")
        self._endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
        if urlsplit(self._endpoint).username is not None:
            raise DatasetError("HF_ENDPOINT holds a user or password; leave it out, and give the token as HF_TOKEN")
        token = os.environ.get("HF_TOKEN", "")
        self._repository, self._revision = repository, revision or "main"
        self._commit = ""
        self._stored: dict[tuple[str, str], str] = {}
        """By key and version: the ETag in the store of large files."""
        super().__init__(f"{self._endpoint}/", HOSTS, {"Authorization": f"Bearer {token}"} if token else {})

    def objects(self, prefix: str, after: str) -> Iterator[ObjectInfo]:  # noqa: ARG002
        """Yield all objects of the repository, a page at a time."""
        path = f"/{quote(prefix)}" if prefix else ""
        url = f"{self._endpoint}/api/datasets/{self._repository}/tree/{self.commit()}{path}?recursive=true"
        for _ in range(MAX_PAGES):
            answer = self.ask("GET", url, MAX_PAGE_BYTES)
            self.check(answer, url)
            yield from [_info(entry) for entry in _parsed(answer) if entry.get("type") == "file"]
            following = _next(answer.headers.get("link", ""))
            if not following:
                return
            if not following.startswith(f"{self._endpoint}/api/"):
                raise OSError(errno.EINVAL, f"{self._endpoint} lists {self._repository} with a page of another server")
            url = following
        raise OSError(errno.EFBIG, f"{self._repository} has more than {MAX_PAGES} pages of files; name a folder in it")

    def head(self, key: str) -> ObjectInfo:
        """Return the present version of a file of the repository."""
        answer = self.ask("HEAD", self.url_of(key), 0)
        size = answer.linked.get("x-linked-size", "")
        if not size.isdigit():  # a small file, which the Hub sends itself
            self.check(answer, self.url_of(key))
            size = answer.headers.get("content-length", "")
        if not size.isdigit():
            raise OSError(errno.EINVAL, f"{self.url_of(key)} does not say how long it is")
        info = self.info(key, answer, int(size))
        if not info.version:
            raise OSError(errno.EINVAL, f"{self.url_of(key)} has no ETag; the Hub must send one")
        return info

    def url_of(self, key: str) -> str:
        """Return the URL of a file at the commit that is read."""
        return f"{self._endpoint}/datasets/{self._repository}/resolve/{self.commit()}/{quote(key)}"

    def commit(self) -> str:
        """The commit that the revision named when it was first asked for."""
        if not self._commit:
            url = f"{self._endpoint}/api/datasets/{self._repository}/revision/{quote(self._revision, safe='')}"
            answer = self.ask("GET", url, MAX_PAGE_BYTES)
            if answer.status in (401, 403, 404):
                raise PermissionError(
                    errno.EACCES,
                    f"the Hub shows no dataset {self._repository} at {self._revision} ({answer.status}): correct the"
                    " name, or set HF_TOKEN to the token of somebody who may read it",
                )
            self.check(answer, url)
            found = _json(answer)
            sha = found.get("sha") if isinstance(found, dict) else None
            if not isinstance(sha, str) or not sha.isalnum():
                raise OSError(errno.EINVAL, f"{self._endpoint} names no commit of {self._repository}")
            self._commit = sha
        return self._commit

    def info(self, key: str, answer: Answer, num_bytes: int) -> ObjectInfo:
        """The version is the digest that the Hub names; a large file's own store does not know it."""
        linked = answer.linked.get("x-linked-etag") or answer.headers.get("x-linked-etag")
        etag = linked or answer.headers.get("etag", "")
        return ObjectInfo(key, num_bytes, etag.removeprefix("W/").strip('"'), 0)

    def check_version(self, wanted: ObjectInfo, answer: Answer, num_bytes: int) -> None:
        """Check the version as `HttpClient.check_version`; of a large file's store the ETag has to stay the same."""
        found = self.info(wanted.key, answer, num_bytes)
        if "etag" in answer.headers and not answer.linked and found.version != wanted.version:
            seen = self._stored.setdefault((wanted.key, wanted.version), found.version)
            found = found._replace(version=wanted.version if seen == found.version else found.version)
        check_version(wanted, found.version, found.num_bytes, 0)


def _info(entry: Mapping[str, Any]) -> ObjectInfo:
    key, lfs = entry.get("path"), entry.get("lfs") or entry
    size, oid = entry.get("size"), lfs.get("oid")
    if not (isinstance(key, str) and isinstance(size, int) and isinstance(oid, str) and is_safe(key)):
        raise OSError(errno.EINVAL, "the Hub lists a file without a path, a size or a digest")
    return ObjectInfo(key, size, oid, 0)


def _parsed(answer: Answer) -> list[Mapping[str, Any]]:
    found = _json(answer)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise OSError(errno.EINVAL, "the Hub's listing is no list of files")
    return found


def _json(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        raise OSError(errno.EINVAL, "the Hub's answer is no JSON") from None


def _next(link: str) -> str:
    """The URL of the next page in a Link header; empty behind the last one."""
    for part in link.split(","):
        url, _, relation = part.partition(";")
        if 'rel="next"' in relation:
            return url.strip().strip("<>")
    return ""
