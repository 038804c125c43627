"""The demo as a newcomer runs it, and the shards that it makes."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from cli.preforked import PreforkedProcess
from demo_parts.options import parse
from demo_parts.stages import STAGES
from make_demo_media import draw_clip, draw_video
from PIL import Image
from shards import write_tar

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DEMO_S = 400
"""How long a demo may do the same, as it says itself: all of it takes minutes, and on a busy machine many."""
ALL_S = 1800
SAMPLES = 300
END_S = 60
"""The demo gives its processes 20 s to end; more than this is a hang."""
TEXT_AND_IMAGE = ("text_loss", "image_loss")
IMG2DATASET_COLUMNS = {
    *("caption", "url", "key", "status", "error_message", "width", "height", "original_width", "original_height"),
    *("exif", "sha256"),
}


@contextmanager
def demo(output: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run the demo as a session of its own; whatever it leaves behind is killed."""
    command = [sys.executable, SCRIPTS / "run_demo.py", "--output", output, *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **streams, text=True, env=environment, start_new_session=True)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        for survivor in (process, *mentioning(output)):
            survivor.kill()
        process.wait()


def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a demo has said on stdout and stderr; it is killed where it does the same for too long."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines, doing = list[str](), ""
    stuck = Timer(DEMO_S, process.kill)
    stuck.start()
    try:
        for line in process.stderr:
            lines.append(line)
            now = re.sub(r" \(\d+ s\)$", "", line.rstrip())  # said again every few seconds
            if now != doing:
                stuck.cancel()
                doing, stuck = now, Timer(DEMO_S, process.kill)
                stuck.start()
    finally:
        stuck.cancel()
    shown = process.stdout.read()
    process.wait(END_S)
    return shown, "".join(lines)


def mentioning(folder: Path) -> list[psutil.Process]:
    """Living processes that have this folder in their command line: all that a demo starts, besides the launcher."""
    return [
        p
        for p in psutil.process_iter(["cmdline", "status"])
        if p.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in p.info["cmdline"] or ())
    ]


def sessions(processes: list[psutil.Process]) -> set[psutil.Process]:
    """The processes with all that they started."""
    return {child for p in processes for child in (p, *p.children(recursive=True))}


@pytest.mark.slow
@pytest.mark.timeout(ALL_S)
@pytest.mark.parametrize("layout", ["colocated", pytest.param("pipelined", marks=pytest.mark.long)])
def test_the_demo_on_real_photographs(shared_data: Path, tmp_path: Path, layout: str) -> None:
    """Whole; with the fewest processes, since each imports for seconds, and as a newcomer runs it."""
    report, output = tmp_path / "report.json", tmp_path / "output"
    chosen = () if layout == "pipelined" else ("--layout", layout)
    options = (*chosen, "--steps", "3", "--dataset", shared_data / "laion-mini", "--report", report)
    with demo(output, *options) as process:
        shown, errors = end_of(process)
        assert process.returncode == 0, errors
        assert not mentioning(output), "processes survived"
    figures = json.loads(report.read_text())
    check_losses(figures)
    check_planning(figures)
    words = ("text loss", "image loss", "samples per second", "wait for data", "imbalance", "bubble", "step, simulated")
    of_stages = ("in flight",) if layout == "pipelined" else ()
    for word in (*words, *of_stages, "... measured", "speed and wait from step 3 on"):
        assert word in shown
    check_picture(output)
    check_progress(errors.splitlines())
    check_next_commands(shown, output)


@pytest.mark.long
@pytest.mark.timeout(ALL_S)
@pytest.mark.parametrize(
    ("layout", "processes", "losses"),
    [
        ("colocated", "2 processes (encoder + backbone + generator dp 2)", TEXT_AND_IMAGE),
        ("contrastive", "6 processes (image dp 2, text dp 2 x pp 2)", ("contrastive_loss",)),
        ("grouped", "6 processes (encoder dp 1, backbone dp 4, generator dp 1)", TEXT_AND_IMAGE),
    ],
)
def test_the_demo_of_other_layouts(
    shared_data: Path, tmp_path: Path, layout: str, processes: str, losses: tuple[str, ...]
) -> None:
    report, output = tmp_path / "report.json", tmp_path / "output"
    options = ("--layout", layout, "--steps", "3", "--dataset", shared_data / "laion-mini", "--report", report)
    with demo(output, *options) as process:
        shown, errors = end_of(process)
        assert process.returncode == 0, errors
        assert not mentioning(output), "processes survived"
    assert f"starting {processes}" in errors
    figures = json.loads(report.read_text())
    check_losses(figures, losses)
    check_planning(figures)
    check_picture(output)
    assert [name.replace("_", " ") in shown for name in (*TEXT_AND_IMAGE, "contrastive_loss")] == [
        name in losses for name in (*TEXT_AND_IMAGE, "contrastive_loss")
    ]


