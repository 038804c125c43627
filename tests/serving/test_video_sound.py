"""Videos and their sound over two real servers: encoders of images, audio and video beside one backbone."""

from pathlib import Path

import numpy as np
import pytest
from audio.jobs import AUDIO
from builders.jobs import module
from disttrain.v1 import microbatch_pb2
from serving.every_view import EveryView, items
from serving.harness import job_data, running
from video.heard import write_heard
from video.jobs import VIDEO

from dataserver.audio import AudioShape, decode_mel
from dataserver.planning.job.fields import AudioSizing, Sizing
from dataserver.planning.stream.grids import patch_grid
from dataserver.video import read_sound, video_format_of

pytest.importorskip("av", reason="the extra video is not installed")
pytest.importorskip("soundfile", reason="the extra audio is not installed")
DEGREES = {"vit": 1, "eyes": 1, "ears": 2, "llm": 2}


def test_views_of_two_servers_are_the_same_and_hold_the_sound_of_videos(tmp_path: Path) -> None:
    patch_grid(64, 48, Sizing().of_frames)  # compiled here, however long that takes: servers wait for nothing
    folder = write_heard(tmp_path)
    job = job_data(
        modules=[
            module("encoder", dp=1),
            {"name": "eyes", "kind": "encoder", "modality": "video", "dp": 1},
            {"name": "ears", "kind": "encoder", "modality": "audio", "dp": 2},
            module("backbone", dp=2),
        ],
        datasets=[{"name": "heard"}],
        sizing={"max_patches": 64, "audio": {**AUDIO, "max_seconds": 1}, "video": VIDEO},
        generation={"ratio": "0"},
        microbatch=2,
        end={"steps": 2},
    )
    of_servers = []
    for _ in range(2):
        with running({"heard": folder}) as server:
            of_servers.append(EveryView(server, "heard", job, DEGREES))
    views, others = of_servers
    assert len(views.info.sound_digest) == len(views.info.audio_digest) == 64
    assert views.info.sound_digest == others.info.sound_digest
    plans = [[(n, r, h.step, h.plan_hash) for n, r, h, _ in found.of] for found in of_servers]
    assert plans[0] == plans[1]
    for (*_, one), (*_, other) in zip(views.of, others.of, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    planned = [(s.dataset, s.epoch, s.sample, s.images) for s in (plan.samples for plan in views.plans)]
    wanted = sorted((d, e, n, i) for of in planned for d, e, n, count in zip(*of, strict=True) for i in range(count))
    served = [item for name, _, header, _ in views.of if name != "llm" for item in items(header)]
    assert sorted(served) == wanted
    sounds = 0
    for name, _, header, found in views.of:
        if name != "ears":
            continue
        assert set(header.items.validity) <= {microbatch_pb2.VALIDITY_VALID}
        for n, item in enumerate(items(header)):
            ref = views.ref(item)
            data = views.dataset.read(ref)
            assert ref.is_audio
            if video_format_of(data) is None:
                continue
            first, end = found["cu_frames"][n : n + 2]
            expected = np.empty((end - first, 80), np.float32)
            shape = AudioShape(ref.width, ref.height, ref.orientation)
            assert decode_mel(data, shape, AudioSizing(**{**AUDIO, "max_seconds": 1}), expected, read_sound)
            assert np.array_equal(found["mel"][first:end], expected)
            sounds += 1
    assert sounds > 4
