"""The generator: loss on packed targets, gradients to the conditions, sampling."""

import pytest
import torch
from torch import Tensor

from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.parameters import initialise

CONFIG = GeneratorConfig(layers=2, width=24, heads=2, mlp_width=32, patch=2, merge=2, condition_dim=10)
GRIDS = [(2, 4), (6, 2), (2, 2)]
QUERIES = 3


def make_generator(checkpoint: bool = False) -> ImageGenerator:
    generator = ImageGenerator(CONFIG, checkpoint=checkpoint).double()
    initialise(generator, 7, "generator")
    return generator


class Image:
    """One target with all that belongs to it."""

    def __init__(self, number: int, grid: tuple[int, int]) -> None:
        random = torch.Generator().manual_seed(number)
        rows = grid[0] * grid[1]
        self.grid = grid
        self.patches = torch.randint(0, 256, (rows, 12), dtype=torch.uint8, generator=random)
        self.noise = torch.randn(rows, 12, dtype=torch.float64, generator=random)
        self.conditions = torch.randn(QUERIES, 10, dtype=torch.float64, generator=random)
        self.time = torch.rand((), dtype=torch.float64, generator=random)


IMAGES = [Image(number, grid) for number, grid in enumerate(GRIDS)]


def pack(images: list[Image]) -> dict[str, Tensor]:
    sizes = torch.tensor([0, *[len(image.patches) for image in images]])
    double = torch.float64
    return {
        "patches": torch.cat([torch.zeros(0, 12, dtype=torch.uint8), *[i.patches for i in images]]),
        "grid": torch.tensor([i.grid for i in images], dtype=torch.int32).reshape(-1, 2),
        "cu_patches": sizes.cumsum(0),
        "conditions": torch.cat([torch.zeros(0, 10, dtype=double), *[i.conditions for i in images]]).requires_grad_(),
        "condition_offsets": torch.arange(len(images) + 1) * QUERIES,
        "noise": torch.cat([torch.zeros(0, 12, dtype=double), *[i.noise for i in images]]),
        "time": torch.tensor([i.time for i in images], dtype=double),
        "loss_mask": torch.ones(len(images), dtype=torch.bool),
    }


