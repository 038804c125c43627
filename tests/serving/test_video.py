"""Videos beside images over a real server: an encoder for each, one backbone."""

from pathlib import Path

import numpy as np
import pytest
from disttrain.v1 import microbatch_pb2
from serving.every_view import EveryView, items
from serving.harness import running
from video.datasets import write_videos
from video.jobs import VIDEO, video_job

from dataserver.planning.job.fields import Sizing, VideoSizing
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.samples import VIDEO as OF_VIDEO
from dataserver.planning.stream.video_frames import frame_groups
from dataserver.video import FrameGrid, VideoShape, decode_frames

pytest.importorskip("av", reason="the extra video is not installed")
DEGREES = {"vit": 1, "eyes": 2, "llm": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    patch_grid(64, 48, Sizing().of_frames)  # compiled here, however long that takes: servers wait for nothing
    return write_videos(tmp_path_factory.mktemp("seen"))


@pytest.fixture(scope="module")
def views(folder: Path) -> EveryView:
    with running({"seen": folder}) as server:
        return EveryView(server, "seen", video_job(), DEGREES)


def test_each_encoder_gets_every_item_of_its_modality_once(views: EveryView) -> None:
    assert len(views.info.video_digest) == 64
    for step, plan in enumerate(views.plans):
        s = plan.samples
        samples = zip(s.dataset, s.epoch, s.sample, s.images, strict=True)
        planned = {(d, e, n, i) for d, e, n, count in samples for i in range(count)}
        served = {
            name: [item for n, _, header, _ in views.of if (n, header.step) == (name, step) for item in items(header)]
            for name in ("vit", "eyes")
        }
        assert sorted(served["vit"] + served["eyes"]) == sorted(planned)
        assert {views.ref(item).modality for item in served["eyes"]} == {OF_VIDEO}
        assert {views.ref(item).modality for item in served["vit"]} == {0}


def test_patches_are_those_of_the_stored_videos(views: EveryView) -> None:
    count, several = 0, 0
    sizing, rule = Sizing(video=VideoSizing(**VIDEO)), VideoSizing(**VIDEO)
    for name, _, header, found in views.of:
        if name != "eyes":
            continue
        assert found["patches"].shape[1] == 2 * 14 * 14 * 3
        assert set(header.items.validity) <= {microbatch_pb2.VALIDITY_VALID}
        for n, item in enumerate(items(header)):
            ref = views.ref(item)
            grid = FrameGrid(
                frame_groups(ref.frames, ref.microseconds, rule), *patch_grid(ref.width, ref.height, sizing.of_frames)
            )
            assert found["grid"][n].tolist() == list(grid)
            first, end = found["cu_patches"][n : n + 2]
            expected = np.empty((end - first, 2 * 14 * 14 * 3), np.uint8)
            shape = VideoShape(ref.frames, ref.microseconds, ref.width, ref.height, ref.orientation)
            data = views.dataset.read(ref)
            assert decode_frames(data, shape, grid, sizing.of_frames, rule, expected)
            assert np.array_equal(found["patches"][first:end], expected)
            count, several = count + 1, several + (grid.groups > 1)
    assert count > 10
    assert several


def test_routings_of_both_encoders_fill_every_slot_once(views: EveryView) -> None:
    rows_from = dict.fromkeys(("vit", "eyes"), 0)
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
    assert rows_from["eyes"] == sum(
        int(found["cu_patches"][-1]) // 4 for name, _, _, found in views.of if name == "eyes"
    )


def test_backbone_alone_says_unknown_or_decodes_exactly(folder: Path) -> None:
    with running({"seen": folder}) as server:
        for policy, expected in ((None, {1}), ("exact", {2})):
            job_id = server.create(video_job(**({"validity": policy} if policy else {}))).job_id
            found = [v for rank in (0, 1) for h, _ in server.read(job_id, "llm", rank).microbatches
                     for v in h.items.validity]  # fmt: skip
            assert set(found) == expected
