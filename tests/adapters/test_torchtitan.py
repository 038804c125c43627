"""torchtitan's data loader over the stream: batches and refusals. Its own loop is in test_killed_loops."""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.stubs import Base, adapter_over
from adapters.whole_jobs import mixed_job, one_pass, whole_job

from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch, FullModelStream
from trainclient.adapters.qwen2_vl import Qwen2VLInputs

TOKENIZER = SimpleNamespace(TOKEN_FIELDS=("image", "video"), image_id=290, video_id=291)
SIZES = {"seq_len": 256, "local_batch_size": 1, "snapshot_every_n_steps": None}


class Loader(Base):
    """What all of torchtitan's loaders derive from."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: str = ""


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Over the names that it takes from torchtitan."""
    contents = {"torchtitan.components.dataloader": {"BaseDataLoader": Loader}}
    return adapter_over(monkeypatch, "torchtitan", {"torchtitan": "0.3.0"}, contents)


def loader(adapter: ModuleType, server: str, job: dict[str, Any], most: int = 20, **changes: Any) -> Any:
    config = adapter.ServedDataLoader.Config(servers=server, job=job, batches_per_step=most, mrope=True)
    given = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": TOKENIZER, **SIZES, **changes}
    return adapter.ServedDataLoader(config, **given)


def test_batches_are_the_microbatches_and_padding(server: str, adapter: ModuleType) -> None:
    served = loader(adapter, server, one_pass(1), most=10)
    batches = list(served)
    served.close()
    with FullModelStream(server, one_pass(1), rank=0, world_size=1) as stream:
        steps = [list(step.microbatches) for step in stream]
    assert len(batches) == 10 * len(steps)
    inputs_of = Qwen2VLInputs(image_token=290, frames=2)
    padded = 0
    for number, (inputs, labels) in enumerate(batches):
        step, position = divmod(number, 10)
        assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (1, 256)
        if position >= len(steps[step]):
            assert (labels == IGNORED_LABEL).all()
            assert inputs["grid_thw"] is None
            padded += 1
            continue
        tensors = steps[step][position].tensors
        count = len(tensors["labels"])
        assert labels[0].tolist() == tensors["labels"].tolist() + [IGNORED_LABEL] * (256 - count)
        assert inputs["positions"][0, :count].tolist() == tensors["position_ids"].tolist()
        expected = inputs_of(steps[step][position], torch.device("cpu"))
        assert inputs["input"][0, :count].tolist() == expected["input_ids"][0].tolist()
        if "pixel_values" in expected:
            assert inputs["grid_thw"].tolist() == expected["image_grid_thw"].tolist()
            counts = inputs["grid_thw"].prod(1).tolist()
            flat = torch.cat([rows[:n] for rows, n in zip(inputs["pixel_values"], counts, strict=True)])
            assert torch.equal(flat, expected["pixel_values"])
            assert torch.equal(inputs["mrope_positions"][0, :count].T, expected["position_ids"][1:, 0])
    assert padded


def test_rows_of_a_padded_job_hold_a_sequence_each(server: str, adapter: ModuleType) -> None:
    job = whole_job(1, {"steps": 1}, packing={"enabled": False})
    job["execution"] |= {"microbatch": 4, "layout": {"kind": "pipelined", "fewest_microbatches": True}}
    for module in job["execution"]["modules"]:
        module["padded"] = True
    served = loader(adapter, server, job, most=2, local_batch_size=4)
    batches = list(served)
    served.close()
    assert len(batches) == 2
    for inputs, labels in batches:
        assert inputs["input"].shape == labels.shape == (4, 256)
        assert (inputs["positions"][:, :2] == torch.tensor([0, 1])).all(), "each row begins with a sample"


