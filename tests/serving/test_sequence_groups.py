"""Ranks that share sequences, over a real server: peers receive the same bytes, idle ranks empty views."""

from itertools import product
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.microbatch_pb2 import MicrobatchHeader
from serving.harness import TIMEOUT_S, Received, job_data, reason_of, running, tensors

STEPS, RANKS = 3, 8


LAYOUT = {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 10**9}]}
"""Groups of two exchange so dearly that only samples that one rank cannot hold are shared."""


def modules(units: int) -> list[dict[str, Any]]:
    """`units` tokens fit on each of the ranks of the backbone."""
    backbone = {
        "name": "llm",
        "kind": "backbone",
        "dp": RANKS,
        "memory": {"budget_bytes": units * 1000, "unit_bytes": 1000},
    }
    return [{"name": "vit", "kind": "encoder", "dp": 2}, backbone, {"name": "gen", "kind": "generator"}]


class Served:
    """All streams of a job, and its plans."""

    def __init__(self, datasets: dict[str, Path], packed: bool) -> None:
        data = job_data(
            modules=modules(300),
            layout=LAYOUT,
            global_batch=5,
            packing={"enabled": packed},
            end={"steps": STEPS},
            seq_len=512,
        )
        with running(datasets) as server:
            job_id = server.create(data).job_id
            degrees = {"vit": 2, "llm": RANKS, "gen": 1}
            self.of: dict[tuple[str, int], Received] = {
                (name, r): server.read(job_id, name, r) for name, dp in degrees.items() for r in range(dp)
            }
            names = ["labels", "token_ids"]
            self.of_some = server.read(job_id, "llm", 0, tensors=names)
            self.shared = [server.read(job_id, "llm", r, share_fetch=True, tensors=names) for r in range(RANKS)]
            self.alone = server.read(job_id, "vit", share_fetch=True)
            self.plans = [
                server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id, step=step), timeout=TIMEOUT_S).plan
                for step in range(STEPS)
            ]

    def backbone(self, rank: int) -> list[tuple[Any, dict[str, np.ndarray]]]:
        """Header and tensors of every microbatch of a backbone rank."""
        return [(header, tensors(header, body)) for header, body in self.of["llm", rank].microbatches]


@pytest.fixture(scope="module", params=[False, True], ids=["one sample a sequence", "packed"])
def served(datasets: dict[str, Path], request: pytest.FixtureRequest) -> Served:
    return Served(datasets, request.param)


def test_peers_receive_the_same_bytes_and_idle_ranks_empty_views(served: Served) -> None:
    shared = idle = 0
    for number in range(len(served.of["llm", 0].microbatches)):
        blobs = [served.of["llm", r].blob()[number] for r in range(RANKS)]
        header = served.of["llm", 0].microbatches[number][0]
        groups = [list(g.ranks) for g in header.sequence_parallel_groups]
        assert [r for ranks in groups for r in ranks] == list(range(RANKS))
        for ranks in groups:
            assert all(blobs[r] == blobs[ranks[0]] for r in ranks)
            mine, views = served.backbone(ranks[0])[number]
            assert len(views["cu_sequences"]) == len(mine.sequence_valid) + 1
            assert views["cu_sequences"][-1] == views["cu_lengths"][-1] == len(views["token_ids"])
            assert (np.diff(views["cu_sequences"]) > 0).tolist() == list(mine.sequence_valid)
            assert len(views["token_ids"]) <= 300 * len(ranks)
            if len(ranks) > 1 and len(views["token_ids"]):
                shared += 1
            if not len(views["token_ids"]):
                idle += 1
                assert not mine.items.sample
                assert not any(mine.sequence_valid)
                assert all(not routing.rows for routing in mine.routings)
    assert shared
    assert idle


def test_ranks_of_a_group_share_one_fetch(served: Served) -> None:
    """They take turns; the others get the same header but for the checksum, and no chunk."""
    assert served.alone.blob() == served.of["vit", 0].blob()
    scheduler, withheld = set(), 0
    for number, (whole, body) in enumerate(served.of_some.microbatches):
        views = [served.shared[r].microbatches[number] for r in range(RANKS)]
        for group in whole.sequence_parallel_groups:
            assert group.reader == group.ranks[(whole.step + whole.microbatch) % group.degree]
            scheduler.add(group.reader - group.ranks[0])
            for rank in group.ranks:
                header, mine = views[rank][0], views[group.reader][0]
                assert header.withheld == (rank != group.reader)
                same = MicrobatchHeader.FromString(header.SerializeToString())
                same.withheld, same.crc32c = False, mine.crc32c
                assert same == mine
                withheld += header.withheld
        first = whole.sequence_parallel_groups[0]
        assert views[first.reader] == (whole, body)
    assert scheduler == {0, 1}
    assert withheld


def test_all_ranks_have_the_same_microbatches_and_every_sample_is_served_once(served: Served) -> None:
    steps = {
        key: [(h.step, h.microbatch, h.num_microbatches) for h, _ in r.microbatches] for key, r in served.of.items()
    }
    assert len({tuple(found) for found in steps.values()}) == 1
    for step, plan in enumerate(served.plans):
        found = []
        for rank in range(RANKS):
            for header, _ in served.of["llm", rank].microbatches:
                firsts = {g.ranks[0] for g in header.sequence_parallel_groups}
                if header.step == step and rank in firsts:
                    found += list(zip(header.items.dataset, header.items.sample, strict=True))
        assert sorted(found) == sorted(zip(plan.samples.dataset, plan.samples.sample, strict=True))
        assert sum(plan.groups.degree) == RANKS * plan.num_microbatches
        assert "llm" in {decision.subject for decision in plan.decisions}


def test_rows_of_the_encoder_fill_the_slots_of_every_group(served: Served) -> None:
    for rank, number in product(range(RANKS), range(len(served.of["llm", 0].microbatches))):
        header, views = served.backbone(rank)[number]
        first = next(g.ranks[0] for g in header.sequence_parallel_groups if rank in g.ranks)
        rows = np.zeros(len(views["embedding_slots"]), np.int64)
        for routing in header.routings:
            if routing.target_module == "llm":
                assert set(routing.target_rank) <= {first}
                for start, count in zip(routing.target_start, routing.rows, strict=True):
                    rows[start : start + count] += 1
        assert (rows == 1).all()


def test_a_sample_that_no_group_holds_is_named_when_the_job_is_created(datasets: dict[str, Path]) -> None:
    with running(datasets) as server, pytest.raises(grpc.RpcError) as caught:
        server.create(job_data(modules=modules(40), layout=LAYOUT))
    code, reason, action, details = reason_of(caught.value)
    assert (code, reason, action) == (grpc.StatusCode.INVALID_ARGUMENT, "SAMPLE_TOO_LARGE", "GIVE_UP")
    assert details.startswith("dataset pairs, shard 00000.tar, row ")
    assert "the memory of 2 ranks of module llm holds 80" in details
    assert "raise layout.max_degree" in details


def test_groups_that_cannot_make_up_the_ranks_are_refused(datasets: dict[str, Path]) -> None:
    wrong = modules(300)
    wrong[1]["dp"] = 7
    with running(datasets) as server, pytest.raises(grpc.RpcError) as caught:
        server.create(job_data(modules=wrong, layout=LAYOUT))
    code, reason, _, details = reason_of(caught.value)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "JOB_INVALID")
    assert "dp 7 and groups up to 2 ranks" in details
