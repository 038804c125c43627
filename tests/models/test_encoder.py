"""The encoder on packed images of different sizes."""

import pytest
import torch
from torch import Tensor

from trainclient.models.attention import Segments
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.parameters import initialise
from trainclient.models.patches import assemble_image, normalise, patch_positions, to_pixels

CONFIG = EncoderConfig(layers=2, width=24, heads=2, mlp_width=32, patch=2, merge=2, output_dim=10)
GRIDS = [(2, 4), (6, 2), (4, 4), (2, 2)]


def make_encoder(checkpoint: bool = False) -> ImageEncoder:
    encoder = ImageEncoder(CONFIG, checkpoint=checkpoint).double()
    initialise(encoder, 7, "encoder")
    return encoder


def make_images(grids: list[tuple[int, int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (r * c, 12), dtype=torch.uint8, generator=generator) for r, c in grids]


def encode(encoder: ImageEncoder, images: list[Tensor], grids: list[tuple[int, int]]) -> Tensor:
    sizes = torch.tensor([0, *[len(image) for image in images]], dtype=torch.int32)
    patches = torch.cat([torch.zeros(0, 12, dtype=torch.uint8), *images])
    grid = torch.tensor(grids, dtype=torch.int32).reshape(-1, 2)
    result: Tensor = encoder(patches, grid, sizes.cumsum(0, dtype=torch.int32))
    return result


def test_packed_images_equal_each_image_alone() -> None:
    encoder, images = make_encoder(), make_images(GRIDS)
    packed = encode(encoder, images, GRIDS)
    alone = [encode(encoder, [image], [grid]) for image, grid in zip(images, GRIDS, strict=True)]
    assert packed.shape == (sum(r * c for r, c in GRIDS) // 4, 10)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_permuting_images_permutes_embeddings() -> None:
    encoder, images = make_encoder(), make_images(GRIDS)
    parts = encode(encoder, images, GRIDS).split([r * c // 4 for r, c in GRIDS])
    order = [2, 0, 3, 1]
    permuted = encode(encoder, [images[i] for i in order], [GRIDS[i] for i in order])
    torch.testing.assert_close(permuted, torch.cat([parts[i] for i in order]), rtol=1e-12, atol=1e-12)


def test_positions_tell_where_a_patch_stands() -> None:
    encoder = make_encoder()
    image = make_images([(4, 4)])[0]
    assert not torch.allclose(encode(encoder, [image], [(4, 4)]), encode(encoder, [image], [(2, 8)]))
    swapped = image[[1, 0, *range(2, 16)]]
    assert not torch.allclose(encode(encoder, [image], [(4, 4)]), encode(encoder, [swapped], [(4, 4)]))


def test_no_images_still_give_every_parameter_a_gradient() -> None:
    encoder = make_encoder()
    embeddings = encode(encoder, [], [])
    assert embeddings.shape == (0, 10)
    embeddings.backward(torch.zeros_like(embeddings))
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_checkpointing_changes_no_gradient() -> None:
    images = make_images(GRIDS)
    gradients = []
    for checkpoint in (False, True):
        encoder = make_encoder(checkpoint)
        encode(encoder, images, GRIDS).square().sum().backward()
        gradients.append([parameter.grad for parameter in encoder.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert plain.any()
        torch.testing.assert_close(recomputed, plain)


def test_half_precision_stays_in_its_dtype() -> None:
    encoder = make_encoder().bfloat16()
    embeddings = encode(encoder, make_images(GRIDS), GRIDS)
    assert embeddings.dtype == torch.bfloat16
    exact = encode(make_encoder(), make_images(GRIDS), GRIDS)
    assert (embeddings.double() - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize(
    ("grid", "rows", "message"),
    [
        ((3, 4), 12, "multiples of merge = 2"),
        ((2, 4), 12, "cu_patches gives it 12"),
        ((0, 4), 0, "positive"),
        ((-2, -4), 8, "positive"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(grid: tuple[int, int], rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(make_encoder(), [torch.zeros(rows, 12, dtype=torch.uint8)], [grid])


def test_patches_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8 is required"):
        make_encoder()(torch.zeros(4, 12), torch.tensor([[2, 2]]), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"\['any', 12\] is required"):
        make_encoder()(torch.zeros(4, 13, dtype=torch.uint8), torch.tensor([[2, 2]]), torch.tensor([0, 4]))


def test_pixels_survive_a_round_trip() -> None:
    pixels = torch.arange(4, 256).byte().view(21, 12)
    assert torch.equal(to_pixels(normalise(pixels, 2, torch.float32)), pixels)


def test_assembled_image_holds_each_pixel_where_it_was() -> None:
    height, width, patch, merge = 8, 12, 2, 2
    picture = torch.arange(height * width * 3).view(height, width, 3)
    rows = []
    for block_y in range(0, height, patch * merge):
        for block_x in range(0, width, patch * merge):
            for y in range(block_y, block_y + patch * merge, patch):
                for x in range(block_x, block_x + patch * merge, patch):
                    rows.append(picture[y : y + patch, x : x + patch].reshape(-1))
    assert torch.equal(assemble_image(torch.stack(rows), 4, 6, patch, merge), picture)


def test_positions_are_merge_block_major() -> None:
    cpu = torch.device("cpu")
    segments = Segments.from_offsets("cu_patches", torch.tensor([0, 8, 12]), 12, cpu)
    positions = patch_positions(torch.tensor([[2, 4], [2, 2]]), segments, 2, cpu)
    first_block, second_block = [[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert positions.tolist() == [*first_block, *second_block, *first_block]
    row_major = patch_positions(torch.tensor([[2, 4], [2, 2]]), segments, 1, cpu)
    assert row_major[:8].tolist() == [[row, column] for row in range(2) for column in range(4)]
