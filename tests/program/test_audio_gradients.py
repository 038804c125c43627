"""A step with an encoder of images, one of audio, and a backbone has the gradients of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from audio.datasets import write_audio
from audio.jobs import audio_job
from cli.server_process import serving
from program.conftest import Fleet
from program.reference import reference_gradients
from program.runtime_cases import Case, Pool
from program.test_gradients import BOUNDS, assert_close

pytest.importorskip("soundfile", reason="the extra audio is not installed")
ONE_STEP = {"end": {"steps": 1}, "seq_len": 256, "global_batch": 4, "microbatch": 1}
POSITIONS = "ears.position_embed.weight"
"""Not trained, as in Whisper."""


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = write_audio(tmp_path_factory.mktemp("heard"))
    with serving("--dataset", f"heard={folder}") as server:
        yield Fleet(server.address, {"heard": folder}, {})


@pytest.mark.timeout(400)
def test_gradients_of_two_encoders_are_those_of_one_process(heard: Fleet, pool: Pool, tmp_path: Path) -> None:
    ours = heard.completed(audio_job(1, 2, 2, **ONE_STEP))
    one = heard.completed(audio_job(1, 1, 1, balance="none", **ONE_STEP))
    assert ours.stream_id == one.stream_id
    case = Case("audio", heard.address, ours.spec.model_dump(mode="json"))
    found = pool.run([case], tmp_path)["audio"]
    expected = reference_gradients(Case("audio", heard.address, one.spec.model_dump(mode="json")))
    assert not expected.pop(POSITIONS).any()
    assert POSITIONS not in found
    assert expected.keys() == found.keys()
    assert {name.split(".")[0] for name in expected} == {"vit", "ears", "llm"}
    assert_close(found, expected, BOUNDS["float64"])
