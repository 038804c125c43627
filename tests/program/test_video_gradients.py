"""A step with an encoder of images, one of videos, and a backbone has the gradients of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.server_process import serving
from program.conftest import Fleet
from program.reference import reference_gradients
from program.runtime_cases import Case, Pool
from program.test_gradients import BOUNDS, assert_close
from video.datasets import write_videos
from video.jobs import video_job

pytest.importorskip("av", reason="the extra video is not installed")
ONE_STEP = {"end": {"steps": 1}, "seq_len": 256, "global_batch": 4, "microbatch": 1}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = write_videos(tmp_path_factory.mktemp("seen"))
    with serving("--dataset", f"seen={folder}") as server:
        yield Fleet(server.address, {"seen": folder}, {})


@pytest.mark.long
@pytest.mark.timeout(400)
def test_gradients_of_two_encoders_are_those_of_one_process(seen: Fleet, pool: Pool, tmp_path: Path) -> None:
    ours = seen.completed(video_job(1, 2, 2, **ONE_STEP))
    one = seen.completed(video_job(1, 1, 1, balance="none", **ONE_STEP))
    assert ours.stream_id == one.stream_id
    case = Case("video", seen.address, ours.spec.model_dump(mode="json"))
    found = pool.run([case], tmp_path)["video"]
    expected = reference_gradients(Case("video", seen.address, one.spec.model_dump(mode="json")))
    assert expected.keys() == found.keys()
    assert {name.split(".")[0] for name in expected} == {"vit", "eyes", "llm"}
    assert expected["eyes.patch_embed.weight"].shape[1] == 2 * 14 * 14 * 3
    assert_close(found, expected, BOUNDS["float64"])
