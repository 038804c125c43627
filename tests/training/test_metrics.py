"""What a step reports, and who a process is."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainclient.training.config import ConfigError, Device
from trainclient.training.metrics import MetricsWriter, StepMetrics, sample_hash
from trainclient.training.rank import Process, choose_device

SAMPLES = st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), unique=True, max_size=20)


@given(samples=SAMPLES, data=st.data())
def test_digest_does_not_depend_on_order_or_split(samples: list[tuple[int, int, int]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(samples))
    cut = data.draw(st.integers(0, len(samples)))
    parts = sample_hash(shuffled[:cut]) + sample_hash(shuffled[cut:])
    assert parts % 2**63 == sample_hash(samples)


@given(samples=SAMPLES.filter(bool))
def test_digest_tells_sets_apart(samples: list[tuple[int, int, int]]) -> None:
    assert sample_hash(samples) != sample_hash(samples[1:])
    assert sample_hash(samples) != sample_hash([*samples, samples[0]])


def test_lines(tmp_path: Path) -> None:
    metrics = StepMetrics(4, 1.5, None, 2.0, 10, "0" * 16, 9, 1, 0.5, 12.5)
    screen = io.StringIO()
    writer = MetricsWriter(tmp_path / "new" / "metrics.jsonl", Console(file=screen), 20)
    writer.write(metrics)
    writer.write(metrics)
    writer.close()
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["text_loss"] for line in lines] == [1.5, 1.5]
    assert json.loads(lines[0])["image_loss"] is None
    expected = "step 5/20  text loss 1.5000  grad norm 2  20.0 samples/s  0.50 s  data wait 12.5 %"
    assert screen.getvalue().splitlines() == [expected] * 2


def test_process_from_environment() -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    environment = {name: str(i) for i, name in enumerate(names)}
    assert Process.from_environment(environment) == Process(0, 1, 2, 3)
    for name in names:
        with pytest.raises(ConfigError, match=name):
            Process.from_environment({key: value for key, value in environment.items() if key != name})


def test_cpu_is_chosen() -> None:
    assert choose_device(Device.CPU, 3).type == "cpu"
