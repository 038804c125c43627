"""Grain's data sets over the stream: the example of the documentation, as it stands, with JAX in real processes."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from adapters.examples import ExampleRun, calm_and_killed, example, variables
from adapters.stubs import GenericBase, adapter_over
from adapters.whole_jobs import one_pass, pass_with_parity

from trainclient.stream.errors import StateError


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_and_resumed_twice_once_with_another_number_of_processes(
    server: str, tmp_path: Path, python_with: Callable[[str], Path]
) -> None:
    """Every sample of the pass once, and the parameters are those of a run that nobody disturbed."""
    python = python_with("grain")
    script = example("ServedDataset(")
    calm, killed = calm_and_killed(
        lambda folder: ExampleRun(script, server, None, folder, pass_with_parity, python), tmp_path, [0, 3, 5]
    )
    with np.load(killed.out) as found, np.load(calm.out) as expected:
        assert str(found["state"]) == str(expected["state"])
        for name in ("text", "vision"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_among_grains_own_transformations(server: str, python_with: Callable[[str], Path]) -> None:
    """Prefetched by threads; Grain tells what it waits for; sharing it out to processes is refused."""
    line = [python_with("grain"), Path(__file__).with_name("grain_pipelines.py"), server]
    found = subprocess.run(line, env=variables(), capture_output=True, text=True, check=False, timeout=200)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Over the names that it takes from Grain."""
    contents = {"grain": {"DatasetIterator": GenericBase, "IterDataset": GenericBase}}
    return adapter_over(monkeypatch, "grain", {"grain": "0.2.18"}, contents)


def test_a_state_goes_on_behind_its_step(server: str, adapter: ModuleType) -> None:
    batches = iter(adapter.ServedDataset(server, one_pass(1), rank=0, world_size=1))
    while not next(batches)["last_of_step"]:
        pass
    state = batches.get_state()
    rest = list(batches)
    batches.set_state(state)
    again = list(batches)
    assert rest[0]["step"] == 1
    assert len(rest) == len(again)
    for one, other in zip(rest, again, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    with pytest.raises(StateError, match="differs in"):
        batches.set_state({**state, "stream_id": "0" * 64})
    batches.close()


def test_sharing_out_once_more(server: str, adapter: ModuleType) -> None:
    dataset = adapter.ServedDataset(server, one_pass(1), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"share the stream out once more \(slice.*leave mp_prefetch out"):
        dataset.set_slice(slice(0, None, 2))


def test_an_error_is_no_end_of_the_job(server: str, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator ends with its first error, and would say that nothing is left."""
    batches = iter(adapter.ServedDataset(server, one_pass(1), rank=0, world_size=1))
    first = next(batches)

    def fails(_: object) -> None:
        raise OSError("no network")

    with monkeypatch.context() as patched:
        patched.setattr(type(batches.stream), "_next", fails)
        with pytest.raises(OSError, match="no network"):
            next(batches)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"an error has ended step 0 before it was read: begin again"):
            next(batches)
    batches.set_state(batches.get_state())
    again = next(batches)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    batches.close()
