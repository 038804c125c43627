"""Makes a whole rank's microbatch what Qwen2-VL's family of models takes: packed, on the device.

The patches of the stream are those of these models but for their layout: uint8 (y, x, channel) here, normalised
(channel, frame, y, x) there, with the frame of a still image repeated. Turning them is left to the device.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from dataserver.planning.job.fields import Sizing
from dataserver.planning.plan.rotary_positions import rotary_positions
from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch
from trainclient.stream.microbatch import Array

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation, by channel, of the pixels that these models were trained on: CLIP's."""


@dataclass(frozen=True, slots=True)
class Qwen2VLInputs:
    """Makes the arguments of a model from microbatches."""

    image_token: int
    """Id of the tokens that embeddings of images replace."""
    frames: int
    """Frames in a patch; a still image is repeated."""
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @classmethod
    def of(cls, config: Any, sizing: Sizing) -> Self:
        """Return the inputs of a model with this configuration, from a stream with this sizing.

        Raises:
            ValueError: patches or blocks of another size than the model's.
        """
        vision = config.vision_config
        wanted = {"patch": vision.patch_size, "merge": vision.spatial_merge_size}
        found = {"patch": sizing.patch, "merge": sizing.merge}
        if found != wanted:
            raise ValueError(
                f"the stream's sizing has {found} and the model {wanted}: set stream.sizing to the model's"
            )
        return cls(config.image_token_id, vision.temporal_patch_size)

    def __call__(self, microbatch: FullModelMicrobatch, device: torch.device) -> dict[str, Any]:
        """The arguments of one microbatch: `input_ids`, `labels` [1, T], `position_ids` [4, 1, T], and with images
        `pixel_values` float32 [P, channels * frames * patch * patch] and `image_grid_thw` [I, 3].

        `use_cache` is False: with a cache, even an empty one, transformers lets packed samples see each other.

        Where other ranks have images and this one has none (`FullModelMicrobatch.lacks_images`), a grey one of a single
        token follows as a sample of its own, without a label: it adds nothing to loss and gradients. Nor does the token
        that stands in a microbatch without any, where other ranks have sequences: these models take no empty one.

        Raises:
            ValueError: text has the id of the image token.
        """
        tensors = microbatch.tensors
        ids = microbatch.token_ids(self.image_token).astype(np.int64)
        labels = np.full(len(tensors["labels"]), IGNORED_LABEL, np.int64)
        labels[1:] = tensors["labels"][:-1]  # these models shift labels themselves
        places = positions(microbatch)[:, None]
        arrays: dict[str, Array] = {"input_ids": ids[None], "labels": labels[None], "position_ids": places}
        if microbatch.lacks_images or not len(tensors["token_ids"]):
            token = self.image_token if microbatch.lacks_images else 0
            for name, value in {"input_ids": token, "labels": IGNORED_LABEL, "position_ids": 0}.items():
                behind = np.full((*arrays[name].shape[:-1], 1), value)
                arrays[name] = np.concatenate([arrays[name], behind], -1)
        patches, grid = microbatch.pictures
        if len(grid):
            arrays["image_grid_thw"] = frames_and(grid)
            arrays["pixel_values"] = patches
        found: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        if len(grid):
            found["pixel_values"] = self.pixels(found["pixel_values"])
        return {**found, "use_cache": False}

    def pixels(self, patches: Tensor) -> Tensor:
        """Float32 [P, channels * frames * patch * patch] of patches of the stream, uint8 [P, patch * patch * 3]."""
        count, channels, device = len(patches), len(self.mean), patches.device
        mean, std = (255 * torch.tensor(values, device=device)[:, None, None] for values in (self.mean, self.std))
        found = torch.empty(count, channels, self.frames, patches.shape[1] // channels, device=device)
        found[:] = patches.view(count, -1, channels).transpose(1, 2)[:, :, None]
        return found.sub_(mean).div_(std).flatten(1)  # in place, since some trainers have this done by their CPUs


def frames_and(grid: Array) -> Array:
    """Frames, rows and columns of still images, int64 [I, 3], of their rows and columns."""
    return np.pad(grid, ((0, 0), (1, 0)), constant_values=1)


def positions(microbatch: FullModelMicrobatch) -> Array:
    """Positions in text, time, height and width of each token, int64 [4, T], starting again with every sample.

    Those in the text tell samples apart. In the others the tokens of an image have their block's row and column beyond
    the position of the image, and what follows goes on behind the larger side (Qwen2-VL, section 2.1: M-RoPE).
    """
    tensors = microbatch.tensors
    if "tiles" in tensors:
        raise ValueError("the job's sizing.rule is tiles, and Qwen's models take whole images; set it to qwen")
    text, cu_lengths, slots = (tensors[n].astype(np.int64) for n in ("position_ids", "cu_lengths", "embedding_slots"))
    blocks = (
        tensors["grid"].astype(np.int64) // microbatch.merge if len(microbatch.rows) else np.zeros((0, 2), np.int64)
    )
    return np.concatenate([text[None], rotary_positions(text, cu_lengths, slots, blocks)])
