"""The state of a stream in a file of its own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainclient.adapters.state_file import STATE_FILE, read_state, write_state

STATE = {"step": 3, "stream": "x" * 1000}


def test_several_write_and_read_at_once(tmp_path: Path) -> None:
    """As Megatron's tensor-parallel peers do, and its first and last stage, which all are the first rank of data."""
    folder = tmp_path / "checkpoints"
    write_state(folder, STATE)
    with ThreadPoolExecutor(8) as threads:
        written = [threads.submit(write_state, folder, STATE) for _ in range(200)]
        read = [threads.submit(read_state, folder, "try another") for _ in range(50)]
        assert all(future.result() is None for future in written)
        assert all(future.result() == STATE for future in read)
    assert [path.name for path in folder.iterdir()] == [STATE_FILE]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "says nothing of the stream.*: try another"), ("[1]", "holds list, a mapping is required: try another")],
)
def test_what_is_no_state_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_state(tmp_path, "try another")
