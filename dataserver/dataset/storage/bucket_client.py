"""S3, Google Cloud Storage and Azure through obstore, with the credentials that their own tools find.

obstore is imported where it is used: who reads local files needs none. It retries nothing here, since it ignores
Retry-After and knows nothing of other requests: `retries.py` does.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dataserver.dataset.errors import DatasetError, printable
from dataserver.dataset.storage.client_interface import ObjectInfo, UnavailableError, check_length, check_version

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    Store = S3Store | GCSStore | AzureStore

LIST_CHUNK: Final = 1000
CONNECT_S: Final = 5
READ_S: Final = 10
"""Seconds without a byte after which an answer is given up."""
REQUEST_S: Final = 60
"""Seconds that one answer may take, body and all."""
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables that name another server, by scheme; the first that is set counts."""
_NO_RETRIES: Final = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
_STATUS: Final = re.compile(r"\b([345]\d\d) [A-Z]")
_QUERY: Final = re.compile(r"\?[^\s\"')]*")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_TOOK: Final = re.compile(r" in \d[\d.]*(ns|µs|ms|s)\b")
"""How long it took to fail: with it the same trouble would be told again and again, as another one."""
_EXPIRED: Final = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired")
"""What S3 calls credentials that are over; most of these it answers with 400."""
_HOPELESS: Final = ("redirect", "builder error", "URL scheme", "Missing", "InvalidGetRange", "non-partial")
"""In texts of errors that come again however often one asks."""


class BucketClient:
    """Requests to one bucket, or container."""

    lists_at_once = False

    def __init__(self, scheme: str, name: str) -> None:
        """Make a client; nothing is asked yet.

        Args:
            scheme: s3, gs or az.
            name: of the bucket; of Azure ACCOUNT/CONTAINER.

        Raises:
            DatasetError: obstore is not installed, or the environment does not describe the store.
        """
        self._name = f"{scheme}://{name}"
        try:
            self._store = _store(scheme, name)
        except ImportError as error:
            raise DatasetError(f"{self._name} needs the package {error.name}: pip install {error.name}") from error
        except Exception as error:  # of obstore, or of boto3 where it looks for a profile
            raise DatasetError(f"{self._name} cannot be opened: {_text(error)}; correct its settings") from None

    def objects(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield the objects below a folder of the bucket, in order."""
        import obstore

        with _translated(self._name):
            for chunk in obstore.list(self._store, prefix or None, offset=after or None, chunk_size=LIST_CHUNK):
                yield from map(_info, chunk)

    def head(self, key: str) -> ObjectInfo:
        """Return the present version of an object in the bucket."""
        import obstore

        with _translated(f"{self._name}/{key}"):
            return _info(obstore.head(self._store, key))

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """Read a range of an object, unless the object has another version."""
        import obstore

        with _translated(f"{self._name}/{wanted.key}"):
            answer = obstore.get(self._store, wanted.key, options={"range": (start, start + length)})
            found = _info(answer.meta)
            check_version(wanted, found.version, found.num_bytes, found.modified_ns)
            if answer.range[0] != start:
                raise UnavailableError(f"an answer begins at byte {answer.range[0]} instead of {start}")
            return check_length(bytes(answer.bytes()), length)

    def put(self, key: str, source: Path) -> ObjectInfo:
        """Write an object from a local file, and return its version."""
        import obstore

        with _translated(f"{self._name}/{key}"):
            obstore.put(self._store, key, source)
        return self.head(key)

    def remove(self, key: str) -> None:
        """Remove an object from the bucket."""
        import obstore

        with _translated(f"{self._name}/{key}"):
            obstore.delete(self._store, key)


def _store(scheme: str, name: str) -> "Store":
    from obstore.store import AzureStore, GCSStore, S3Store

    options: Any = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=READ_S),
        "timeout": timedelta(seconds=REQUEST_S),
    }
    retries: Any = _NO_RETRIES
    endpoint = next((found for n in _ENDPOINTS[scheme] if (found := os.environ.get(n))), "")
    is_emulator = scheme == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    options["allow_http"] = is_emulator or endpoint.startswith("http://")
    if scheme == "gs":
        return GCSStore(name, client_options=options, retry_config=retries)
    if scheme == "az":
        account, container = name.split("/")
        return AzureStore(container, account_name=account, client_options=options, retry_config=retries)
    provider: Any = None
    if os.environ.get("AWS_PROFILE"):
        from obstore.auth.boto3 import Boto3CredentialProvider

        provider = Boto3CredentialProvider()
    given: Any = {"endpoint": endpoint} if endpoint else {}
    return S3Store(name, client_options=options, retry_config=retries, credential_provider=provider, **given)


def _info(meta: Any) -> ObjectInfo:
    # Listings give fractions of seconds, heads do not; listings of Azure leave the quotes of ETags out.
    version = meta["e_tag"] or ""
    version = f'"{version}"' if version and not version.endswith('"') else version
    return ObjectInfo(meta["path"], meta["size"], version, int(meta["last_modified"].timestamp()) * 1_000_000_000)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise the errors of obstore as those of `Client`."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _refused(what, _text(error)) from None
    except (exceptions.NotFoundError, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, f"there is no {what}") from None
    except exceptions.BaseError as error:
        text = _text(error)
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if status == 400 and (" HEAD " in text or any(f"({code})" in text for code in _EXPIRED)):
            raise _refused(what, text) from None  # an answer to HEAD has no room for what is wrong
        if "invalid path" in text:  # a part of a name is empty, '.' or '..': obstore lists nothing then
            raise OSError(errno.EINVAL, f"{text}; rename that object of {what}, or name a folder without it") from None
        if status == 404:
            raise FileNotFoundError(errno.ENOENT, f"there is no {what} ({text})") from None
        hopeless = 300 <= status < 500 and status not in (408, 425, 429)
        if hopeless or (not status and any(word in text for word in _HOPELESS)):
            raise OSError(errno.EINVAL, f"{what}: {text}") from None
        raise UnavailableError(f"{what}: {text}") from None


def _refused(what: str, text: str) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        f"the store refuses access to {what}: check the credentials, and renew them if they have expired ({text})",
    )


def _text(error: Exception) -> str:
    """What an error says, without queries of URLs and bodies of answers, which may hold signatures."""
    whole = str(error).strip()
    code = _CODE.search(whole)
    first = whole.partition("<")[0].partition("\n")[0].rstrip(": ") or type(error).__name__
    late = " (it took too long)" if "TimedOut" in whole else ""
    return printable(_TOOK.sub("", _QUERY.sub("?...", first)), 300) + (f" ({code[1]})" if code else late)
