"""Documents in parts from a real server: headers number the parts, and plans say the same."""

from collections import defaultdict

import numpy as np
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import TIMEOUT_S, Running, job_data, tensors

MODULES = [{"name": "vit", "kind": "encoder", "dp": 2}, {"name": "llm", "kind": "backbone", "dp": 2}]


def test_headers_number_the_parts(server: Running) -> None:
    documents = {"documents": {"max_images": 1}}
    changes = {"modules": MODULES, "generation": {"ratio": "0"}, "end": {"epochs": 1}, "seq_len": 160}
    made = server.create(job_data(**changes, datasets=[{"name": "docs", **documents}], sizing={"max_patches": 64}))
    parts, images = defaultdict[int, list[int]](list), defaultdict[int, list[tuple[int, int]]](list)
    for rank in range(2):
        for header, body in server.read(made.job_id, "llm", rank).microbatches:
            items, arrays = header.items, tensors(header, body)
            assert len(items.part) == len(items.sample)
            assert (np.diff(arrays["cu_lengths"]) <= 160).all()
            for sample, part in zip(items.sample, items.part, strict=True):
                parts[sample].append(part)
        for header, _ in server.read(made.job_id, "vit", rank).microbatches:
            items = header.items
            for sample, part, image in zip(items.sample, items.part, items.image, strict=True):
                images[sample].append((image, part))
    assert len(parts) == 24
    assert all(sorted(of) == list(range(len(of))) for of in parts.values())
    assert max(map(len, parts.values())) > 3
    for sample, of in images.items():
        assert [image for image, _ in sorted(of)] == list(range(len(of)))
        numbers = [part for _, part in sorted(of)]
        assert len(set(numbers)) == len(numbers), "a part has one image"
        assert numbers == sorted(numbers)
        assert numbers[-1] < len(parts[sample])
    plan = server.stub.GetPlan(pb.GetPlanRequest(job_id=made.job_id, step=0), timeout=TIMEOUT_S).plan.samples
    assert len(plan.part) == len(plan.sample)
    assert set(plan.truncated_tokens) == {0}

    whole = server.create(job_data(**changes, datasets=[{"name": "docs"}], sizing={"max_patches": 16}))
    header, _ = server.read(whole.job_id, "llm", 0).microbatches[0]
    assert not header.items.part
    plan = server.stub.GetPlan(pb.GetPlanRequest(job_id=whole.job_id, step=0), timeout=TIMEOUT_S).plan.samples
    assert not plan.part
