"""Tars that a conversion writes: what an earlier run left goes, whatever numbers are missing."""

from pathlib import Path

import pytest

from dataserver.dataset.conversion.tar_writer import TarWriter


@pytest.mark.parametrize("fails", [False, True])
def test_tars_behind_a_gap_do_not_survive(tmp_path: Path, fails: bool) -> None:
    others = {"rows-1.tar", "rows-00007.tar.idx", "other-00003.tar"}
    for name in {*others, "rows-00001.tar", "rows-00004.tar", "rows-100000.tar"}:
        (tmp_path / name).write_bytes(b"")
    writer = TarWriter(tmp_path, "rows", 1)
    writer.add([("a.txt", b"a")])
    writer.close()
    if fails:
        writer.abandon(OSError())
    else:
        writer.remove_rest()
    assert {path.name for path in tmp_path.iterdir()} == others | (set() if fails else {"rows-00000.tar"})
