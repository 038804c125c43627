"""The storage backends, one line each. The scheme of a dataset's path chooses one."""

import re
from pathlib import PurePath
from typing import Final

from dataserver.dataset.storage.folder_listings import LISTING_NAME, FolderListings
from dataserver.dataset.storage.interface import Storage
from dataserver.dataset.storage.local import LocalStorage
from dataserver.dataset.storage.remote import RemoteStorage
from dataserver.dataset.storage.schemes import SCHEMES
from dataserver.dataset.storage.urls import Url

LOCAL: Final = LocalStorage()
REMOTE: Final = {scheme: RemoteStorage(scheme) for scheme in SCHEMES}
FOLDERS: Final = FolderListings()
STORAGES: Final[dict[str, Storage]] = {
    "": LOCAL,
    **REMOTE,
}
"""Backends by scheme: the part before `:/` of a dataset's path. A path without a registered scheme is a local one."""

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*):/")


def storage_of(path: PurePath | str) -> Storage:
    """Return the backend that a path belongs to; the listing of a folder has one of its own."""
    text = str(path)
    if text.endswith(f"/{LISTING_NAME}"):
        return FOLDERS
    found = _SCHEME.match(text)
    return STORAGES.get(found[1] if found else "", LOCAL)


def remote_storage(url: Url) -> RemoteStorage:
    """Return the backend of a URL."""
    return REMOTE[url.scheme]
