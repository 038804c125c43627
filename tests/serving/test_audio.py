"""Clips beside images over a real server: an encoder for each, one backbone."""

from pathlib import Path

import numpy as np
import pytest
from audio.datasets import write_audio
from audio.jobs import AUDIO, audio_job
from disttrain.v1 import microbatch_pb2
from serving.every_view import EveryView, items
from serving.harness import running

from dataserver.audio import AudioShape, decode_mel
from dataserver.planning.job.fields import AudioSizing

pytest.importorskip("soundfile", reason="the extra audio is not installed")
DEGREES = {"vit": 1, "ears": 2, "llm": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_audio(tmp_path_factory.mktemp("heard"))


@pytest.fixture(scope="module")
def views(folder: Path) -> EveryView:
    with running({"heard": folder}) as server:
        return EveryView(server, "heard", audio_job(), DEGREES)


def test_each_encoder_gets_every_item_of_its_modality_once(views: EveryView) -> None:
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


def test_spectrograms_are_those_of_the_stored_clips(views: EveryView) -> None:
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


def test_routings_of_both_encoders_fill_every_slot_once(views: EveryView) -> None:
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
