"""Where metrics go, and what is left of them when a run resumes."""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.jobs import make_job
from faults.disk import fill, missing, small_disk
from rich.console import Console

from dataserver.planning.job.identity import Job
from trainclient.run_times.report import RunReport, Spent
from trainclient.training.config import ConfigError, TrainConfig, validate_config
from trainclient.training.metrics import EvaluationMetrics, StepMetrics
from trainclient.training.run_name import name_run
from trainclient.training.sinks import (
    JsonLines,
    MetricsError,
    MetricsWriter,
    Screen,
    TensorBoard,
    WeightsAndBiases,
    bytes_before,
    require_tensorboard,
    require_wandb,
)
from trainclient.training.sinks.scalars import scalars

RUN = "0123456789abcdef"


def metrics(step: int, digest: str = "0" * 16) -> StepMetrics:
    return StepMetrics(step, 1.5, None, 2.0, 10, digest, 9, 1, 0.5, 12.5, {"vit": 0.1})


def written(path: Path, first: int, end: int) -> bytes:
    """What the file holds after these steps."""
    lines = JsonLines(path, RUN, first)
    for step in range(first, end):
        lines.write(metrics(step))
    lines.sync()
    lines.close()
    return path.read_bytes()


def test_lines_and_screen(tmp_path: Path) -> None:
    path, screen = tmp_path / "new" / "metrics.jsonl", io.StringIO()
    writer = MetricsWriter([JsonLines(path, RUN, 0), Screen(Console(file=screen), 20)])
    writer.write(metrics(4))
    writer.write(metrics(5))
    writer.sync()
    writer.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0]["lr"] == {"vit": 0.1}
    assert [(m["run"], m["step"], m["text_loss"], m["image_loss"]) for m in found] == [
        (RUN, 4, 1.5, None),
        (RUN, 5, 1.5, None),
    ]
    rest = "text loss 1.5000  grad norm 2  20.0 samples/s  0.50 s  data wait 12.5 %"
    assert screen.getvalue().splitlines() == [f"step 5/20  {rest}", f"step 6/20  {rest}"]


def test_what_towers_find_is_shown_and_drawn() -> None:
    found = {f"{way}_r{k}": k / 16 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    evaluation = EvaluationMetrics(None, None, 8, "0" * 16, 8, 0, 1.0, contrastive_loss=0.25, recall=found)
    step, screen = replace(metrics(4), evaluation=evaluation, text_loss=None, contrastive_loss=0.5), io.StringIO()
    Screen(Console(file=screen), 20).write(step)
    recall = "image_to_text: R@1 6.2 R@5 31.2 R@10 62.5 %  text_to_image: R@1 6.2 R@5 31.2 R@10 62.5 %"
    assert f"contrastive loss 0.5000  held out: contrastive loss 0.2500  {recall}  grad" in screen.getvalue()
    drawn = scalars(step)
    assert drawn["evaluation/recall/text_to_image_r5"] == 5 / 16
    assert drawn["evaluation/contrastive_loss"] == 0.25


@pytest.mark.parametrize("resumed", [0, 1, 4, 7, 9])
def test_a_resumed_run_has_each_step_once(tmp_path: Path, resumed: int) -> None:
    """Steps 0 to 6 were run; a checkpoint further on, as of metrics that were lost with a machine, keeps them all."""
    path = tmp_path / "metrics.jsonl"
    before = written(path, 0, 7)
    after = written(path, resumed, 10)
    lines = after.splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [*range(min(resumed, 7)), *range(resumed, 10)]
    assert lines[: min(resumed, 7)] == before.splitlines(keepends=True)[:resumed]


@pytest.mark.parametrize(("resumed", "left"), [(0, []), (2, [0, 1]), (3, [0, 1, 2, None]), (5, [0, 1, 2, None, 3, 4])])
def test_the_times_of_a_run_stay_behind_its_last_step(tmp_path: Path, resumed: int, left: list[int | None]) -> None:
    """Those of a run go when a step before them is repeated."""
    path = tmp_path / "metrics.jsonl"
    report = RunReport(0, 3, 1, Spent({}, {}), {}, [])
    for first, end in ((0, 3), (3, 6)):
        lines = JsonLines(path, RUN, first)
        for step in range(first, end):
            lines.write(metrics(step))
        lines.finish(report)
        lines.close()
    JsonLines(path, RUN, resumed).close()
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == left


def test_a_line_that_is_cut_anywhere_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = written(path, 0, 3)
    last = whole.rindex(b"{")
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert written(path, 2, 3) == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"run": "fedcba9876543210", "step": 1}\n', "another run: fedcba9876543210 in line 2, and this is 0123"),
        (b'{"step": 1}\n', "another run: none in line 2"),
        (b"loss 1.5\n", "line 2 of the metrics file .* is not the metrics of a step"),
        (b"[1]\n", "line 2 of the metrics file .* is not the metrics of a step"),
        (b'{"run": "0123456789abcdef", "step": 0}\n', "line 2 of the metrics file .* has step 0 after 0"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = written(path, 0, 1) + line
    path.write_bytes(text)
    for step in (0, 1, 5):
        with pytest.raises(MetricsError, match=message):
            JsonLines(path, RUN, step)
    assert path.read_bytes() == text


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="cannot be used: Is a directory; mend that, or give --metrics another file"):
        JsonLines(tmp_path, RUN, 0)


