"""URLs of datasets as paths: `s3://bucket/laion` works wherever a folder does.

`Path` makes one slash of two, so a URL that came through it is `s3:/bucket/laion`; here it gets its second one back.
"""

import re
from itertools import product
from math import prod
from pathlib import Path, PosixPath, PurePath
from typing import Final

from dataserver.dataset.errors import DatasetError
from dataserver.dataset.storage.schemes import SCHEMES

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*):/+(.*)", re.DOTALL | re.IGNORECASE)
_BRACES: Final = re.compile(r"\{(\d{1,12})\.\.(\d{1,12})\}")
MAX_EXPANDED: Final = 1 << 20
"""Files that braces may stand for."""


class Url(PosixPath):
    """A URL, with the parts and the operators of a path."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def scheme(self) -> str:
        """Scheme of the URL, such as `s3`."""
        return self.parts[0].removesuffix(":")

    @property
    def store(self) -> str:
        """What names the store: a bucket, a host."""
        return "/".join(self.parts[1 : 1 + SCHEMES[self.scheme].store_parts])

    @property
    def key(self) -> str:
        """The path within the store, without a slash before it."""
        return "/".join(self.parts[1 + SCHEMES[self.scheme].store_parts :])


def as_url(path: PurePath) -> Url | None:
    """Return a path as a `Url` where it begins with a scheme that is known; None where it does not."""
    if isinstance(path, Url):
        return path
    found = _URL.fullmatch(str(path))
    if found is None or found[1].lower() not in SCHEMES:
        return None
    return Url(f"{found[1].lower()}:/{found[2]}")


def location(path: Path) -> Path:
    """Return the path of a dataset as it is, or as a `Url` where it is one.

    Raises:
        DatasetError: the URL has a user, a password, or a query (each may be a secret), or names no store.
            The message repeats no secret.
    """
    url = as_url(path)
    if url is None or isinstance(path, Url):
        return path
    scheme, text = url.scheme, str(url)
    has_user = len(url.parts) > 1 and "@" in url.parts[1]
    if has_user or "?" in text:
        what = "a user or password" if has_user else "a query"
        raise DatasetError(
            f"a {scheme}:// URL has {what}, which jobs, logs and errors would show; leave it out, and give credentials"
            " by the environment or the files that the store's own tools read"
        )
    if len(url.parts) < 1 + SCHEMES[scheme].store_parts or ".." in url.parts:
        raise DatasetError(f"{url} names no dataset; {SCHEMES[scheme].example} is required")
    return url


def is_url(path: Path) -> bool:
    """Return whether `location` made a URL of a path."""
    return isinstance(path, Url)


def expanded(path: Path) -> tuple[Path, list[str]] | None:
    """The folder and the names that braces stand for, as in `https://host/laion/{00000..00099}.tar`; None without any.

    Raises:
        DatasetError: they stand for too many files, or none.
    """
    if not isinstance(path, Url) or not _BRACES.search(path.key):
        return None
    parts = path.parts
    first = next(number for number, part in enumerate(parts) if _BRACES.search(part))
    try:
        names = written_out("/".join(parts[first:]), MAX_EXPANDED)
    except ValueError as error:
        raise DatasetError(f"{path}: {error}") from None
    if len(set(names)) < len(names):
        raise DatasetError(f"{path} names a shard twice; name each once")
    return Url(*parts[:first]), names


def written_out(pattern: str, most: int) -> list[str]:
    """Return the names that a pattern with ranges such as `{000..009}` stands for, in order.

    Raises:
        ValueError: a range counts nothing, or they would be more than `most`.
    """
    pieces = _BRACES.split(pattern)
    bounds = [(int(low), int(high)) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
    if empty := next(((low, high) for low, high in bounds if high < low), None):
        raise ValueError(f"{{{empty[0]}..{empty[1]}}} counts no files")
    if prod(high - low + 1 for low, high in bounds) > most:
        raise ValueError(f"it stands for more than {most} files; split the dataset")
    ranges = [
        [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        for low, high in zip(pieces[1::3], pieces[2::3], strict=True)
    ]
    return ["".join(a + b for a, b in zip(pieces[0::3], (*chosen, ""), strict=True)) for chosen in product(*ranges)]
