"""`execution.validity: exact`: views of samples that say what decoding finds."""

from pathlib import Path

import numpy as np
import pytest
from assembly.test_prepared_views import Run, open_run, tensors_of
from shards import break_images, write_interleaved, write_pairs, write_texts

from dataserver.assembly import Validity
from dataserver.assembly.sequences import IGNORED
from dataserver.dataset import StaleIndexError, build_index
from dataserver.jobs import JobPlanner
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import parse_job
from dataserver.planning.stream.samples import Task

PAIRS, DOCUMENTS = 0, 1


def exact(run: Run) -> Run:
    """The same job with exact validity."""
    data = run.job.spec.model_dump(mode="json", exclude_none=True)
    data["execution"]["validity"] = "exact"
    job = parse_job(data)
    assert job.stream_id == run.job.stream_id
    assert job.job_id != run.job.job_id
    return Run(job, run.datasets, JobPlanner(job, run.datasets))


def test_a_sample_is_invalid_where_any_of_its_images_is_and_its_labels_are_ignored(tmp_path: Path) -> None:
    folders = [
        write_pairs(tmp_path / "pairs", formats=("PNG",)),
        write_interleaved(tmp_path / "documents"),
        write_texts(tmp_path / "texts"),
    ]
    counts = np.diff(open_run(folders).datasets[DOCUMENTS].shards[0].sizes().image_offsets)
    several = int(np.flatnonzero(counts > 1)[0])
    broken = {(PAIRS, 3), (PAIRS, 7), (DOCUMENTS, several)}
    break_images(folders[PAIRS], (3, 0), (7, 0))
    break_images(folders[DOCUMENTS], (several, int(counts[several]) - 1))
    plain = open_run(folders, steps=8)
    found: set[tuple[int, int, Task]] = set()
    checking = exact(plain)
    for (one, view), (other, same) in zip(plain.views(), checking.views(), strict=True):
        assert (one.text_tokens, one.target_patches) == (other.text_tokens, other.target_patches)
        assert np.array_equal(view.items, same.items)
        prepared, checked = plain.prepare(one, view), checking.prepare(other, same, filler=171, threads=2)
        if view.kind is not ModuleKind.BACKBONE:
            assert np.array_equal(prepared.buffer, checked.buffer)
            assert np.array_equal(prepared.validity, checked.validity)
            continue
        samples = one.samples
        expected = []
        for i in view.items.tolist():
            name = (int(samples.dataset[i]), int(samples.sample[i]))
            expected.append(Validity.INVALID if name in broken else Validity.VALID)
            if name in broken:
                found.add((*name, Task(samples.task[i])))
        assert checked.validity.tolist() == expected
        before, after = tensors_of(prepared), tensors_of(checked)
        lengths = np.diff(before["cu_lengths"])
        ignored = np.repeat(np.array(expected) == Validity.INVALID, lengths)
        assert np.array_equal(after.pop("labels"), np.where(ignored, IGNORED, before.pop("labels")))
        assert all(np.array_equal(before[name], after[name]) for name in after)
    assert {name[:2] for name in found} == broken
    assert {task for *_, task in found} == {Task.UNDERSTANDING, Task.GENERATION}


def test_labels_need_not_be_asked_for(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, num_samples=12, shard_size=12)
    build_index(folder, workers=1)
    break_images(folder, (5, 0))
    run = exact(open_run([folder], steps=1, ratio="0"))
    for plan, view in run.views(ModuleKind.BACKBONE):
        invalid = run.prepare(plan, view, ["token_ids"]).validity == Validity.INVALID
        assert np.array_equal(invalid, plan.samples.sample[view.items] == 5)


def test_an_image_is_not_judged_while_storage_fails(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, num_samples=12, shard_size=12)
    run = exact(open_run([folder], steps=1, ratio="0"))
    content = (folder / "00000.tar").read_bytes()
    (folder / "00000.tar").write_bytes(b"")
    plan, view = next(run.views(ModuleKind.BACKBONE))
    with pytest.raises(StaleIndexError, match="has 0 bytes"):
        run.prepare(plan, view)
    (folder / "00000.tar").write_bytes(content)
    assert (run.prepare(plan, view).validity == Validity.VALID).all()
