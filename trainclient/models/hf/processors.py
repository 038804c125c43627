"""How the image processor of a checkpoint sizes images, in the terms of a job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dataserver.planning.job.fields import (
    BACKGROUND,
    LONGEST_EDGE,
    MAX_GRIDS,
    MAX_SIDE_TILES,
    Quality,
    Resampling,
    Sizing,
    SizingRule,
    TileChoice,
    Tiles,
)
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import MAX_CONFIG_BYTES, PretrainedError, read_json

PREPROCESSOR: Final = "preprocessor_config.json"
PROCESSOR: Final = "processor_config.json"
CROPS: Final = "crops"
"""What processors do that cut out parts of images otherwise than the rule `tiles`; no job has a rule for it."""
PADDED: Final = "padded"
"""What processors do that make an image square by borders, and not as the rule `pad` does; no job has that either."""
_WITHOUT_RULE: Final[Mapping[str, str]] = MappingProxyType(
    {
        CROPS: "cuts images into parts of their own; no sizing.rule does so",
        PADDED: "pads images to squares otherwise than sizing.rule pad, which scales the whole square to its side",
    }
)
_RESAMPLE: Final[Mapping[int, Resampling]] = MappingProxyType(
    {1: Resampling.LANCZOS, 2: Resampling.BILINEAR, 3: Resampling.BICUBIC}
)
_TILED: Final = ("Idefics3", "SmolVLM", "LlavaOnevision", "GotOcr2")
_QWEN: Final = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
_QWEN_BOUNDS: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {"min_pixels": ("shortest_edge", 56 * 56), "max_pixels": ("longest_edge", 28 * 28 * 1280)}
)
"""Fields of a job, what `size` calls them, and their values where they are not given."""
_ONE_SIZE: Final[Mapping[str, tuple[int, bool]]] = MappingProxyType(
    {"CLIP": (3, True), "Llava": (3, True), "Bit": (3, True), "Siglip": (3, False), "Gemma3": (2, False)}
)
"""Processors that make one size of all images, with their filter, and whether they crop unless told otherwise."""
_CROP: Final = 224
"""Sides of a crop that is not given."""


def processor_fields(folder: Path) -> Fields | None:
    """What a checkpoint says of its image processor; None if nothing.

    Raises:
        PretrainedError: the file cannot be read.
    """
    if (path := folder / PREPROCESSOR).is_file():
        return Fields(read_json(path, MAX_CONFIG_BYTES), str(path))
    if (path := folder / PROCESSOR).is_file():
        return Fields(read_json(path, MAX_CONFIG_BYTES), str(path)).within("image_processor")
    return None


def processor_sizing(found: Fields) -> dict[str, Any] | None:
    """The rule of a processor, and the fields of a job's sizing that go with it; None if it is not known here.

    Raises:
        PretrainedError: a size is no integer in its bounds.
    """
    field = "image_processor_type" if found.has("image_processor_type") else "feature_extractor_type"
    name = found.data.get(field)
    if not isinstance(name, str):
        return None
    kind = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    if kind == "LlavaNext" or (kind == "Gemma3" and found.flag("do_pan_and_scan", default=False)):
        return {"rule": CROPS}
    if kind in _TILED:
        return tiles_of(kind, found)
    if kind == "Llava" and found.flag("do_pad", default=False):
        return _padded(found)
    if not found.flag("do_resize", default=True):
        return None
    if kind in _QWEN:
        return _qwen(found)
    if kind == "Siglip2":
        most = found.integer("max_num_patches", 256)
        return {"rule": SizingRule.NAFLEX, "merge": 1, "max_patches": most, **_resampling(found, 2)}
    return _of_one_size(found, *_ONE_SIZE[kind]) if kind in _ONE_SIZE else None


def processor_of(
    sizing: Sizing, packs: SizingRule | None, grid: int = 0, mean: Sequence[float] | None = None
) -> dict[str, Any]:
    """Fields of an image processor that sizes images as a job does; none where no processor does so for such a model.

    Args:
        sizing: of the job.
        packs: the rule of a model that takes packed patches, as Qwen2-VL's and NaFlex; None where it takes whole
            pictures.
        grid: positions of each side of such a picture. In transformers models take pictures of that size alone.
        mean: of red, green and blue, whose colour processors give to borders; by default CLIP's.
    """
    packing = sizing.rule if sizing.rule in (SizingRule.QWEN, SizingRule.NAFLEX) else None
    if packs is not packing or sizing.tiles is not None:
        return {}
    number = next((n for n, name in _RESAMPLE.items() if name is sizing.resampling), 2)
    if packs is SizingRule.NAFLEX:
        bound = {"max_num_patches": sizing.max_patches}
        return {**bound, "resample": number, "image_processor_type": "Siglip2ImageProcessor"}
    if packs is SizingRule.QWEN:
        size = {"shortest_edge": sizing.min_pixels, "longest_edge": sizing.max_pixels}
        return {"size": size, "resample": number, "image_processor_type": "Qwen2VLImageProcessor"}
    if sizing.side is None or sizing.side // sizing.patch != grid:
        return {}
    square = {"height": sizing.side, "width": sizing.side}
    if sizing.rule is SizingRule.PAD:
        if (sizing.background or BACKGROUND) != _colour(mean):
            return {}
        made = {"resample": number, "image_processor_type": "LlavaImageProcessor", "do_pad": True}
        return {**made, "size": {"shortest_edge": sizing.side}, "do_center_crop": True, "crop_size": square}
    found = {"resample": number, "image_processor_type": "CLIPImageProcessor"}
    if sizing.rule is SizingRule.SQUARE:
        return {**found, "size": square, "do_center_crop": False}
    edge = sizing.shortest_edge or sizing.side
    return {**found, "size": {"shortest_edge": edge}, "do_center_crop": True, "crop_size": square}


def with_bounds_of(sizing: Sizing, found: Fields) -> dict[str, Any]:
    """The fields of an image processor, with bounds and filter of a job whose rule and side the processor has too.

    A side belongs to a tower's positions, and stays as it is; so does the colour of borders, the mean of its pixels.

    Raises:
        PretrainedError: a size of the processor is no integer in its bounds.
    """
    data, theirs = dict(found.data), processor_sizing(found)
    if theirs is None or not _sizes_alike(sizing, theirs):
        return data
    if sizing.resampling is not None:
        data["resample"] = next(n for n, name in _RESAMPLE.items() if name is sizing.resampling)
    if sizing.tiles is not None:
        return data | _tile_bounds(sizing.tiles, theirs["tiles"], sizing.side or 0)
    if all(theirs.get(name) == getattr(sizing, name) for name in (*_QWEN_BOUNDS, "shortest_edge")):
        return data if sizing.rule is not SizingRule.NAFLEX else {**data, "max_num_patches": sizing.max_patches}
    if sizing.rule is SizingRule.QWEN:
        data["size"] = processor_of(sizing, SizingRule.QWEN)["size"]
        return data | {name: getattr(sizing, name) for name in _QWEN_BOUNDS if name in data}
    return {**data, "size": {"shortest_edge": sizing.shortest_edge or sizing.side}}


def _sizes_alike(sizing: Sizing, theirs: Mapping[str, Any]) -> bool:
    """Whether a processor has the rule and the side of a job, and for borders its colour."""
    same = all(theirs.get(name) == getattr(sizing, name) for name in ("side", "background"))
    return same and theirs["rule"] is sizing.rule


def _tile_bounds(ours: Tiles, theirs: Tiles, side: int) -> dict[str, Any]:
    """Fields of an image processor that say how images are cut, where a job says otherwise."""
    if ours == theirs or ours.choice is not theirs.choice:
        return {}
    if ours.choice is TileChoice.ASPECT:
        return {"min_patches": ours.min_tiles, "max_patches": ours.max_tiles}
    if ours.choice is TileChoice.EDGE:
        return {"size": {"longest_edge": ours.longest_edge}}
    return {"image_grid_pinpoints": _pinpoints(ours, side)}


def tiled_fields(sizing: Sizing, found: Fields | None) -> dict[str, Any]:
    """Fields of a model's configuration, and of its processor's, that a job whose tiles are pinpoints decides; none
    where the image processor `found` has another rule or side, and stays as it is."""
    if sizing.tiles is None or sizing.tiles.choice is not TileChoice.PINPOINTS:
        return {}
    theirs = None if found is None else processor_sizing(found)
    if theirs is None or not _sizes_alike(sizing, theirs):
        return {}
    return {
        "image_grid_pinpoints": _pinpoints(sizing.tiles, sizing.side or 0),
        "vision_aspect_ratio": f"anyres_max_{sizing.tiles.max_tiles}",
    }


def _pinpoints(tiles: Tiles, side: int) -> list[list[int]]:
    """Pixels of the rows and columns of each grid."""
    return [[rows * side, columns * side] for rows, columns in tiles.grids or ()]


def require_same_rule(folder: Path, sizing: Sizing) -> None:
    """Refuse a job that names another rule than the image processor of a checkpoint has.

    Raises:
        PretrainedError: it does, or the processor's file cannot be read.
    """
    found = processor_fields(folder)
    if found is None or sizing.rule is None:
        return
    wanted = processor_sizing(found)
    if wanted is not None and wanted["rule"] not in (*_WITHOUT_RULE, SizingRule.TILES, sizing.rule):
        raise PretrainedError(
            f"the job's sizing.rule is {sizing.rule}, and the image processor of {folder} has the rule "
            f"{wanted['rule']}; set in sizing {_text(wanted)}"
        )


def sizing_note(folder: Path, sizing: Sizing) -> str | None:
    """Compare a job's sizing with what the image processor of a checkpoint does.

    Returns:
        What to change for the processor's grids and pixels, in words; None where nothing is, or is known.

    Raises:
        PretrainedError: the processor's file cannot be read.
    """
    found = processor_fields(folder)
    if found is None:
        return None
    try:
        wanted = processor_sizing(found)
    except PretrainedError as error:  # a size or a filter that no job has, and that the job does not ask for
        return f"how the image processor of {folder} sizes images is not understood ({error})"
    if wanted is None or all(getattr(sizing, name, None) == value for name, value in wanted.items()):
        return None
    if wanted["rule"] in _WITHOUT_RULE:
        return f"the image processor of {folder} {_WITHOUT_RULE[wanted['rule']]}"
    return (
        f"the image processor of {folder} sizes images otherwise than the job; for its grids and pixels set in sizing "
        f"{_text(wanted)}"
    )


def _text(wanted: Mapping[str, Any]) -> str:
    colour = {"background": wanted["background"] or BACKGROUND} if "background" in wanted else {}
    return _flow({**wanted, **colour, "quality": Quality.EXACT})


def _flow(value: Any) -> str:
    """A value as a job may have it, in one line of YAML."""
    if isinstance(value, Tiles):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value)


def _qwen(found: Fields) -> dict[str, Any]:
    """Both bounds have stood in several fields since Qwen2-VL; the first of these counts (transformers 5.24)."""
    size = found.within("size")
    bounds = {}
    for name, (edge, default) in _QWEN_BOUNDS.items():
        if found.has(name):
            bounds[name] = found.integer(name, most=2**31)
        elif size.has(edge):
            bounds[name] = size.integer(edge, most=2**31)
        else:
            bounds[name] = size.integer(name, default, 2**31)
    return {"rule": SizingRule.QWEN, **bounds, **_resampling(found, 3)}


def tiles_of(kind: str, found: Fields) -> dict[str, Any] | None:
    """Fields of a job for a processor that cuts images into tiles; None where it does not.

    Raises:
        PretrainedError: a size is no integer in its bounds, or grids are no whole tiles.
    """
    if kind == "GotOcr2":  # crop_to_patches is asked for by InternVL's processor, and not in its file
        side = found.within("size").integer("height", 384)
        most = found.integer("max_patches", 12, MAX_SIDE_TILES)
        least = found.integer("min_patches", 1, most)
        tiles, filter_number = Tiles(choice=TileChoice.ASPECT, min_tiles=least, max_tiles=most), 3
    elif kind == "LlavaOnevision":
        side = found.within("size").integer("height", 384)
        tiles, filter_number = Tiles(choice=TileChoice.PINPOINTS, grids=_grids(found, side), max_tiles=9), 3
    elif found.flag("do_image_splitting", default=True):
        side = found.within("max_image_size").integer("longest_edge", 364)
        size = found.within("size")
        edge = size.integer("longest_edge", 4 * 364, LONGEST_EDGE)
        if edge % side or edge % 2 or edge // side > MAX_SIDE_TILES:
            raise size.refusal(
                "longest_edge", f"an even multiple of {side}, at most {MAX_SIDE_TILES} times it, is required"
            )
        tiles, filter_number = Tiles(choice=TileChoice.EDGE, longest_edge=edge), 1
    else:
        return None
    return {"rule": SizingRule.TILES, "side": side, "tiles": tiles, **_resampling(found, filter_number)}


def _grids(found: Fields, side: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the tiles of `image_grid_pinpoints`; six of either where it does not say."""
    default = [[rows * side, columns * side] for rows in range(1, 7) for columns in range(1, 7)]
    pinpoints = found.data.get("image_grid_pinpoints", default)
    is_list = isinstance(pinpoints, list) and 0 < len(pinpoints) <= MAX_GRIDS
    if not is_list or any(
        not isinstance(pair, list)
        or len(pair) != 2
        or any(type(n) is not int or n % side or not side <= n <= MAX_SIDE_TILES * side for n in pair)
        for pair in pinpoints
    ):
        raise found.refusal("image_grid_pinpoints", f"a list of pairs of multiples of {side} is required")
    return tuple((rows // side, columns // side) for rows, columns in pinpoints)


def _of_one_size(found: Fields, filter_number: int, crops: bool) -> dict[str, Any] | None:
    size, resampling = _sides(found, "size"), _resampling(found, filter_number)
    crops = found.flag("do_center_crop", crops)
    cut = _sides(found, "crop_size")
    sides = {cut.integer(name, _CROP) for name in ("height", "width")} if crops else set()
    if size.has("shortest_edge") and len(sides) == 1:
        edge, side = size.integer("shortest_edge"), sides.pop()
        if side > edge:
            return None  # it pads
        return {
            "rule": SizingRule.CROP,
            "side": side,
            **({} if edge == side else {"shortest_edge": edge}),
            **resampling,
        }
    if size.has("height") and size.has("width"):
        sides |= {size.integer("height"), size.integer("width")}
        return {"rule": SizingRule.SQUARE, "side": sides.pop(), **resampling} if len(sides) == 1 else None
    return None


def _padded(found: Fields) -> dict[str, Any]:
    """The rule of LLaVA's processor, which scales a square of the image and borders of its mean colour; None where
    CLIP's holds, as jobs have it."""
    sizing = _of_one_size(found, *_ONE_SIZE["Llava"]) if found.flag("do_resize", default=True) else None
    if sizing is None or "shortest_edge" in sizing:
        return {"rule": PADDED}
    colour = _background(found)
    return {**sizing, "rule": SizingRule.PAD, "background": None if colour == BACKGROUND else colour}


def _background(found: Fields) -> tuple[int, ...]:
    """Red, green and blue of the borders that a processor adds."""
    mean = found.data.get("image_mean")
    is_list = isinstance(mean, list) and len(mean) == 3
    if mean is not None and not (is_list and all(type(x) in (int, float) and 0 <= x <= 1 for x in mean)):
        raise found.refusal("image_mean", "three numbers from 0 to 1 are required")
    return _colour(mean)


def _colour(mean: Sequence[float] | None) -> tuple[int, ...]:
    """What LLaVA's processor makes of the mean of its pixels; without one, of CLIP's."""
    return BACKGROUND if mean is None else tuple(int(x * 255) for x in mean)


def _sides(found: Fields, name: str) -> Fields:
    """The fields of a size, which old files give as a number: of the short side, and of both sides of a crop."""
    value = found.data.get(name)
    if type(value) is not int:
        return found.within(name)
    names = ("height", "width") if name == "crop_size" else ("shortest_edge",)
    return Fields(dict.fromkeys(names, value), f"{name} of an image processor")


def _resampling(found: Fields, default: int) -> dict[str, Resampling]:
    number = found.value("resample", default)
    if type(number) is not int or number not in _RESAMPLE:
        raise found.refusal(
            "resample", f"one of {', '.join(f'{n} ({name})' for n, name in _RESAMPLE.items())} is required"
        )
    return {"resampling": _RESAMPLE[number]}
