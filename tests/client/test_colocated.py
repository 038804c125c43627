"""What a trainer with colocated modules would do with its views: exchange rows between phases, whatever microbatch."""

from pathlib import Path

import torch
from serving.harness import index, running
from shards import write_interleaved, write_pairs
from torch import Tensor

from trainclient.client import Batch, DataClient

RANKS, STEPS, MERGED = 3, 2, 4
JOB = {
    "stream": {
        "datasets": [{"name": "pairs"}, {"name": "docs"}],
        "seq_len": 512,
        "global_batch": 12,
        "sizing": {"max_patches": 256},
        "generation": {"ratio": "0"},
    },
    "execution": {
        "modules": [
            {"name": "vit", "kind": "encoder", "dp": RANKS, "datasets": ["docs"]},
            {"name": "vit-pairs", "kind": "encoder", "dp": RANKS, "padded": True},
            {"name": "llm", "kind": "backbone", "dp": RANKS},
        ],
        "layout": {"kind": "colocated", "ranks_per_node": 2},
        "end": {"steps": STEPS},
    },
}
View = tuple[str, int, int, int]
"""Module, rank, step, microbatch."""


def views(folder: Path) -> dict[View, Batch]:
    folders = {
        "pairs": index(write_pairs(folder / "pairs", 40, 16, seed=1)),
        "docs": index(write_interleaved(folder / "docs", 24, 8, seed=2)),
    }
    found: dict[View, Batch] = {}
    with running(folders) as server:
        for module in ("vit", "vit-pairs", "llm"):
            for rank in range(RANKS):
                with DataClient(server.address, JOB, module, rank) as client:
                    found.update({(module, rank, b.step, b.microbatch): b for b in client})
    return found


def sent(batches: dict[View, Batch]) -> dict[View, Tensor]:
    """Encoders forward, then the all-to-all as the senders have it: the embeddings of each backbone microbatch."""
    received = {
        v: torch.full((len(b.tensors["embedding_slots"]), 588), -1.0) for v, b in batches.items() if v[0] == "llm"
    }
    for (module, _, step, _), batch in batches.items():
        if module == "llm":
            continue
        rows = batch.tensors["patches"].float().unflatten(0, (-1, MERGED)).mean(1)
        (routing,) = batch.routings
        columns = (
            routing.source_start,
            routing.target_rank,
            routing.target_microbatch,
            routing.target_start,
            routing.rows,
        )
        for start, rank, microbatch, to, count in zip(*(c.tolist() for c in columns), strict=True):
            received["llm", rank, step, microbatch][to : to + count] = rows[start : start + count]
    return received


def fetched(batches: dict[View, Batch]) -> dict[View, Tensor]:
    """The same as the receivers have it."""
    found = {}
    for view, batch in batches.items():
        if view[0] != "llm":
            continue
        found[view] = torch.full((len(batch.tensors["embedding_slots"]), 588), -1.0)
        for r in batch.routings:
            columns = (r.source_rank, r.source_microbatch, r.source_start, r.target_start, r.rows)
            for rank, microbatch, start, to, count in zip(*(c.tolist() for c in columns), strict=True):
                patches = batches[r.source_module, rank, view[2], microbatch].tensors["patches"]
                rows = patches.float().unflatten(0, (-1, MERGED)).mean(1)
                found[view][to : to + count] = rows[start : start + count]
    return found


def test_senders_and_receivers_agree_on_every_row(tmp_path: Path) -> None:
    batches = views(tmp_path)
    one, other = sent(batches), fetched(batches)
    assert one.keys() == other.keys()
    assert sum(len(rows) for rows in one.values()) > 100
    for view, rows in one.items():
        assert torch.equal(rows, other[view])
        assert (rows >= 0).all(), "a slot of the backbone that no encoder fills"
    assert {b.num_microbatches for b in batches.values() if b.step == 0} == {batches["llm", 0, 0, 0].num_microbatches}
    apart = [r for b in batches.values() for r in b.routings if (r.source_microbatch != r.target_microbatch).any()]
    assert apart, "every image stayed in the microbatch of its sequence"
    held = batches["llm", 0, 0, 0]
    in_flight = {s.module: s.in_flight.tolist() for s in held.schedules}
    assert in_flight == {"vit": [held.num_microbatches], "vit-pairs": [held.num_microbatches], "llm": [1]}
