"""Jobs and indexes: a set of shards that grew, and servers whose indexes follow different rules."""

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from serving.harness import VIEWS, index, job_data, reason_of, running
from shards import write_pairs, write_tar, write_texts

from dataserver.assembly import load_tokenizer
from dataserver.dataset import IndexRules, OnTokenError, TextOnly, TruncatedImages, build_index, count_tokens
from dataserver.jobs import fill_job

TEXT_JOB: dict[str, Any] = {"datasets": [{"name": "d"}], "end": {"epochs": 1}, "generation": {"ratio": "0"}}


def test_a_job_goes_on_with_the_old_set_after_shards_were_added(tmp_path: Path) -> None:
    """Same stream, same bytes; a new job gets all shards."""
    folder = index(write_texts(tmp_path / "d", 24, 8))
    with running({"d": folder}) as server:
        job = fill_job(job_data(**TEXT_JOB), server.catalog)
        created = server.create(job)
        before = [server.read(created.job_id, "llm", rank).blob() for rank in range(2)]
    write_tar(folder / "00001-new.tar", [(f"n{i}.txt", b"new words") for i in range(9)])
    index(folder)
    with running({"d": folder}) as server:
        again = server.create(job)
        assert (again.job_id, again.stream_id) == (created.job_id, created.stream_id)
        assert [server.read(again.job_id, "llm", rank).blob() for rank in range(2)] == before
        newer = server.create(job_data(**TEXT_JOB))
        assert newer.stream_id != created.stream_id
        served = {
            n
            for rank in range(2)
            for header, _ in server.read(newer.job_id, "llm", rank).microbatches
            for n in header.items.sample
        }
        assert len(served) == 24 + 9


def test_an_index_that_is_deleted_under_a_server_costs_a_clear_error_and_no_byte(tmp_path: Path) -> None:
    """Views of images need what is read already; token ids are read as texts are wanted."""
    folder, whole = index(write_pairs(tmp_path / "d", 48, 8)), job_data(datasets=[{"name": "pairs"}])
    with running({"pairs": folder}) as server:
        job_id = server.create(whole).job_id
        before = {view: server.read(job_id, *view).blob() for view in VIEWS}
    with running({"pairs": folder}) as server:
        job_id = server.create(whole).job_id
        for file in folder.glob("*.tar.*"):
            file.unlink()
        for module, rank in VIEWS:
            if module == "llm":
                with pytest.raises(grpc.RpcError) as caught:
                    server.read(job_id, module, rank)
                _, reason, action, message = reason_of(caught.value)
                assert (reason, action) == ("TOKENS_NOT_COUNTED", "ANOTHER_SERVER")
                assert "00000.tar" in message
            else:
                assert server.read(job_id, module, rank).blob() == before[module, rank]


RULES = {
    "text-only": IndexRules(TextOnly.ALLOW),
    "on-token-error": IndexRules(on_token_error=OnTokenError.SKIP),
    "truncated-images": IndexRules(truncated_images=TruncatedImages.ACCEPT),
}


@pytest.mark.parametrize("name", RULES)
def test_a_server_whose_index_follows_other_rules_refuses_the_job_by_name(tmp_path: Path, name: str) -> None:
    one = index(write_texts(tmp_path / "one", 8, 8))
    shutil.copytree(one, tmp_path / "two")
    build_index(tmp_path / "two", workers=1, rules=RULES[name])
    count_tokens(tmp_path / "two", load_tokenizer("bytes"))
    with running({"d": one}) as first, running({"d": tmp_path / "two"}) as second:
        job = fill_job(job_data(**TEXT_JOB), first.catalog)
        assert first.create(job).stream_id
        with pytest.raises(grpc.RpcError) as caught:
            second.create(job)
        status, reason, action, message = reason_of(caught.value)
        assert (status, reason, action) == (grpc.StatusCode.FAILED_PRECONDITION, "DATASET_MISMATCH", "ANOTHER_SERVER")
        assert "dataset 'd' of the job has fingerprint" in message
