"""How an image becomes a patch grid: by our own rule, or by that of a released model's image processor."""

from collections.abc import Mapping
from enum import StrEnum
from math import isqrt
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import Field, field_validator, model_validator

from dataserver.planning.job.fields.audio import AudioSizing
from dataserver.planning.job.fields.tiles import MAX_SIDE_TILES, OF_JSON, ImageMarks, Tiles
from dataserver.planning.job.fields.values import SpecModel
from dataserver.planning.job.fields.video import MAX_PIXELS, VideoSizing

MAX_PATCHES: Final = 2**20
"""Most patches of an image that a job may ask for."""
MAX_VIDEO_PATCHES: Final = 2**28
"""Most patches of a video that a job may ask for."""
BACKGROUND: Final = (122, 116, 104)
"""Red, green and blue around images of the rule `pad` that names no others: CLIP's mean, as LLaVA 1.5 has it."""
MAX_ASPECT: Final = 200
"""Longer images than this many times their short side are refused by Qwen's processors."""


class Quality(StrEnum):
    """How an image is decoded before it is scaled to its patch grid."""

    FAST = "fast"
    """A JPEG at the smallest of the scales 1/1 to 1/8 that covers the grid, which its decoder has at less cost."""
    EXACT = "exact"
    """The image is decoded whole."""


class SizingRule(StrEnum):
    """Which image processor's arithmetic makes patch grids."""

    QWEN = "qwen"
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: sides are rounded to merge blocks, half to even; an image of more than
    `max_pixels` is then scaled down, one of fewer than `min_pixels` up. An image that is longer than 200 times its
    short side, which these processors refuse, counts as 200 times as long."""
    NAFLEX = "naflex"
    """SigLIP 2 (NaFlex): the largest grid of the image's aspect within `max_patches`, sides rounded up; small images
    are enlarged."""
    SQUARE = "square"
    """SigLIP, Gemma 3: scaled to `side` x `side` pixels, aspect not kept."""
    CROP = "crop"
    """CLIP, LLaVA 1.5: the short side is scaled to `shortest_edge`, and the `side` x `side` pixels in the middle are
    cut out."""
    PAD = "pad"
    """LLaVA 1.5 with `image_aspect_ratio: pad`, `do_pad` in transformers: an image in the middle of a square of the
    colour `background`, scaled to `side` x `side` pixels."""
    TILES = "tiles"
    """LLaVA-OneVision, InternVL, Idefics3, SmolVLM: cut into tiles of `side` x `side` pixels, as `tiles` says, beside a
    picture of the whole. Each is a grid of its own, and all are one image."""


class Resampling(StrEnum):
    """A filter of Pillow that scales images."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


_FIELDS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = MappingProxyType(
    {
        "none": ((), ()),
        SizingRule.QWEN: (("min_pixels", "max_pixels"), ()),
        SizingRule.NAFLEX: ((), ()),
        SizingRule.SQUARE: (("side",), ()),
        SizingRule.CROP: (("side",), ("shortest_edge",)),
        SizingRule.PAD: (("side",), ("background",)),
        SizingRule.TILES: (("side", "tiles"), ()),
    }
)
"""The fields that each rule needs, and those that it may have."""
_OF_RULES: Final = ("min_pixels", "max_pixels", "side", "shortest_edge", "background", "tiles")


Colour = Annotated[int, Field(ge=0, le=255)]


