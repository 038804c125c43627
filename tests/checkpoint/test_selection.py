"""Which checkpoint a run continues: what stands in a folder decides, and not how it is called."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.selection import newest, resumption, survey
from trainclient.checkpoint.state import (
    STATE_FILE,
    CheckpointError,
    Line,
    Manifest,
    TrainerState,
    read_manifest,
    write_manifest,
)

NEWEST, WHOLE, NONE = ResumeFrom.NEWEST, ResumeFrom.NEWEST_WHOLE, ResumeFrom.NONE


def add(folder: Path, step: int, line: Line | None = None, run: str = "ours") -> Path:
    """A checkpoint without tensors."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    cursor = {"version": 1, "stream_id": "a" * 64, "step": step, "stream": "{}"}
    write_manifest(path, Manifest(TrainerState(cursor, {}, run=run), {}, line=line or Line()))
    return path


def steps(folder: Path, wanted: int | ResumeFrom = NEWEST, settings: str = "") -> list[int]:
    """What a run may continue from."""
    return [stored.step for stored in resumption(survey(folder), wanted, settings).candidates]


def line(folder: Path, wanted: int | ResumeFrom = NEWEST, settings: str = "") -> Line:
    """The line of a run that continues from the first of these."""
    found = resumption(survey(folder), wanted, settings)
    return found.line(found.candidates[0] if found.candidates else None)


def test_an_empty_folder(tmp_path: Path) -> None:
    for wanted in (NEWEST, WHOLE, NONE):
        assert steps(tmp_path / "ckpt", wanted) == []
    assert line(tmp_path) == Line()


def test_a_copy_under_another_name_is_named_and_does_not_count(tmp_path: Path) -> None:
    for step in (2, 4):
        add(tmp_path, step)
    for name in ("step-00000900", "step-00000001"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    seen = survey(tmp_path)
    assert [stored.step for stored in seen.stored] == [4, 2]
    assert len(seen.warnings) == 2
    for name, warning in zip((1, 900), seen.warnings, strict=True):
        assert f"step-{name:08d} is passed over: its name says step {name}, and it holds step 2 of run ours" in warning
        assert "give --resume-from 2" in warning
    assert steps(tmp_path) == [4]
    assert steps(tmp_path, WHOLE) == [4, 2]
    with pytest.raises(CheckpointError, match="step-00000900 cannot be resumed: its name says step 900"):
        steps(tmp_path, 900)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    for step in range(1, 31):
        add(tmp_path, step)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of step 99 in .*: give --resume-from one of these"
    ) as caught:
        steps(tmp_path, 99)
    assert "steps 11, 12" in str(caught.value)
    assert "30 and 10 more" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 99 in .*, nor any other that can be read; give"):
        steps(tmp_path / "empty", 99)


def test_newest_whole_does_not_begin_anew_where_nothing_can_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        (add(tmp_path, step) / "trainer.json").write_text("{")
    with pytest.raises(
        CheckpointError,
        match=r"no folder in .* can be resumed: step-00000002: .* cannot .*\); put back what is missing",
    ):
        steps(tmp_path, WHOLE)


@pytest.mark.parametrize("wanted", [NEWEST, WHOLE])
def test_nothing_begins_anew_where_all_is_passed_over(tmp_path: Path, wanted: ResumeFrom) -> None:
    (tmp_path / "empty" / "step-00000003").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no folder in .* can be resumed: step-00000003: it has no trainer.json"):
        steps(tmp_path / "empty", wanted)
    add(tmp_path, 2).rename(tmp_path / "step-00000900")
    with pytest.raises(CheckpointError, match="can be resumed: step-00000900: its name says step 900, and it holds"):
        steps(tmp_path, wanted)


