"""The transforms of users that `dataserver index` applies to texts and metadata."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dataserver.assembly import Tokenizer
from dataserver.cli.progress import progress_bar
from dataserver.dataset import Part, TextTokenizer, TransformingTokenizer, derive_columns
from dataserver.planning.job.fields import InstalledTransform, key_of
from dataserver.transforms import Kind, TransformPool, parse_transform


@dataclass(frozen=True, slots=True)
class AppliedTransforms:
    """Those that the flags name, by their kinds."""

    pool: TransformPool
    texts: tuple[InstalledTransform, ...]
    """A chain, in the order of the flags."""
    metadata: tuple[InstalledTransform, ...]

    @classmethod
    def of(cls, entries: tuple[str, ...]) -> "AppliedTransforms":
        """Find and import what entries NAME=VERSION:OPTIONS name.

        Raises:
            ValueError: an entry is something else, or names one twice.
            TransformError: one is not installed, is one of pixels, or cannot be imported.
        """
        wanted = [parse_transform(entry) for entry in entries]
        named = {one.name: one.version for one in wanted}
        if len(named) < len(wanted):
            raise ValueError(f"--transform names one of {sorted(named)} twice; give each name once")
        pool = TransformPool.of(named, kinds=(Kind.METADATA, Kind.TEXT))
        pool.check()
        by_kind = {kind: tuple(one for one in wanted if pool.installed[one.name].kind is kind) for kind in Kind}
        return cls(pool, by_kind[Kind.TEXT], by_kind[Kind.METADATA])

    def to(self, tokenizer: Tokenizer) -> Iterator[tuple[TextTokenizer, str]]:
        """The tokenizer, and with transforms of text the one that applies them first; each with their key."""
        yield tokenizer, ""
        if self.texts:
            yield TransformingTokenizer(tokenizer, self.pool, self.texts), key_of(self.texts)

    def derive(self, path: Path, index_dir: Path | None, part: Part) -> None:
        """Apply the transforms of metadata to an indexed dataset, and print what they did. Raises DatasetError."""
        for wanted in self.metadata:
            with progress_bar(f"transforming metadata ({wanted.name})") as report:
                found = derive_columns(path, self.pool, wanted, index_dir, report, part)
            counts = f"{found.num_left_out} samples left out, {found.num_made} shards transformed now"
            print(f"  metadata     {counts} ({wanted.key()})")