class Sizing(SpecModel):
    """How an image becomes a patch grid."""

    patch: Annotated[int, Field(ge=1, le=256)] = 14
    """Side of a square patch in pixels."""
    merge: Annotated[int, Field(ge=1, le=16)] = 2
    """merge x merge patches become one backbone token; grids are multiples of it in both directions."""
    max_patches: Annotated[int, Field(ge=1, le=MAX_PATCHES)] = 1024
    """Most patches of one image; larger images are scaled down, with the same aspect ratio. The default is that of jobs
    without rule and of `naflex`. With the rules `qwen`, `square`, `crop`, `pad` and `tiles` it follows from other
    fields: leave it out."""
    quality: Quality = Quality.FAST
    """`fast` decodes JPEGs at a reduced size if that suffices; `exact` gives the pixels of an image processor."""
    rule: SizingRule | None = None
    """Image processor whose grids are made: `qwen` (Qwen2-VL, 2.5-VL, 3-VL), `naflex` (SigLIP 2), `square` (SigLIP,
    Gemma 3), `crop` (CLIP, LLaVA 1.5), `pad` (LLaVA 1.5 with `do_pad`), `tiles` (LLaVA-OneVision, InternVL, Idefics3,
    SmolVLM). By default an image is scaled down to `max_patches`, and never enlarged but by rounding to whole merge
    blocks."""
    min_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] | None = None
    """Only with `qwen`, and required there: smaller images are enlarged to this number of pixels. `size.shortest_edge`
    or `min_pixels` of preprocessor_config.json."""
    max_pixels: Annotated[int, Field(ge=1, le=MAX_PIXELS)] | None = None
    """Only with `qwen`, and required there: larger images are scaled down to this number of pixels. `size.longest_edge`
    or `max_pixels` of preprocessor_config.json."""
    side: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Only with `square`, `crop`, `pad` and `tiles`, and required there: pixels of each side of every image, or tile.
    What remains to the right of the last whole patch, and below it, is dropped, as by convolutions."""
    shortest_edge: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Only with `crop`: pixels to which the short side is scaled before the crop; by default `side`."""
    background: Annotated[tuple[Colour, Colour, Colour], OF_JSON] | None = None
    """Only with `pad`: red, green and blue around an image; the `image_mean` of an image processor times 255, rounded
    down. By default 122, 116, 104: CLIP's."""
    resampling: Resampling | None = None
    """Filter of Pillow that scales images, as the `resample` of an image processor says. By default the server's own
    bilinear filter, which is faster. One of Pillow's filters is required with `crop`, `pad`, `tiles`, and with `square`
    if `side` is no multiple of `patch`."""
    tiles: Tiles | None = None
    """Only with `tiles`, and required there: how an image is cut."""
    marks: ImageMarks | None = None
    """Tokens of text before and between the embeddings of an image, as the processors of Idefics3 and SmolVLM write
    them. A server fills them in if conversations leave `template` to it and the tokenizer's folder has such a
    processor. By default there are none."""

    audio: AudioSizing | None = None
    """How audio clips become spectrograms and rows; by default as for Qwen2-Audio."""

    video: VideoSizing | None = None
    """How videos become frames and patches; by default as for Qwen2-VL."""

    @field_validator("video")
    @classmethod
    def _plain_video(cls, video: VideoSizing | None) -> VideoSizing | None:
        return None if video == VideoSizing() else video

    @field_validator("audio")
    @classmethod
    def _plain(cls, audio: AudioSizing | None) -> AudioSizing | None:
        """A job that states the defaults is the job that states nothing."""
        return None if audio == AudioSizing() else audio

    @field_validator("background")
    @classmethod
    def _other_background(cls, background: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        return None if background == BACKGROUND else background

    @field_validator("marks")
    @classmethod
    def _with_any(cls, marks: ImageMarks | None) -> ImageMarks | None:
        """No marks are no marks, however a job says so."""
        return None if marks == ImageMarks() else marks

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """State the bound that follows from a rule: whoever reads a complete job then need not know the rule."""
        if not isinstance(data, dict) or not isinstance(data.get("rule"), str) or "max_patches" in data:
            return data
        most = _most_patches({name: field.default for name, field in cls.model_fields.items()} | data)
        return data if most is None or most > MAX_PATCHES else {**data, "max_patches": most}

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed, possible = _FIELDS[self.rule or "none"]
        rule = f"sizing.rule {self.rule}" if self.rule else "a sizing without rule"
        if missing := [name for name in needed if getattr(self, name) is None]:
            raise ValueError(f"{rule} has no {' and no '.join(missing)}; state what preprocessor_config.json has")
        if more := [n for n in _OF_RULES if getattr(self, n) is not None and n not in (*needed, *possible)]:
            raise ValueError(f"{rule} has no use for {', '.join(more)}; leave {'it' if len(more) == 1 else 'them'} out")
        self._check_pixels()
        self._check_tiles()
        most = _most_patches(self.__dict__)
        if most is not None and most > MAX_PATCHES:
            raise ValueError(f"{rule} allows images of {most} patches; at most {MAX_PATCHES} are possible")
        if most is not None and most != self.max_patches:
            raise ValueError(f"max_patches is {self.max_patches}, and {rule} makes it {most}; leave it out")
        self._check_video()
        if self.max_patches < self.merge**2:
            raise ValueError(
                f"max_patches is {self.max_patches}; at least merge^2 = {self.merge**2} are required for one token"
            )
        return self

    @property
    def of_frames(self) -> "Sizing":
        """How a frame of a video becomes a patch grid; with the rule `qwen3` its bounds are those of any video."""
        video = self.video or VideoSizing.model_construct()
        least, most = video.frame_pixels(self.patch * self.merge)
        found = Sizing.model_construct(
            patch=self.patch,
            merge=self.merge,
            rule=SizingRule.QWEN,
            min_pixels=least,
            max_pixels=most,
            quality=self.quality,
            resampling=self.resampling,
        )
        return found.model_copy(update={"max_patches": _most_patches(found.__dict__)})

    @property
    def bounded_by(self) -> str:
        """The field to lower for fewer patches of an image; what follows from a rule cannot be set."""
        if self.rule is SizingRule.QWEN:
            return "max_pixels"
        if self.tiles is not None:
            return f"tiles.{self.tiles.bounded_by}"
        return "max_patches" if self.side is None else "side"

    def of_rule(self) -> dict[str, Any]:
        """The rule and the fields that it has; nothing of the filter, which changes no grid."""
        return self.model_dump(include={"rule", *_OF_RULES}, exclude_none=True)

    def _check_tiles(self) -> None:
        """Raise ValueError unless tiles and marks suit the other fields."""
        if self.tiles is None or self.side is None:
            return
        edge = self.tiles.longest_edge
        if edge is not None and (edge % self.side or edge % 2):
            raise ValueError(f"tiles.longest_edge is {edge}; an even multiple of side {self.side} is required")
        if self.tiles.grids is not None and self.merge != 1:
            raise ValueError(f"merge is {self.merge}; tiles.choice pinpoints has an embedding for each patch, merge 1")
        if self.tiles.grids is not None and self.marks is not None:
            raise ValueError("tiles.choice pinpoints has no tokens between embeddings; leave marks out")
        rows, columns = self.tiles.most_sides(self.side)
        if max(rows, columns) > MAX_SIDE_TILES:
            raise ValueError(
                f"tiles.longest_edge is {edge}, {rows} times side {self.side}; at most {MAX_SIDE_TILES} tiles are "
                "possible in a row or a column"
            )
        if self.marks is not None and (self.marks.tiles or rows * columns > 1):
            known = len(self.marks.tiles), len(self.marks.tiles[0]) if self.marks.tiles else 0
            if known[0] < rows or known[1] < columns:
                raise ValueError(
                    f"marks.tiles has {known[0]} rows of {known[1]} tiles, and images have up to {rows} rows and "
                    f"{columns} columns; state the tokens of all of them"
                )

    def _check_video(self) -> None:
        """Raise ValueError where frames, or whole videos, could have too many patches."""
        if self.video is None:
            return
        pixels = max(self.video.frame_pixels(self.patch * self.merge))
        if pixels > MAX_PIXELS:
            raise ValueError(f"video allows frames of {pixels} pixels; at most {MAX_PIXELS} are possible")
        most, groups = self.of_frames.max_patches, self.video.max_groups
        if most > MAX_PATCHES:
            raise ValueError(f"video allows frames of {most} patches; at most {MAX_PATCHES} are possible")
        if most * groups > MAX_VIDEO_PATCHES:
            raise ValueError(
                f"video allows {groups} groups of frames of {most} patches; at most {MAX_VIDEO_PATCHES} patches of a "
                "video are possible: lower video.max_frames or video.max_pixels"
            )

    def _check_pixels(self) -> None:
        """Raise ValueError unless the fields of a rule suit each other."""
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels is {self.min_pixels} and max_pixels {self.max_pixels}; the latter is less")
        if self.rule is SizingRule.NAFLEX and self.merge != 1:
            raise ValueError(f"merge is {self.merge}; the grids of rule naflex are whole for merge 1 alone")
        if self.side is None:
            return
        patches = self.side // self.patch
        if not patches or patches % self.merge:
            raise ValueError(
                f"side is {self.side}, which makes {patches} patches of {self.patch}; a positive multiple of merge "
                f"{self.merge} is required"
            )
        if self.shortest_edge is not None and self.shortest_edge < self.side:
            raise ValueError(f"shortest_edge is {self.shortest_edge}; at least side {self.side} is required")
        always = self.rule in (SizingRule.CROP, SizingRule.PAD, SizingRule.TILES)
        if self.resampling is None and (always or self.side % self.patch):
            raise ValueError(
                f"resampling is not stated; rule {self.rule} with side {self.side} and patch {self.patch} needs "
                f"{', '.join(Resampling)}"
            )


def _most_patches(fields: Mapping[str, Any]) -> int | None:
    """The patches of the largest grid that a rule makes; None where `max_patches` bounds it, or fields are wrong.

    What it returns is a part of the identity of jobs, and is never to change for a rule that there is.
    """
    if fields["rule"] == SizingRule.TILES:
        return _most_of_tiles(fields)
    names = ("patch", "merge", *_FIELDS.get(fields["rule"] or "none", ((), ()))[0])
    values = [fields.get(name) for name in names]
    if any(type(value) is not int or not 1 <= value <= MAX_PIXELS for value in values) or len(values) == 2:
        return None
    patch, merge, *of_rule = (int(value or 0) for value in values)
    if len(of_rule) == 1:
        return (of_rule[0] // patch) ** 2
    least, most = (pixels // (patch * merge) ** 2 for pixels in of_rule)
    # A grid of one row is as long as the aspect allows. Of enlarged images (a + 1) (b + 1) blocks, where a b is the
    # least number and a + b at most 14.2 times its root: both sides are rounded up.
    enlarged = least + 1 + isqrt(203 * (least + 1)) + 2
    return merge**2 * max(1, most, isqrt(MAX_ASPECT * (most + 1)), enlarged)


def _most_of_tiles(fields: Mapping[str, Any]) -> int | None:
    """The patches of all tiles of an image; None where fields are wrong."""
    side, patch, tiles = (fields.get(name) for name in ("side", "patch", "tiles"))
    if type(side) is not int or type(patch) is not int or min(side, patch) < 1:
        return None
    if not isinstance(tiles, Tiles):
        try:
            tiles = Tiles.model_validate(tiles)
        except ValueError:
            return None
    return tiles.most_parts(side) * (side // patch) ** 2
