"""Clips beside images over a real server: an encoder for each, one backbone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audio.datasets import write_audio
from audio.jobs import AUDIO, audio_job
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from serving.harness import TIMEOUT_S, Running, running, tensors

from dataserver.audio import AudioShape, decode_mel
from dataserver.dataset import Dataset
from dataserver.planning.job.fields import AudioSizing
from dataserver.planning.stream.samples import ROW_BITS

pytest.importorskip("soundfile", reason="the extra audio is not installed")
DEGREES = {"vit": 1, "ears": 2, "llm": 2}
STEPS = 2
Item = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_audio(tmp_path_factory.mktemp("heard"))


class Views:
    """Every view of a job, decoded."""

    def __init__(self, server: Running, data: dict[str, Any]) -> None:
        self.dataset: Dataset = server.catalog.datasets["heard"]
        job_id = server.create(data).job_id
        self.of = [
            (name, rank, header, tensors(header, body))
            for name, dp in DEGREES.items()
            for rank in range(dp)
            for header, body in server.read(job_id, name, rank).microbatches
        ]
        self.plans = [
            server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id, step=step), timeout=TIMEOUT_S).plan
            for step in range(STEPS)
        ]

    def ref(self, item: Item) -> Any:
        shard, row = divmod(item[2], 1 << ROW_BITS)
        return self.dataset.shards[shard].image(row, item[3])


@pytest.fixture(scope="module")
def views(folder: Path) -> Views:
    with running({"heard": folder}) as server:
        return Views(server, audio_job())


def items(header: microbatch_pb2.MicrobatchHeader) -> list[Item]:
    found = header.items
    return list(zip(found.dataset, found.epoch, found.sample, found.image, strict=True))


def test_each_encoder_gets_every_item_of_its_modality_once(views: Views) -> None:
    for step, plan in enumerate(views.plans):
        s = plan.samples
        samples = zip(s.dataset, s.epoch, s.sample, s.images, strict=True)
        planned = {(d, e, n, i) for d, e, n, count in samples for i in range(count)}
        served = {
            name: [item for n, _, header, _ in views.of if (n, header.step) == (name, step) for item in items(header)]
            for name in ("vit", "ears")
        }
        assert sorted(served["vit"] + served["ears"]) == sorted(planned)
        assert {views.ref(item).is_audio for item in served["ears"]} == {True}
        assert {views.ref(item).is_audio for item in served["vit"]} == {False}


def test_spectrograms_are_those_of_the_stored_clips(views: Views) -> None:
    count, cut = 0, 0
    for name, _, header, found in views.of:
        if name != "ears":
            continue
        assert found["mel"].dtype == np.float32
        assert set(header.items.validity) <= {microbatch_pb2.VALIDITY_VALID}
        for n, item in enumerate(items(header)):
            ref = views.ref(item)
            first, end = found["cu_frames"][n : n + 2]
            expected = np.empty((end - first, 80), np.float32)
            shape = AudioShape(ref.width, ref.height, ref.orientation)
            assert decode_mel(views.dataset.read(ref), shape, AudioSizing(**AUDIO), expected)
            assert np.array_equal(found["mel"][first:end], expected)
            samples = -(-ref.width * 16_000 // ref.height)
            frames = min(200, max(3, -(-samples // 160)))
            positions = (frames - 1) // 2 + 1
            assert np.diff(found["cu_positions"])[n] == positions
            assert np.diff(found["cu_rows"])[n] == positions // 2
            count, cut = count + 1, cut + (ref.width > 2 * ref.height)
    assert count > 20
    assert cut


def test_routings_of_both_encoders_fill_every_slot_once(views: Views) -> None:
    rows_from = dict.fromkeys(("vit", "ears"), 0)
    for name, rank, header, found in views.of:
        if name != "llm":
            continue
        filled = np.zeros(len(found["embedding_slots"]), np.int64)
        for routing in header.routings:
            for target, start, rows in zip(routing.target_rank, routing.target_start, routing.rows, strict=True):
                assert target == rank
                filled[start : start + rows] += 1
            rows_from[routing.source_module] += sum(routing.rows)
        assert (filled == 1).all()
    assert all(rows_from.values())
    sent = sum(int(found["cu_rows"][-1]) for name, _, _, found in views.of if name == "ears")
    assert rows_from["ears"] == sent


def test_backbone_alone_says_unknown_or_decodes_exactly(folder: Path) -> None:
    with running({"heard": folder}) as server:
        for policy, expected in ((None, {1}), ("exact", {2})):
            job_id = server.create(audio_job(**({"validity": policy} if policy else {}))).job_id
            found = [v for rank in (0, 1) for h, _ in server.read(job_id, "llm", rank).microbatches
                     for v in h.items.validity]  # fmt: skip
            assert set(found) == expected
