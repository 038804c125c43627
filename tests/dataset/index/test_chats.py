"""Conversations of files in an index, whatever their form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import make_image, write_tar

from dataserver.dataset import Conversations, Dataset, IndexRules, build_index, lint
from dataserver.dataset.index.chat_counts import CHAT_COLUMN

PNG = make_image(np.random.default_rng(0), 8, 8)
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<image>"}'}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "from": None, "value": None},
    {"role": "assistant", "content": "ho"},
]


def index(path: Path) -> tuple[list[Any], dict[str, int]]:
    """The messages of each sample, and what was found."""
    report = build_index(path, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
    (shard,) = Dataset.open(path, may_be_empty=True).shards
    return [json.loads(chat)[0] for chat in shard.column(CHAT_COLUMN).to_pylist()], dict(report.findings)


@pytest.mark.parametrize("form", ["tar", "manifest", "parquet"])
def test_calls_without_content_are_messages(tmp_path: Path, form: str) -> None:
    if form == "tar":
        write_tar(tmp_path / "0.tar", [("a.json", json.dumps({"messages": CALLING}).encode())])
    elif form == "manifest":
        (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CALLING}))
    else:
        pq.write_table(pa.Table.from_pylist([{"messages": CALLING}]), tmp_path / "data.parquet", compression="none")
    (messages,), findings = index(tmp_path)
    assert not findings
    function = {"name": "look", "arguments": {"at": "<image>"}}
    assert messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "ho"},
    ]
    (shard,) = Dataset.open(tmp_path).shards
    assert shard.parts(0).texts == (
        'user: hi\nassistant: {"name": "look", "arguments": {"at": "<image>"}}\ntool: 3\nassistant: ho',
    )


def test_images_that_no_entry_names(tmp_path: Path) -> None:
    """An empty list names none, so that all images count; of a list that names some, the others are told."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    members = []
    for key, images in (("a", []), ("b", ["b.1.png"]), ("c", ["elsewhere/c.png"])):
        members += [(f"{key}.0.png", PNG), (f"{key}.1.png", PNG)]
        members.append((f"{key}.json", json.dumps({"messages": said, "images": images}).encode()))
    write_tar(tmp_path / "0.tar", members)
    messages, findings = index(tmp_path)
    assert [str(found).count("'type': 'image'") for found in messages] == [2, 1, 2]
    assert findings == {"unused_part": 1}
    (finding,) = lint(tmp_path).findings
    assert (finding.key, finding.detail) == (
        "b",
        "its entry images does not name .0.png; the conversation goes without",
    )