@pytest.mark.long
@pytest.mark.timeout(ALL_S)
def test_three_encoders_and_what_balance_gains_with_each_modality(tmp_path: Path) -> None:
    report, output = tmp_path / "report.json", tmp_path / "output"
    with demo(output, "--modalities", "image,audio,video", "--steps", "3", "--report", report) as process:
        shown, errors = end_of(process)
        assert process.returncode == 0, errors
        assert not mentioning(output), "processes survived"
    assert "starting 2 processes (image + audio + video + backbone dp 2)" in errors
    figures = json.loads(report.read_text())
    check_losses(figures, ("text_loss",))
    check_planning(figures, encoders=3)
    check_progress(errors.splitlines())
    compared = figures["simulated_modalities"]
    names = ["image", "audio", "video"]
    assert [row["modalities"] for row in compared] == [names[:1], names[:2], names]
    for row in compared:
        assert row["after"]["step_ms"] < row["before"]["step_ms"]
        assert [*row["before"]["imbalance"]] == row["modalities"]
        assert max(row["after"]["imbalance"].values()) < max(row["before"]["imbalance"].values())
        assert f"{', '.join(row['modalities'])} " in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--modalities", "image,audio", "--layout", "grouped"], "several modalities need colocated or pipelined"),
        (["--modalities", "image,video", "--dataset", "folder"], "leave it out with several modalities"),
        (["--modalities", "audio"], "invalid choice: 'audio'"),
    ],
)
def test_what_does_not_go_with_modalities_is_refused(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit):
        parse()
    assert reason in capsys.readouterr().err


def check_losses(figures: dict[str, Any], names: tuple[str, ...] = TEXT_AND_IMAGE) -> None:
    """The models learn something."""
    assert figures["steps"] == len(figures["per_step"]) == 3
    for name in names:
        losses = [step[name] for step in figures["per_step"]]
        assert all(math.isfinite(loss) and loss > 0 for loss in losses)
        assert len(set(losses)) == 3, "nothing was learnt"
        assert (figures[name]["first"], figures[name]["last"]) == (losses[0], losses[-1])
    if "text_loss" in names:
        assert figures["text_loss"]["last"] < figures["text_loss"]["first"]
    assert figures["samples_per_s"] > 0
    assert 0 <= figures["data_wait_percent"] <= 100


def check_planning(figures: dict[str, Any], encoders: int = 1) -> None:
    """Simulated figures, and measured ones beside them: operations that sleep cannot be faster than was simulated.

    But for several encoders: the simulator has a barrier between them, and the trainer has none.
    """
    for before_after in (*figures["imbalance"].values(), figures["bubble_percent"], figures["simulated_step_ms"]):
        assert before_after["after"] > 0
    assert figures["simulated_step_ms"]["after"] <= figures["simulated_step_ms"]["before"]
    ablation = [row["step_ns"] / 1e6 for row in figures["simulated_ablation"]]
    assert len(ablation) >= 3
    assert [ablation[0], ablation[-1]] == pytest.approx(
        [figures["simulated_step_ms"][side] for side in ("before", "after")]
    )
    measured = figures["measured"]
    assert measured["slowed_down"] >= 1
    for side in ("before", "after"):
        found = measured[side]
        assert min(found.values()) > 0
        assert encoders > 1 or found["measured_ms"] >= found["simulated_ms"]
        assert found["ratio"] == found["measured_ms"] / found["simulated_ms"]


def check_picture(output: Path) -> None:
    with Image.open(output / "plan.png") as picture:
        assert picture.format == "PNG"
        picture.load()
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 8, "the picture is blank"


def check_progress(lines: list[str]) -> None:
    """One line each time, by stage; no clock times, nothing else."""
    assert not [line for line in lines if not line.startswith(tuple(f"{stage}: " for stage in STAGES))]
    assert [*dict.fromkeys(line.partition(":")[0] for line in lines)] == [*STAGES]
    assert not [line for line in lines if re.search(r"\d\d:\d\d(?!\d)", line)]


