"""A step with encoders of images, audio and videos beside one backbone has the gradients of one process."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from audio.datasets import write_audio
from builders.three_encoders import three_encoders
from cli.server_process import serving
from program.conftest import Fleet
from program.reference import reference_gradients
from program.runtime_cases import Case, Pool
from program.test_gradients import BOUNDS, assert_close
from serving.harness import job_data
from video.datasets import write_videos
from video.heard import write_heard

pytest.importorskip("av", reason="the extra video is not installed")
pytest.importorskip("soundfile", reason="the extra audio is not installed")
POSITIONS = "ears.position_embed.weight"
"""Not trained, as in Whisper."""


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("media")
    folders = {
        "heard": write_audio(root / "heard"),
        "seen": write_videos(root / "seen"),
        "sounding": write_heard(root / "sounding", 24),
    }
    with serving(*(part for name, path in folders.items() for part in ("--dataset", f"{name}={path}"))) as server:
        yield Fleet(server.address, folders, {})


def step_of(names: Sequence[str], **modules: Any) -> dict[str, Any]:
    """A step of the datasets; `modules` are the arguments of `three_encoders`."""
    return job_data(
        **three_encoders(**modules),
        datasets=[{"name": name} for name in names],
        seq_len=256,
        global_batch=8,
        microbatch=1,
        end={"steps": 1},
    )


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [("heard", "seen"), ("sounding",)], ids=["clips", "sound of videos"])
def test_gradients_of_three_encoders_are_those_of_one_process(
    names: Sequence[str], media: Fleet, pool: Pool, tmp_path: Path
) -> None:
    ours = media.completed(step_of(names, ears=2, eyes=2, llm=2))
    one = media.completed(step_of(names, balance="none"))
    assert ours.stream_id == one.stream_id
    case = Case("media", media.address, ours.spec.model_dump(mode="json"))
    found = pool.run([case], tmp_path)["media"]
    expected = reference_gradients(Case("media", media.address, one.spec.model_dump(mode="json")))
    assert not expected.pop(POSITIONS).any()
    assert expected.keys() == found.keys()
    assert {name.split(".")[0] for name in expected if expected[name].any()} == {"vit", "ears", "eyes", "llm"}
    assert_close(found, expected, BOUNDS["float64"])
