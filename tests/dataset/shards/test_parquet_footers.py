"""Footers of Parquet that lie are refused before pyarrow, which some of them would end together with the process."""

import subprocess
import sys
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataserver.dataset.shards.parquet.footer import check_footer
from dataserver.dataset.shards.parquet.stored import open_parquet

REFUSALS = {
    "an unknown codec for column",
    "two types for column",
    "size statistics that do not fit column",
}
FOOTERS = 3_000


def write(path: Path) -> bytes:
    table = pa.table({"key": ["a", "b"], "width": [1, None], "tags": [["x"], []]})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    return path.read_bytes()


def damaged(content: bytes, seed: int) -> bytes:
    """With up to four other bytes in its footer."""
    draw, found = Random(seed), bytearray(content)
    footer = int.from_bytes(content[-8:-4], "little")
    for _ in range(draw.randint(1, 4)):
        found[draw.randrange(len(found) - 8 - footer, len(found) - 8)] = draw.randrange(256)
    return bytes(found)


def ask(path: Path) -> str:
    """Everything that is asked of column chunks; why the file is refused, or nothing."""
    try:
        with open_parquet(path) as opened:
            metadata = opened.parquet.metadata
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                for chunk in map(group.column, range(metadata.num_columns)):
                    assert chunk.compression
                    assert chunk.num_values is not None
                    if chunk.statistics is not None and chunk.statistics.has_min_max:
                        chunk.statistics.min, chunk.statistics.max  # noqa: B018
    except (ValueError, OSError, pa.ArrowException) as error:
        return str(error)
    return ""


def main() -> None:
    path = Path(sys.argv[1])
    content = path.read_bytes()
    for seed in range(FOOTERS):
        path.write_bytes(damaged(content, seed))
        sys.stdout.write(f"{ask(path)}\n")
        sys.stdout.flush()


def test_whole_footers_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    assert ask(tmp_path / "a.parquet") == ""


def test_damaged_footers_end_no_process(tmp_path: Path) -> None:
    """Without the check one in some hundred aborts inside pyarrow."""
    path = tmp_path / "a.parquet"
    write(path)
    done = subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    for refusal in REFUSALS:
        assert refusal in done.stdout
    assert done.stdout.startswith("\n") or "\n\n" in done.stdout, "some damage is none to the chunks"


def test_row_groups_have_the_columns_of_the_schema(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    pq.write_table(pa.table({name: ["a"] for name in ("key", "width", "tags", "more")}), tmp_path / "b.parquet")
    schema = pq.ParquetFile(tmp_path / "b.parquet").schema
    with (
        pa.OSFile(str(tmp_path / "a.parquet")) as handle,
        pytest.raises(ValueError, match="a row group with more or fewer columns than its schema"),
    ):
        check_footer(handle, schema)


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_cut_files_are_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(write(path)[:-cut])
    assert ask(path)


if __name__ == "__main__":
    main()
