"""Jobs as servers name them, and as users write them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client.fake_server import FakeServer, job_data
from disttrain.v1 import data_service_pb2 as pb

from dataserver.planning.job.identity import JobSpecError
from trainclient.stream.errors import ProtocolError
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import load_job_data, resolve_job


class Odd(FakeServer):
    """Names a job in its own way, as another release might."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        super().__init__()

    def GetOrCreateJob(self, request: Any, context: Any) -> pb.GetOrCreateJobResponse:  # noqa: N802
        response = super().GetOrCreateJob(request, context)
        for field, name in self.names.items():
            setattr(response, field, name)
        return response


@pytest.fixture
def server() -> Iterator[Odd]:
    with Odd() as server:
        yield server


@pytest.mark.parametrize("field", ["job_id", "stream_id"])
def test_a_server_that_names_the_job_otherwise_has_another_release(server: Odd, field: str) -> None:
    fleet = Fleet(server.address)
    job = resolve_job(job_data(), fleet)
    server.names = {field: "another"}
    names = {"job_id": job.job_id, "stream_id": job.stream_id}
    found = " (stream ".join((names | server.names).values())
    ours = f"client {job.job_id} (stream {job.stream_id}): install the same release on both"
    for said, ask in (
        (
            f"{server.address} names the job that it filled in {found}), this {ours}",
            lambda: resolve_job(job_data(), fleet),
        ),
        (f"{server.address} names the job {found}), this {ours}", lambda: fleet.register(job)),
    ):
        with pytest.raises(ProtocolError) as raised:
            ask()
        assert str(raised.value) == f"server {said}"
    server.names = {}
    assert resolve_job(job_data(), fleet) == job
    fleet.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "holds list; a mapping with 'stream' and 'execution' is required"),
        ("", "holds NoneType; a mapping"),
        ("a: 1\na: 2", "cannot be used: "),
    ],
)
def test_files_that_hold_no_job(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobSpecError) as raised:
        load_job_data(path)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)


def test_texts_that_hold_no_job() -> None:
    with pytest.raises(JobSpecError, match="the job's text cannot be used"):
        load_job_data(' {"a": 1, "a": 2}')
    with pytest.raises(JobSpecError, match=r"the job file /nowhere/job\.yaml cannot be read: No such file"):
        load_job_data("/nowhere/job.yaml")
    assert load_job_data(' {"a": 1}') == {"a": 1}


def test_a_job_that_json_cannot_say(server: Odd) -> None:
    fleet = Fleet(server.address)
    with pytest.raises(JobSpecError, match="the job holds what JSON cannot say: Object of type set"):
        resolve_job({**job_data(), "more": {1}}, fleet)
    assert fleet.current == 0
    fleet.close()