def check_next_commands(shown: str, output: Path) -> None:
    """The three commands at the end work as they are printed; here they fork from a process that has their imports."""
    _, _, last = shown.partition("Try next:\n")
    commands = [shlex.split(line) for line in last.splitlines() if line and not line.startswith("#")]
    assert [command[1] for command in commands] == ["plan", "simulate", "serve"]
    assert {Path(command[0]).resolve() for command in commands} == {
        Path(sys.executable).parent.resolve() / "dataserver"
    }
    words = [["dataserver.__main__", *command[1:]] for command in commands]
    for command in words[:2]:
        with PreforkedProcess(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate(timeout=DEMO_S)[0]
        assert process.returncode == 0
    assert "<svg" in Path(words[0][-1]).read_text()
    with PreforkedProcess(
        words[2], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("listening on 127.0.0.1:")
        server.terminate()
    assert server.returncode == 0
    assert not mentioning(output)


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 60)
@pytest.mark.parametrize(
    ("line", "processes"),
    [
        ("index: reading", 1),
        pytest.param("plan: loading", 1, marks=pytest.mark.long),
        pytest.param("training: step ", 1 + 2 + 1 + 6, marks=pytest.mark.long),
        pytest.param("measuring: starting", 1 + 2 + 6, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_everything_with_one_line(line: str, processes: int, shared_data: Path, tmp_path: Path) -> None:
    output, steps = tmp_path / "output", "1" if line.startswith("measuring") else "500" if "step" in line else "2"
    with demo(output, "--steps", steps, "--dataset", shared_data / "laion-mini") as process:
        assert process.stderr is not None
        seen = []
        for said in process.stderr:
            seen.append(said)
            if said.startswith(line):
                break
        else:
            raise AssertionError("".join(seen))
        family = sessions([psutil.Process(process.pid), *mentioning(output)])
        assert len(family) >= processes, "demo, servers, launcher and trainers"
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=END_S)
        assert process.returncode == 130, errors
        assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not mentioning(output)
    assert [e for e in errors.splitlines() if not e.startswith(line.split()[0])] == [
        "scripts/demo: interrupted; all its processes have ended"
    ]
    assert shown == ""


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        pytest.param("missing", "missing", marks=pytest.mark.long),
        pytest.param("empty", ".tar", marks=pytest.mark.long),
        ("hollow", "no usable sample"),
    ],
)
def test_a_useless_folder_is_said_with_what_to_do(dataset: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_tar(tmp_path / "hollow" / "00000.tar", [("a.json", b"{}")])
    with demo(tmp_path / "output", "--dataset", tmp_path / dataset) as process:
        shown, errors = process.communicate(timeout=END_S)
    assert process.returncode == 2
    lines = [line for line in errors.splitlines() if not line.startswith(("shards: ", "index: "))]
    assert lines[0].startswith("scripts/demo: indexing ended with exit code 2. The end of ")
    assert reason in lines[-2]
    assert str(tmp_path / dataset) in lines[-2]
    assert lines[-1].endswith("run the same command again: it goes on with what is there.")
    assert "Traceback" not in errors
    assert shown == ""


def test_the_same_clips_and_videos_every_time() -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    picture = Image.linear_gradient("L").convert("RGB")
    once, again = (
        [draw_clip(np.random.default_rng(1)), draw_video(np.random.default_rng(1), picture)] for _ in range(2)
    )
    assert once == again


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Half of the demo's shards at half its width, made twice at the same time by two processes."""
    folders = (tmp_path_factory.mktemp("one") / "shards", tmp_path_factory.mktemp("two") / "shards")
    maker = SCRIPTS / "fixtures" / "make_demo_shards.py"
    command = [sys.executable, maker, "--median", "256", "--samples", str(SAMPLES)]
    makers = [subprocess.Popen([*command, folder], stdout=subprocess.DEVNULL) for folder in folders]
    assert [maker.wait(DEMO_S) for maker in makers] == [0, 0]
    return folders


@pytest.mark.slow
def test_the_same_shards_every_time(shards: tuple[Path, Path]) -> None:
    one, two = ({p.name: p.read_bytes() for p in sorted(folder.iterdir())} for folder in shards)
    assert one == two


@pytest.mark.slow
def test_shards_in_img2dataset_layout_and_skewed_as_in_laion(shards: tuple[Path, Path]) -> None:
    folder = shards[0]
    tars = sorted(folder.glob("*.tar"))
    assert len(tars) >= 4
    assert {p.name for p in folder.iterdir()} == {
        f"{tar.stem}{end}" for tar in tars for end in (".tar", ".parquet", "_stats.json")
    }
    widths, words = [], []
    for tar in tars:
        rows = pq.read_table(tar.with_suffix(".parquet")).to_pylist()
        assert set(rows[0]) == IMG2DATASET_COLUMNS
        with tarfile.open(tar) as opened:
            members = {m.name: opened.extractfile(m) for m in opened.getmembers()}
            assert [*members] == [f"{row['key']}.{end}" for row in rows for end in ("jpg", "json", "txt")]
            for row in rows:
                image, metadata, text = (members[f"{row['key']}.{end}"] for end in ("jpg", "json", "txt"))
                assert image is not None
                assert metadata is not None
                assert text is not None
                assert json.load(metadata) == row
                assert text.read().decode() == row["caption"]
                with Image.open(image) as picture:
                    assert (picture.format, *picture.size) == ("JPEG", row["width"], row["height"])
                widths.append(row["width"])
                words.append(len(row["caption"].split()))
        stats = json.loads((folder / f"{tar.stem}_stats.json").read_text())
        assert stats["successes"] == len(rows)
    assert len(widths) == SAMPLES
    for found, wanted in zip(np.percentile(widths, [10, 50, 90]), (128, 256, 600), strict=True):
        assert abs(found - wanted) <= 0.2 * wanted
    assert 2 <= min(words) <= 4
    assert 60 <= max(words) <= 300
