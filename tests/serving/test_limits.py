"""What a server says of a job that no plan could serve, before the job begins."""

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import TIMEOUT_S, Running, index, job_data, reason_of, running
from shards import write_pairs, write_texts

from dataserver.jobs import fill_job

CODE = grpc.StatusCode
TOO_LARGE = (CODE.INVALID_ARGUMENT, "SAMPLE_TOO_LARGE", "GIVE_UP")
INVALID = (CODE.INVALID_ARGUMENT, "JOB_INVALID", "GIVE_UP")


def refusal(server: Running, **changes: Any) -> tuple[tuple[grpc.StatusCode, str, str], str]:
    """Status, reason and action, and the text."""
    text = json.dumps(fill_job(job_data(**changes), server.catalog))
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S)
    *status, details = reason_of(caught.value)
    return (status[0], status[1], status[2]), details


def modules(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Encoder, backbone and generator with changed fields, by name."""
    base = [
        {"name": "vit", "kind": "encoder"},
        {"name": "llm", "kind": "backbone"},
        {"name": "gen", "kind": "generator"},
    ]
    return [{**m, **changes.get(m["name"], {})} for m in base]


def memory(units: int) -> dict[str, Any]:
    return {"memory": {"budget_bytes": units * 1000, "unit_bytes": 1000}}


@pytest.mark.parametrize(
    ("name", "units", "size", "remedy"),
    [
        ("vit", 16, "patches of an image", "lower stream.sizing.max_patches"),
        ("gen", 16, "patches of an image", "lower stream.sizing.max_patches"),
        ("llm", 40, "tokens", "lower stream.seq_len"),
    ],
)
def test_what_exceeds_the_memory_of_a_module_is_named(
    server: Running, name: str, units: int, size: str, remedy: str
) -> None:
    status, details = refusal(server, modules=modules(**{name: memory(units)}))
    assert status == TOO_LARGE
    assert details.startswith("dataset pairs, shard 00000.tar, row ")
    assert f" {size}, but the memory of a rank of module {name} holds {units} (" in details
    assert f"raise memory.budget_bytes of the module, {remedy}, or leave such samples out with a filter" in details


def test_the_largest_group_of_ranks_must_hold_a_sample(server: Running) -> None:
    groups = {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 5}]}
    status, details = refusal(server, modules=modules(llm={"dp": 2, **memory(20)}), layout=groups)
    assert status == TOO_LARGE
    assert "the memory of 2 ranks of module llm holds 40 (" in details
    assert "raise layout.max_degree" in details


def test_memory_that_holds_every_sample_is_no_reason(server: Running) -> None:
    roomy = {name: memory(10_000) for name in ("vit", "llm", "gen")}
    assert server.create(job_data(modules=modules(**roomy))).num_steps == 4


def test_images_of_a_dataset_that_no_module_handles(server: Running) -> None:
    status, details = refusal(server, modules=modules(vit={"datasets": ["pairs"]}))
    assert status == INVALID
    assert details.startswith("dataset docs, shard 00000.tar, row ")
    assert (
        "but no module of kind encoder handles dataset docs; add one, name the dataset in the datasets of one"
        in details
    )
    status, details = refusal(server, modules=modules(gen={"datasets": ["docs"]}))
    assert status == INVALID
    assert details.startswith(
        "dataset pairs, shard 00000.tar, row 0: the sample has images to generate (16 such samples"
    )
    assert "no module of kind generator handles dataset pairs" in details


def test_the_images_of_a_document_must_fit_one_wave(server: Running) -> None:
    vit = {"memory": {"budget_bytes": 256, "unit_bytes": 1}}
    status, details = refusal(server, modules=modules(vit=vit))
    assert status == TOO_LARGE
    assert details.startswith("dataset docs, shard 0000")
    assert "images, which belong to one wave, have " in details
    assert (
        "but 1 rank of module vit with memory for 256 each cannot hold them; raise memory.budget_bytes or dp" in details
    )
    assert server.create(job_data(modules=modules(vit={"dp": 8, **vit}))).num_steps == 4


def towers(**changes: Any) -> dict[str, Any]:
    """A contrastive job over one dataset."""
    found = job_data(
        modules=[{"name": m, "kind": "tower", "modality": m, **changes.pop(m, {})} for m in ("image", "text")],
        contrastive_batch=4,
        packing={"enabled": False},
        generation={"ratio": "0"},
        datasets=[{"name": changes.pop("dataset", "pairs")}],
    )
    found["execution"]["layout"] = {"kind": "contrastive"}
    return found


def contrastive_refusal(server: Running, **changes: Any) -> tuple[tuple[grpc.StatusCode, str, str], str]:
    text = json.dumps(fill_job(towers(**changes), server.catalog))
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=text), timeout=TIMEOUT_S)
    *status, details = reason_of(caught.value)
    return (status[0], status[1], status[2]), details


def test_a_contrastive_sample_that_is_no_pair_is_named(server: Running) -> None:
    status, details = contrastive_refusal(server, dataset="docs")
    assert status == INVALID
    assert details.startswith("dataset docs, shard 00000.tar, row ")
    assert "for contrastive training it needs one image and some text (" in details
    assert details.endswith("leave such samples out with a filter or a quarantine list")
    assert server.create(towers()).num_steps == 4


def test_texts_without_images_are_no_pairs(tmp_path: Path) -> None:
    folders = {"pairs": index(write_pairs(tmp_path / "p", 8, 4)), "texts": index(write_texts(tmp_path / "t", 8))}
    with running(folders) as server:
        status, details = contrastive_refusal(server, dataset="texts")
        assert status == INVALID
        assert "row 0: the sample has 0 images and" in details


@pytest.mark.parametrize(("tower", "size"), [("image", "patches of an image"), ("text", "tokens")])
def test_half_a_pair_that_exceeds_the_memory_of_its_tower(server: Running, tower: str, size: str) -> None:
    status, details = contrastive_refusal(server, **{tower: memory(12)})
    assert status == TOO_LARGE
    assert f" {size}, but the memory of a rank of module {tower} holds 12 (" in details


def test_memory_that_no_plan_might_keep_is_refused_when_the_job_is_created(server: Running) -> None:
    """All samples of a contrastive batch wait for its barrier."""
    status, details = contrastive_refusal(server, image=memory(300))
    assert status == (CODE.RESOURCE_EXHAUSTED, "MICROBATCH_TOO_LARGE", "GIVE_UP")
    assert "may meet in one contrastive batch of 4 samples" in details
    assert re.search(r"on a rank of image, whose memory holds 300: raise memory.budget_bytes of image to \d+", details)
