"""The transforms of a view's images, with the words that are drawn for them."""

from collections.abc import Sequence

from dataserver.images import TRANSFORM_WORDS, DrawnTransform
from dataserver.planning.job.fields import InstalledPixels, Stream
from dataserver.planning.stream.randomness import Operator, dataset_key, draws
from dataserver.planning.stream.samples import StepSamples
from dataserver.transforms import Pixels


def draw_transforms(
    stream: Stream, samples: StepSamples, images: Sequence[tuple[int, int]], installed: Pixels
) -> list[tuple[DrawnTransform, ...]]:
    """The transforms of each image, by its sample's position in the step and its number within the sample.

    Words are keyed by dataset, epoch and sample; transform t of an image has those from (number x transforms + t) x 4.
    In a part of a document the number is that within the whole document (`StepSamples.locate`).
    So an image is the same in all views of an epoch, and another one in the next epoch. `installed` applies those that
    users installed.
    """
    wanted = stream.transforms or ()
    by = [installed if isinstance(options, InstalledPixels) else None for options in wanted]
    if not wanted:
        return [()] * len(images)
    count, of_sample = TRANSFORM_WORDS * len(wanted), dict[int, list[int]]()
    found = []
    for position, number in images:
        if position not in of_sample:
            num_images = int(samples.image_offsets[position + 1] - samples.image_offsets[position])
            num_images += 0 if samples.parts is None else int(samples.parts[position, 3])  # those before the part
            key = dataset_key(stream.datasets[int(samples.dataset[position])].name)
            epoch, sample = int(samples.epoch[position]), int(samples.sample[position])
            words = draws(stream.seed, Operator.IMAGE_TRANSFORM, key, epoch, sample, count * num_images)
            of_sample[position] = words.tolist()
        own = of_sample[position][count * number : count * (number + 1)]
        if len(own) != count:
            raise ValueError(
                f"image {number} of sample {position} of the step has {len(own)} words for its transforms, {count} are "
                "required; the plan is not consistent"
            )
        each = zip(*[iter(own)] * TRANSFORM_WORDS, strict=True)
        found.append(tuple(map(DrawnTransform, wanted, each, by)))
    return found
