"""The stores that a dataset may lie in: a line of `SCHEMES` for each scheme of a URL.

The module of a client is imported with the first store of its scheme: most servers need one at most.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from dataserver.dataset.storage.client_interface import Client


def _bucket(scheme: str, store: str) -> "Client":
    from dataserver.dataset.storage.bucket_client import BucketClient

    return BucketClient(scheme, store)


def _http(scheme: str, store: str) -> "Client":
    from dataserver.dataset.storage.http_client import HttpClient

    return HttpClient(f"{scheme}://{store}/")


def _hub(_scheme: str, store: str) -> "Client":
    from dataserver.dataset.storage.hub_client import HubClient

    return HubClient(store)


class Scheme(NamedTuple):
    """What the URLs of a scheme look like, and who asks their stores."""

    client: "Callable[[str, str], Client]"
    """Makes the client of a scheme and a store."""
    store_parts: int
    """How many parts of a path name the store."""
    example: str
    can_list: bool = True
    """Whether files need no names of their own: a folder has a listing."""
    can_write: bool = True
    """Whether indexes can lie beside the shards."""


SCHEMES: Final = {
    "s3": Scheme(_bucket, 1, "s3://BUCKET/PREFIX"),
    "gs": Scheme(_bucket, 1, "gs://BUCKET/PREFIX"),
    "az": Scheme(_bucket, 2, "az://ACCOUNT/CONTAINER/PREFIX"),
    "http": Scheme(_http, 1, "http://HOST/FOLDER/{00000..00099}.tar", can_list=False, can_write=False),
    "https": Scheme(_http, 1, "https://HOST/FOLDER/{00000..00099}.tar", can_list=False, can_write=False),
    "hf": Scheme(_hub, 3, "hf://datasets/ORG/NAME", can_write=False),
}