class LaterLoader(Base):
    """The same since it moved to `components/data/loader.py`: nothing to configure, and an end."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def close(self) -> None:
        raise AssertionError("the adapter has an end of its own")


def test_later_releases_take_flat_batches(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {"torchtitan": {}, "torchtitan.components": {}}
    contents["torchtitan.components.data.loader"] = {"BaseDataLoader": LaterLoader}
    adapter = adapter_over(monkeypatch, "torchtitan", {"torchtitan": "0.4.0"}, contents)
    sizes = {"seq_len": 256, "max_context_length": 256, "num_tokens_per_batch": 256}
    config = adapter.ServedDataLoader.Config(servers=server, job=one_pass(1), batches_per_step=10, mrope=True)
    served = adapter.ServedDataLoader(config, dp_world_size=1, dp_rank=0, tokenizer=TOKENIZER, **sizes)
    inputs, labels = next(iter(served))
    served.close()
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (256,)


def test_a_package_that_torchtitan_misses_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dataloader.py").write_text("import tyro_that_is_not_there")
    contents: dict[str, dict[str, Any]] = {"torchtitan": {}, "torchtitan.components": {"__path__": [str(tmp_path)]}}
    with pytest.raises(ModuleNotFoundError, match="tyro_that_is_not_there"):
        adapter_over(monkeypatch, "torchtitan", {"torchtitan": "0.3.0"}, contents)


def test_an_empty_image_stands_in_the_padding_where_other_ranks_have_images(
    server: str, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that sharded encoders run on all ranks; it has no label."""
    monkeypatch.setattr(FullModelMicrobatch, "lacks_images", property(lambda m: not len(m.rows)))
    served = loader(adapter, server, mixed_job(1, {"steps": 3}))
    batches = [(inputs, labels) for inputs, labels in served if (labels != IGNORED_LABEL).any()]
    served.close()
    added = 0
    for inputs, labels in batches:
        standing = inputs["input"] == TOKENIZER.image_id
        assert standing.sum() == inputs["grid_thw"].prod(1).sum() // 4
        assert (labels[standing] == IGNORED_LABEL).all()
        assert inputs["mrope_positions"].shape == (1, 256, 3)
        added += bool(standing[0, -1])
        assert not standing[0, -1] or inputs["grid_thw"].tolist() == [[1, 2, 2]]
    assert 0 < added < len(batches)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seq_len": 512}, r"seq_len is 512.*1 sequences.*of 256 tokens.*set seq_len to 256"),
        ({"local_batch_size": 4}, r"local_batch_size is 4.*set local_batch_size to 1"),
        ({"num_tokens_per_batch": 1024}, r"set num_tokens_per_batch to 256"),
        ({"snapshot_every_n_steps": 30}, r"behind every 30 batches, and batches_per_step is 20: set it to training"),
        ({"dp_world_size": 2}, r"rank 0 of 2, and module llm has dp 1"),
        ({"tokenizer": SimpleNamespace()}, r"no image_id: configure torchtitan's MultiModalTokenizer"),
    ],
)
def test_jobs_of_other_sizes(server: str, adapter: ModuleType, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loader(adapter, server, one_pass(1), **changes)


def test_steps_of_too_many_microbatches(server: str, adapter: ModuleType) -> None:
    served = loader(adapter, server, whole_job(1, {"steps": 2}), most=8)
    with pytest.raises(ValueError, match=r"step 0 has 9 microbatches, and torchtitan updates behind 8: raise"):
        next(iter(served))
    served.close()


def test_a_state_goes_on_behind_its_step(server: str, adapter: ModuleType) -> None:
    served = loader(adapter, server, one_pass(1), most=10)
    batches = iter(served)
    for _ in range(10):
        next(batches)
    state = served.state_dict()
    assert state["step"] == 1
    rest = next(batches)[1]
    served.load_state_dict(state)
    assert torch.equal(next(iter(served))[1], rest)
    served.close()


def test_a_checkpoint_in_the_middle_of_a_step(server: str, adapter: ModuleType) -> None:
    """Where torchtitan updates behind fewer batches than the steps have."""
    served = loader(adapter, server, one_pass(1), most=10, snapshot_every_n_steps=20)
    batches = iter(served)
    for count in (10, 15, 20):
        while served._num_handed_out < count:
            next(batches)
        if count == 15:
            with pytest.raises(ValueError, match=r"behind 15 batches, and a step has 10 \(batches_per_step\): set"):
                served.state_dict()
        else:
            assert served.state_dict()["step"] == count // 10
    served.close()


def test_a_step_that_was_cut_short_begins_anew(server: str, adapter: ModuleType) -> None:
    """Where a loop asks for the batches again after an exception; behind a whole step the next one comes."""
    served = loader(adapter, server, one_pass(1), most=10)
    batches = iter(served)
    first = [next(batches)[1] for _ in range(10)]
    second = [next(batches)[1] for _ in range(3)]
    assert [torch.equal(label, expected) for (_, label), expected in zip(served, second, strict=False)] == [True] * 3
    assert not torch.equal(first[0], second[0])
    batches = iter(served)
    again = [next(batches)[1] for _ in range(10)]
    assert torch.equal(again[0], second[0])
    assert not torch.equal(next(iter(served))[1], second[0])
    served.close()
