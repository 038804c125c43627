"""The files of the pages, read once: a request names one of a fixed table, never a path."""

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of an answer, and their type."""

    content_type: str
    body: bytes


def load_assets() -> dict[str, Body]:
    """The files by the path of their request; `/` is the page itself."""
    found = {}
    for file in (files("dataserver.web") / "static").iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            found[f"/{file.name}"] = Body(_TYPES[kind], file.read_bytes())
    return {**found, "/": found["/index.html"]}