@pytest.mark.parametrize("name", ["pipe", "/dev/null"])
def test_what_cannot_be_read_again_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MetricsError, match=r"is a pipe or a device; .* give --metrics a regular file"):
        bytes_before(tmp_path / name, "r", 0)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_full_disk_is_named_and_what_it_took_is_mended(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "metrics.jsonl"
        written(path, 0, 5)
        filler = fill(disk)
        lines = JsonLines(path, RUN, 5)
        with pytest.raises(MetricsError, match=r"metrics\.jsonl cannot be used: No space left on device"):
            lines.write(metrics(5, "f" * 5000))
        filler.unlink()
        found = written(path, 5, 7).splitlines()
    assert [json.loads(line)["step"] for line in found] == list(range(7))


def test_scalars_are_the_numbers_that_a_step_has() -> None:
    found = scalars(metrics(3))
    assert found["text_loss"] == 1.5
    assert found["lr/vit"] == 0.1
    assert found["skipped"] == 0
    assert not {"image_loss", "mfu_percent", "step", "sample_digest", "lr"} & set(found)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install '.[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, end in ((0, 7), (4, 10)):
        writer = MetricsWriter([TensorBoard(tmp_path, first)])
        for step in range(first, end):
            writer.write(metrics(step))
        writer.sync()
        writer.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("text_loss")] == [(step, 1.5) for step in range(10)]
    assert len(found.Scalars("lr/vit")) == 10


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_curves_that_cannot_be_written_are_named_once_and_the_file_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install '.[tensorboard]'")
    lines = tmp_path / "metrics.jsonl"
    with small_disk(tmp_path / "disk") as disk:
        writer = MetricsWriter([TensorBoard(disk / "curves", 0), JsonLines(lines, RUN, 0)])
        fill(disk)
        for step in range(40):
            writer.write(metrics(step))
        writer.sync()
        writer.close()
    assert len(lines.read_text().splitlines()) == 40
    said = f"the folder {tmp_path}/disk/curves of --tensorboard cannot be written: No space left on device; training "
    assert capsys.readouterr().err == said + "goes on without it\n"


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_curves_that_cannot_begin_leave_no_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install '.[tensorboard]'")
    with small_disk(tmp_path / "disk") as disk:
        (disk / "curves").mkdir()
        fill(disk)
        with pytest.raises(ConfigError, match="of --tensorboard cannot be written: No space left on device"):
            TensorBoard(disk / "curves", 0)
        assert list((disk / "curves").iterdir()) == []


@pytest.mark.slow
def test_weights_and_biases_takes_a_run_and_one_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for first, end in ((0, 4), (2, 6)):
        writer = MetricsWriter([WeightsAndBiases("tests", RUN, {"seed": 7})])
        for step in range(first, end):
            writer.write(metrics(step))
        writer.sync()
        writer.close()
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN}*/run-{RUN}.wandb"))
    assert len(files) == 2, "of one name, by which they belong together"
    deadline = time.monotonic() + 60  # its own process writes, and is not always done when the run is
    while not all(b"text_loss" in file.read_bytes() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("package", "require"),
    [("tensorboard.summary.writer.record_writer", require_tensorboard), ("wandb", require_wandb)],
)
def test_a_package_that_is_missing_is_named_with_its_command(
    package: str, require: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    flag = package.partition(".")[0]
    command = rf"pip install '\.\[{flag}\]' in the checkout"
    with pytest.raises(ConfigError, match=rf"--{flag} needs a package .*; run {command}"):
        require()


def test_a_run_is_named_by_what_its_losses_depend_on() -> None:
    def name(job: Job, **fields: Any) -> str:
        return name_run(validate_config(fields), job)

    job = make_job()
    same = name(job)
    assert len(same) == 16
    operation = {"servers": "b:2", "metrics": "m", "steps": 3, "checkpoint": {"every": 2}, "timeout_s": 1}
    assert name(job, **operation) == same == name_run(TrainConfig(), make_job())
    decides: list[dict[str, Any]] = [{"seed": 1}, {"optimizer": {"lr": 1}}, {"dtype": "bfloat16"}, {"text_weight": 2}]
    decides += [{"backbone": {"layers": 3}}, {"modules": {"vit": {"options": {"a": 1}}}}]
    decides += [{"encoder": {"lora": {"rank": 2}}}, {"optimizer": {"projector": {"lr": 1}}}]
    found = {same, name(make_job(stream={"seed": 8})), *(name(job, **fields) for fields in decides)}
    assert len(found) == len(decides) + 2
