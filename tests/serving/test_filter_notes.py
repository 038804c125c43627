"""A filter says how many samples it drops for a null when a job is created: the server in its log, and its answer."""

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from serving.harness import index, job_data, running
from shards import write_pairs

from trainclient.client import DataClient


def test_a_filter_says_what_it_drops_for_nulls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_pairs(tmp_path / "d", 24, 12)
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        values = pa.array([None if n % 3 == 0 else 0.1 + n for n in range(12)])
        pq.write_table(table.set_column(table.schema.get_field_index("punsafe"), "punsafe", values), path)
    index(folder)

    def job(condition: str) -> dict[str, Any]:
        return job_data(datasets=[{"name": "d", "filter": condition}], generation={"ratio": "0"}, end={"epochs": 1})

    note = "dataset 'd': the filter 'punsafe < 9' leaves 12 of 24 samples; 8 are dropped because a column of it is null"
    with running({"d": folder}) as server, caplog.at_level(logging.WARNING):
        assert list(server.create(job("punsafe < 9")).notes) == [note]
        assert [r.name for r in caplog.records if note in r.getMessage()] == ["dataserver.serving.registry"]
        assert not list(server.create(job("width > 0")).notes)
        for module, rank in (("vit", 0), ("vit", 1), ("llm", 0)):
            with DataClient(server.address, job("punsafe < 9"), module, rank) as client:
                assert client.job
        said = [r.name for r in caplog.records if note in r.getMessage()]
        assert said.count("trainclient.stream.jobs") == 1, "of many ranks one says it"