def test_none_refuses_a_folder_that_has_some(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert steps(tmp_path, NONE) == []
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(
        CheckpointError, match=r"has checkpoints \(step-00000003\); give an empty folder by --checkpoint"
    ):
        steps(tmp_path, NONE)


def test_who_went_back_goes_on_with_what_it_wrote_since(tmp_path: Path) -> None:
    """torchrun starts a run again with the options that it had."""
    for step in (100, 150, 200):
        add(tmp_path, step)
    back = line(tmp_path, 100, "settings")
    assert back == Line(1, ((0, 100),), ((100, "settings"),))
    assert steps(tmp_path, 100, "settings") == [100]  # as long as nothing was saved
    shutil.rmtree(tmp_path / "step-00000150")
    for step in (110, 150):
        add(tmp_path, step, back)
    for wanted in (NEWEST, 100):
        assert steps(tmp_path, wanted, "settings") == [150]
        assert line(tmp_path, wanted, "settings") == back
    assert resumption(survey(tmp_path), 100, "settings").notes[0].startswith("this run went back to step 100 before")
    assert steps(tmp_path, WHOLE) == [150, 110, 200, 100]
    # with other settings it is another attempt at the same
    assert steps(tmp_path, 100, "others") == [100]
    again = line(tmp_path, 100, "others")
    assert again == Line(2, ((0, 100),), ((100, "others"),))
    # back to what was left behind
    assert line(tmp_path, 200, "settings") == Line(2, ((0, 200),), ((200, "settings"),))
    assert line(tmp_path, 110, "settings").before == ((0, 100), (1, 110))


def test_what_a_line_holds() -> None:
    found = Line(3, ((0, 100), (2, 150)))
    holds = {(number, step) for number in range(5) for step in (100, 101, 150, 151) if found.holds(number, step)}
    assert holds == {(0, 100), (2, 100), (2, 101), (2, 150), (3, 100), (3, 101), (3, 150), (3, 151)}


def test_what_is_passed_over_is_left_behind(tmp_path: Path) -> None:
    """A run that goes on from an older checkpoint than the newest is not taken back by it at its next start."""
    for step in (1, 2, 3):
        add(tmp_path, step)
    found = resumption(survey(tmp_path), WHOLE)
    assert found.line(found.candidates[0]) == Line()
    older = found.line(found.candidates[1])
    assert older == Line(1, ((0, 2),))
    (tmp_path / "step-00000003").rename(tmp_path / "aside-step-00000003-0")
    add(tmp_path, 3, older)
    assert steps(tmp_path, WHOLE) == [3, 2, 1]
    assert line(tmp_path) == older


@pytest.mark.parametrize("damage", ["cut", "rubbish", "future", "flipped", "gone"])
def test_one_that_cannot_be_read(tmp_path: Path, damage: str) -> None:
    for step in (1, 2, 3):
        add(tmp_path, step)
    file = tmp_path / "step-00000003" / STATE_FILE
    text = file.read_text()
    changed = {"cut": text[:50], "rubbish": "[" * 9_999_999, "flipped": text.replace('"images": 0', '"images": 1')}
    file.write_text(changed.get(damage, text.replace('"version": 5', '"version": 6')))
    if damage == "gone":
        file.unlink()
        assert steps(tmp_path) == [2]
        assert "step-00000003 is passed over: it has no trainer.json" in survey(tmp_path).warnings[0]
        return
    with pytest.raises(
        CheckpointError, match=r"step-00000003 (cannot be read \(trainer.json: |has state version 6)"
    ) as caught:
        steps(tmp_path)
    assert ("it is damaged" in str(caught.value)) == (damage == "flipped")
    with pytest.raises(CheckpointError, match="step-00000003 cannot be resumed: "):
        steps(tmp_path, 3)
    assert "step-00000003 is passed over: " in survey(tmp_path).warnings[0]
    assert steps(tmp_path, WHOLE) == [2, 1]
    assert line(tmp_path, WHOLE).number == 1
    add(tmp_path, 4)
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize(
    "change",
    [
        *({"cursor": {}}, {"files": {"../x": {}}}, {"files": [1]}, {"line": {}}, {"more": 1}),
        {"files": {"data": {"bytes": "1", "crc32c": ""}}},
        {"line": {"number": "1", "before": [], "asked": []}},
        {"writer": {**dict.fromkeys(("host", "pid", "attempt", "release", "saved"), ""), "number": "1"}},
    ],
)
def test_fields_of_other_types_are_no_traceback(tmp_path: Path, change: dict[str, object]) -> None:
    path = add(tmp_path, 1)
    data = {key: value for key, value in json.loads((path / STATE_FILE).read_text()).items() if key != "crc32c"}
    for version in (4, 5):
        (path / STATE_FILE).write_text(json.dumps(data | {"version": version} | change))
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_manifest(path)


def test_export_takes_the_newest(tmp_path: Path) -> None:
    add(tmp_path, 1)
    last = add(tmp_path, 2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000900")
    assert newest(tmp_path) == newest(last) == last
    with pytest.raises(CheckpointError, match=r"there is no complete checkpoint .*nothing, nor one in it"):
        newest(tmp_path / "nothing")


def test_state_of_an_older_release_has_no_sums(tmp_path: Path) -> None:
    path = add(tmp_path, 1)
    data = json.loads((path / STATE_FILE).read_text())
    older = {key: value for key, value in data.items() if key not in ("crc32c", "files", "writer", "line", "degrees")}
    (path / STATE_FILE).write_text(json.dumps(older | {"version": 3}))
    found = read_manifest(path)
    assert (found.files, found.writer, found.line) == (None, None, Line())
    assert found.state == replace(found.state, run="ours", version=3)
