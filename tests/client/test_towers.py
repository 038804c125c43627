"""The client of a tower's rank: tensors, items and the schedule of a contrastive job."""

from pathlib import Path

import torch
from serving.harness import index, running
from shards import write_pairs

from trainclient.client import DataClient

JOB = {
    "stream": {
        "datasets": [{"name": "pairs"}],
        "seq_len": 32,
        "sizing": {"max_patches": 64},
        "global_batch": 16,
        "contrastive_batch": 8,
        "packing": {"enabled": False},
    },
    "execution": {
        "modules": [
            {"name": "image", "kind": "tower", "modality": "image", "dp": 2},
            {"name": "text", "kind": "tower", "modality": "text"},
        ],
        "layout": {"kind": "contrastive", "microbatches": 2, "schedule": "batch_sync"},
        "end": {"steps": 2},
    },
}


def test_features_of_all_towers_can_be_paired(tmp_path: Path) -> None:
    """As the proto says: sorted by the names of their items, the features of every tower are in one order."""
    with running({"pairs": index(write_pairs(tmp_path, 40, 16))}) as server:
        found: dict[str, list[tuple[int, int, tuple[int, int, int]]]] = {}
        for tower, ranks in (("image", 2), ("text", 1)):
            for rank in range(ranks):
                with DataClient(server.address, JOB, tower, rank) as client:
                    for batch in client:
                        items = batch.items
                        keys = zip(items.dataset.tolist(), items.epoch.tolist(), items.sample.tolist(), strict=True)
                        found.setdefault(tower, []).extend((batch.step, batch.microbatch // 2, key) for key in keys)
                        held = [(s.module, s.in_flight.tolist(), s.drain_every, s.chunks) for s in batch.schedules]
                        assert held == [("image", [2], 2, 1), ("text", [2], 2, 1)]
                        assert all(tensor.dtype in (torch.uint8, torch.int32) for tensor in batch.tensors.values())
    assert sorted(found["image"]) == sorted(found["text"])
    assert len(set(found["text"])) == len(found["text"]) == 32