def test_packed_loss_is_the_sum_of_each_image_alone() -> None:
    generator = make_generator()
    packed = generator(**pack(IMAGES))
    alone = torch.stack([generator(**pack([image])) for image in IMAGES])
    torch.testing.assert_close(packed, alone.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(generator(**pack(IMAGES[::-1])), packed, rtol=1e-12, atol=0)


def test_velocities_follow_a_permutation_of_images() -> None:
    generator = make_generator()

    def velocity(images: list[Image]) -> Tensor:
        inputs = pack(images)
        names = ("grid", "cu_patches", "conditions", "condition_offsets", "time")
        return generator.velocity(inputs["noise"], *[inputs[name] for name in names])

    parts = velocity(IMAGES).split([len(image.patches) for image in IMAGES])
    order = [2, 0, 1]
    expected = torch.cat([parts[i] for i in order])
    torch.testing.assert_close(velocity([IMAGES[i] for i in order]), expected, rtol=1e-12, atol=1e-13)


def test_loss_is_flow_matching() -> None:
    generator, image = make_generator(), IMAGES[0]
    inputs = pack([image])
    target = image.patches.double() / 255 * 2 - 1
    noisy = (1 - image.time) * target + image.time * image.noise
    names = ("grid", "cu_patches", "conditions", "condition_offsets", "time")
    velocity = generator.velocity(noisy, *[inputs[name] for name in names])
    expected = (velocity - (image.noise - target)).square().sum() / 12
    torch.testing.assert_close(generator(**inputs), expected, rtol=1e-12, atol=0)


def test_positions_tell_where_a_patch_stands() -> None:
    generator, inputs = make_generator(), pack([IMAGES[0]])
    loss = generator(**inputs)
    assert not torch.allclose(loss, generator(**(inputs | {"grid": torch.tensor([[4, 2]])})))


def test_a_fresh_generator_sends_gradients_everywhere() -> None:
    generator, inputs = make_generator(), pack(IMAGES)
    generator(**inputs).backward()
    assert all(row.any() for row in inputs["conditions"].grad)
    for name, parameter in generator.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_gradients_match_finite_differences() -> None:
    generator, inputs = make_generator(), pack(IMAGES[:2])
    conditions = inputs.pop("conditions")
    assert torch.autograd.gradcheck(lambda c: generator(conditions=c, **inputs), [conditions])


def test_a_masked_image_adds_nothing() -> None:
    generator, inputs = make_generator(), pack(IMAGES)
    inputs["loss_mask"] = torch.tensor([True, False, True])
    loss = generator(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, generator(**pack([IMAGES[0], IMAGES[2]])), rtol=1e-12, atol=0)
    assert not inputs["conditions"].grad[QUERIES : 2 * QUERIES].any()
    assert inputs["conditions"].grad[:QUERIES].any()


def test_an_image_sees_only_its_own_conditions() -> None:
    generator, inputs = make_generator(), pack(IMAGES)
    inputs["loss_mask"] = torch.tensor([False, False, True])
    generator(**inputs).backward()
    assert not inputs["conditions"].grad[: 2 * QUERIES].any()


def test_no_images() -> None:
    generator, inputs = make_generator(), pack([])
    loss = generator(**inputs)
    loss.backward()
    assert loss.item() == 0
    assert inputs["conditions"].grad.shape == (0, 10)
    for name, parameter in generator.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpoint in (False, True):
        generator, inputs = make_generator(checkpoint), pack(IMAGES)
        generator(**inputs).backward()
        gradients.append([inputs["conditions"].grad, *[p.grad for p in generator.parameters()]])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


@pytest.mark.long
def test_trained_on_one_picture_it_draws_that_picture() -> None:
    generator, image = make_generator(), IMAGES[2]
    inputs = pack([image])
    inputs["conditions"] = inputs["conditions"].detach()
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(generator.parameters(), lr=3e-3)
    losses = []
    for _ in range(600):
        inputs["noise"] = torch.randn(4, 12, dtype=torch.float64, generator=random)
        inputs["time"] = torch.rand(1, dtype=torch.float64, generator=random)
        optimizer.zero_grad()
        loss = generator(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-100:]) < 0.5 * sum(losses[:100])
    shape = ("grid", "cu_patches", "conditions", "condition_offsets")
    drawn = generator.sample(*[inputs[name] for name in shape], noise=image.noise, steps=20)
    assert drawn.dtype == torch.uint8
    error = (drawn.double() - image.patches.double()).abs().mean()
    unrelated = (drawn.double() - image.patches.flip(0).double()).abs().mean()
    assert error < 0.6 * unrelated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": torch.zeros(7, 12)}, "noise has shape"),
        ({"time": torch.zeros(2)}, "time has shape"),
        ({"loss_mask": torch.ones(1)}, "bool is required"),
        ({"loss_mask": torch.ones(2, dtype=torch.bool)}, "loss_mask has shape"),
        ({"condition_offsets": torch.tensor([0, 4])}, "condition_offsets run from 0 to 4"),
        ({"condition_offsets": torch.tensor([0, 1, 3])}, "1 query segments meet 2 key segments"),
        ({"conditions": torch.zeros(3, 9)}, "conditions has shape"),
        ({"grid": torch.tensor([[4, 4]])}, "cu_patches gives it 8"),
    ],
)
def test_views_that_contradict_themselves_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_generator()(**(pack([IMAGES[0]]) | change))


def test_sampling_needs_a_step() -> None:
    inputs = pack([IMAGES[0]])
    shape = ("grid", "cu_patches", "conditions", "condition_offsets")
    with pytest.raises(ValueError, match="at least 1"):
        make_generator().sample(*[inputs[name] for name in shape], noise=inputs["noise"], steps=0)
