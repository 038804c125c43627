"""What a trainer with several encoders and generators would do with its views."""

from pathlib import Path

import numpy as np
from serving.harness import index, running
from shards import write_interleaved, write_pairs

from trainclient.client import Batch, DataClient

DEGREES = {"vit": 2, "vit-docs": 1, "llm": 2, "gen-docs": 1, "gen": 1}
JOB = {
    "stream": {
        "datasets": [{"name": "pairs"}, {"name": "docs"}],
        "seq_len": 512,
        "global_batch": 8,
        "sizing": {"max_patches": 256},
        "generation": {"ratio": "0.4", "query_tokens": 8},
    },
    "execution": {
        "modules": [
            {"name": "vit", "kind": "encoder", "dp": 2},
            {"name": "vit-docs", "kind": "encoder", "datasets": ["docs"], "padded": True},
            {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2},
            {"name": "gen-docs", "kind": "generator", "datasets": ["docs"]},
            {"name": "gen", "kind": "generator"},
        ],
        "end": {"steps": 2},
    },
}


def test_rows_arrive_wherever_either_side_says(tmp_path: Path) -> None:
    """Senders and receivers agree on every row, and the rows of all modules fill the backbone's slots."""
    folders = {
        "pairs": index(write_pairs(tmp_path / "pairs", 40, 16, seed=1)),
        "docs": index(write_interleaved(tmp_path / "docs", 24, 8, seed=2)),
    }
    batches: dict[tuple[str, int, int, int], Batch] = {}
    with running(folders) as server:
        for module, dp in DEGREES.items():
            for rank in range(dp):
                with DataClient(server.address, JOB, module, rank) as client:
                    batches.update({(module, rank, b.step, b.microbatch): b for b in client})
    rows = {"embedding_slots": 0, "condition_slots": 0}
    for (module, rank, step, microbatch), batch in batches.items():
        assert {s.module for s in batch.schedules} == set(DEGREES)
        if module != "llm":
            continue
        for slots, encoders in (("embedding_slots", True), ("condition_slots", False)):
            ours = [r for r in batch.routings if (r.target_module == "llm") is encoders]
            assert len(ours) == 2
            filled = np.zeros(len(batch.tensors[slots]), np.int64)
            for routing in ours:
                other = routing.source_module if encoders else routing.target_module
                theirs = [batches[other, r, step, microbatch].routings[0] for r in range(DEGREES[other])]
                entries = [
                    entry
                    for r in theirs
                    for entry in zip(r.source_rank, r.source_start, r.target_rank, r.target_start, r.rows, strict=True)
                    if (entry[2] if encoders else entry[0]) == rank
                ]
                mine = zip(
                    *(
                        routing.source_rank,
                        routing.source_start,
                        routing.target_rank,
                        routing.target_start,
                        routing.rows,
                    ),
                    strict=True,
                )
                assert sorted(mine) == sorted(entries)
                for _, source, _, target, count in entries:
                    start = target if encoders else source
                    filled[start : start + count] += 1
            assert (filled == 1).all()
            rows[slots] += len(filled)
    assert min(rows.values()) > 0
