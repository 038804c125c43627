"""Transforms of the images of real views: drawn per sample and epoch, whoever asks and whatever else is in the view."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assembly.test_prepared_views import Run, image_of, open_run, tensors_of
from shards import write_interleaved, write_pairs

from dataserver.images import decode_patches
from dataserver.images.transforms import DrawnTransform
from dataserver.jobs import JobPlanner
from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.job.identity import JobSpecError, parse_job
from dataserver.planning.stream.randomness import Operator, dataset_key, draws

TRANSFORMS = [{"kind": "random_resized_crop", "min_area": "0.3"}, {"kind": "horizontal_flip"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Pairs and documents of several images, which four steps go through more than once."""
    root = tmp_path_factory.mktemp("shards")
    folders = [write_pairs(root / "pairs", 12, 6), write_interleaved(root / "documents", 6, 3)]
    return open_run(folders, steps=4)


def changed(run: Run, encoders: int = 2, **stream: Any) -> Run:
    """The same with another stream and another number of encoder ranks."""
    data = run.job.spec.model_dump(mode="json", exclude_none=True)
    data["stream"] |= stream
    data["execution"]["modules"][0]["dp"] = encoders
    job = parse_job(data)
    return Run(job, run.datasets, JobPlanner(job, run.datasets))


def images_of(run: Run) -> dict[tuple[int, ...], bytes]:
    """Patches of every image of all views of images, by dataset, epoch, sample and number within the sample."""
    found = {}
    for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR):
        for plan, view in run.views(kind):
            tensors, samples = tensors_of(run.prepare(plan, view)), plan.samples
            ends = tensors["cu_patches"]
            for n, item in enumerate(view.items.tolist()):
                i = int(samples.image_sample[item])
                number = item - int(samples.image_offsets[i])
                key = (int(samples.dataset[i]), int(samples.epoch[i]), int(samples.sample[i]), number)
                found[key] = tensors["patches"][ends[n] : ends[n + 1]].tobytes()
    return found


def test_each_image_has_the_words_of_its_sample_and_epoch(plain: Run) -> None:
    """Where each word comes from, the long way."""
    run = changed(plain, transforms=TRANSFORMS)
    found, numbers = images_of(run), set()
    for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR):
        for plan, view in run.views(kind):
            for item in view.items.tolist():
                data, shape, i = image_of(run, plan, item)
                dataset, epoch = int(plan.samples.dataset[i]), int(plan.samples.epoch[i])
                sample, number = int(plan.samples.sample[i]), item - int(plan.samples.image_offsets[i])
                words = draws(0, Operator(7), dataset_key(f"d{dataset}"), epoch, sample, 8 * number + 8)[-8:].tolist()
                drawn = [
                    DrawnTransform(options, tuple(words[4 * t : 4 * t + 4]))
                    for t, options in enumerate(run.job.stream.transforms or ())
                ]
                out = np.empty((shape.rows * shape.columns, 7 * 7 * 3), np.uint8)
                assert decode_patches(data, shape, run.job.stream.sizing, out, drawn)
                assert out.tobytes() == found[dataset, epoch, sample, number]
                numbers.add(number)
    assert max(numbers) > 0, "some samples have several images"


def test_images_differ_between_epochs_and_not_between_jobs_of_the_same_stream(plain: Run) -> None:
    run = changed(plain, transforms=TRANSFORMS)
    found, untouched = images_of(run), images_of(plain)
    assert images_of(changed(run, encoders=1)) == found
    assert found.keys() == untouched.keys(), "plans are as they were"
    again = [(a, b) for a in found for b in found if a[1] < b[1] and (a[0], *a[2:]) == (b[0], *b[2:])]
    assert len(again) > 10
    assert all(untouched[a] == untouched[b] for a, b in again)
    assert all(found[a] != found[b] for a, b in again)


def test_augmented_images_differ_between_epochs_and_by_options_alone(plain: Run) -> None:
    augment = {"kind": "rand_augment", "num_ops": 4, "magnitude": 20}
    run = changed(plain, transforms=[augment])
    found, filled = images_of(run), images_of(changed(plain, transforms=[{**augment, "fill": [9, 9, 9]}]))
    assert images_of(changed(run, encoders=1)) == found
    again = [(a, b) for a in found for b in found if a[1] < b[1] and (a[0], *a[2:]) == (b[0], *b[2:])]
    assert len(again) > 10
    assert sum(found[a] != found[b] for a, b in again) > 0.9 * len(again), "all but a few drew other operations"
    assert found != filled, "options count"


def test_hues_that_stay_are_no_field_of_the_stream(plain: Run) -> None:
    jobs = [
        changed(plain, transforms=[{"kind": "color_jitter", **hue}]).job for hue in ({}, {"hue": "0"}, {"hue": "0.1"})
    ]
    assert jobs[0].stream_id == jobs[1].stream_id != jobs[2].stream_id
    assert "hue" not in jobs[1].text


def test_transforms_are_part_of_the_stream(plain: Run) -> None:
    ids = [changed(plain, transforms=TRANSFORMS[:n] or None).job.stream_id for n in range(3)]
    assert ids[0] == plain.job.stream_id
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([{"kind": "sepia"}], 'stream.transforms.0: kind is "sepia"; one of horizontal_flip, random_resized_crop'),
        ([{"kind": "horizontal_flip", "probability": "1.5"}], "probability is 1.5; a value in"),
        ([{"kind": "random_resized_crop", "min_area": "0"}], "min_area is 0; a value from 0.01 to 1"),
        ([{"kind": "random_resized_crop", "area": "1"}], "this key is unknown"),
        ([{"kind": "color_jitter", "hue": "0.6"}], "hue is 0.6; a value in \\[0, 0.5\\] is required"),
        ([{"kind": "rand_augment", "num_ops": 5}], "num_ops: found 5; it should be less than or equal to 4"),
        ([{"kind": "rand_augment", "num_ops": 0}], "num_ops: found 0; it should be greater than or equal to 1"),
        (
            [{"kind": "rand_augment", "magnitude": 31}],
            "magnitude is 31; with num_magnitude_bins 31 a value from 0 to 30",
        ),
        ([{"kind": "rand_augment", "magnitude": -1}], "magnitude: found -1"),
        ([{"kind": "rand_augment", "num_magnitude_bins": 1}], "num_magnitude_bins: found 1"),
        ([{"kind": "rand_augment", "fill": [0, 0]}], "fill"),
        ([{"kind": "rand_augment", "fill": [0, 0, 256]}], "found 256; it should be less than or equal to 255"),
        ([{"kind": "rand_augment", "interpolation": "cubic"}], 'interpolation: found "cubic"'),
        ([], "at least 1 item"),
        ([TRANSFORMS[1]] * 9, "at most 8 items"),
    ],
)
def test_transforms_that_cannot_be(plain: Run, transforms: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(JobSpecError, match=message):
        changed(plain, transforms=transforms)
