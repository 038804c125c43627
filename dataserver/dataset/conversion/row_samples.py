"""The rows of a table as samples of a tar."""

from collections.abc import Iterator, Sequence

from dataserver.dataset.conversion.mds_values import MdsColumn
from dataserver.dataset.conversion.tar_samples import tar_key, tar_sample
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import Findings
from dataserver.dataset.kinds import UNUSABLE_COLUMN
from dataserver.dataset.shards.parquet.format import ImageColumn
from dataserver.dataset.shards.parts import Value
from dataserver.dataset.shards.row_members import Row, row_members


class RowSamples:
    """Makes a sample of each row of a table some of whose columns hold images."""

    def __init__(self, columns: Sequence[ImageColumn | MdsColumn], findings: Findings) -> None:
        self._columns = columns
        self._findings = findings
        self._keys: set[str] = set()
        self._seen: set[int] = set()
        """Columns that held an image."""

    def of(self, number: int, row: Row, images: Sequence[Sequence[Value | bytes]]) -> Iterator[Members]:
        """Yield the members of a row, given the images in each column, if it becomes a sample."""
        self._seen |= {n for n, found in enumerate(images) if any(one is not None for one in found)}
        row = row._replace(key=tar_key(row.key))
        members = row_members(number, row, self._columns, images, self._keys, self._findings, keeps_documents=True)
        if sample := tar_sample([*members], self._findings):
            yield sample

    def report(self) -> None:
        """Count the columns that held no image and do not claim to."""
        for n, column in enumerate(self._columns):
            if not (column.is_image or n in self._seen):
                self._findings.add("", UNUSABLE_COLUMN, f"{column.name}: a column of bytes that are no images")
