"""How an image is cut into tiles, and the tokens of text that stand between their embeddings."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from dataserver.planning.job.fields.values import SpecModel, TokenId

MAX_SIDE_TILES: Final = 64
"""Most tiles in a row or a column."""
MAX_GRIDS: Final = 256
"""Most grids among which is chosen."""
LONGEST_EDGE: Final = 4096
"""Idefics3's processor makes no image longer than this."""


def _as_tuple(value: Any) -> Any:
    """A list of JSON; `Sizing` looks at it before it is checked, and then it is no longer taken for one."""
    return tuple(value) if isinstance(value, list) else value


OF_JSON: Final = BeforeValidator(_as_tuple)
Side = Annotated[int, Field(ge=1, le=MAX_SIDE_TILES)]
Sides = Annotated[tuple[Side, Side], OF_JSON]
Ids = Annotated[tuple[TokenId, ...], Field(max_length=64), OF_JSON]
Row = Annotated[tuple[Ids, ...], OF_JSON]


class TileChoice(StrEnum):
    """Which released model's processor chooses the rows and columns of tiles."""

    PINPOINTS = "pinpoints"
    """LLaVA-OneVision: of `grids` the one that keeps most of the image's pixels. The image is scaled with its aspect
    and gets black borders; a smaller picture of the whole comes first. Its embeddings lie row by row over all tiles,
    without borders, with one for the end of each row. One of several images of a sample is a square with grey borders,
    and not cut."""
    ASPECT = "aspect"
    """InternVL: the grid of at most `max_tiles` whose aspect is the nearest. The image is scaled to fill it; a smaller
    picture of the whole comes last, unless there is but one tile."""
    EDGE = "edge"
    """Idefics3, SmolVLM: the long side is scaled to `longest_edge`, and both sides up to whole tiles; a smaller picture
    of the whole comes last, unless there is but one tile."""


_FIELDS: Final[Mapping[TileChoice, frozenset[str]]] = MappingProxyType(
    {
        TileChoice.PINPOINTS: frozenset({"grids", "max_tiles"}),
        TileChoice.ASPECT: frozenset({"min_tiles", "max_tiles"}),
        TileChoice.EDGE: frozenset({"longest_edge"}),
    }
)
"""The fields that each choice needs."""


class Tiles(SpecModel):
    """How an image is cut into tiles of `sizing.side` x `sizing.side` pixels."""

    choice: TileChoice
    """Whose arithmetic: `pinpoints` (LLaVA-OneVision), `aspect` (InternVL) or `edge` (Idefics3, SmolVLM)."""
    grids: Annotated[tuple[Sides, ...], Field(min_length=1, max_length=MAX_GRIDS), OF_JSON] | None = None
    """Only with `pinpoints`, and required there: the choices of rows and columns of tiles, which are
    `image_grid_pinpoints` divided by `side`, in this order. Of equally good ones the first is used."""
    min_tiles: Annotated[int, Field(ge=1, le=MAX_SIDE_TILES)] | None = None
    """Only with `aspect`, and required: fewest tiles. `min_patches` of preprocessor_config.json."""
    max_tiles: Annotated[int, Field(ge=1, le=MAX_SIDE_TILES)] | None = None
    """Required with `aspect`: most tiles, `max_patches` of preprocessor_config.json. Required with `pinpoints`: how
    many tiles' embeddings larger images are reduced to, which is 9 if the model's `vision_aspect_ratio` is
    anyres_max_9."""
    longest_edge: Annotated[int, Field(ge=1, le=LONGEST_EDGE)] | None = None
    """Only with `edge`, and required: pixels of the long side, an even multiple of `side`. `size.longest_edge` of
    preprocessor_config.json."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = _FIELDS[self.choice]
        given = {name for name in type(self).model_fields if name != "choice" and getattr(self, name) is not None}
        if missing := sorted(needed - given):
            raise ValueError(
                f"sizing.tiles.choice {self.choice} has no {' and no '.join(missing)}; state what "
                "preprocessor_config.json has"
            )
        if more := sorted(given - needed):
            raise ValueError(f"sizing.tiles.choice {self.choice} has no use for {', '.join(more)}; leave it out")
        if (self.min_tiles or 1) > (self.max_tiles or MAX_SIDE_TILES):
            raise ValueError(f"tiles.min_tiles is {self.min_tiles} and max_tiles {self.max_tiles}; the latter is less")
        return self

    @property
    def bounded_by(self) -> str:
        """The field to lower for fewer tiles."""
        return "grids" if self.grids is not None else "max_tiles" if self.max_tiles is not None else "longest_edge"

    def most_sides(self, side: int) -> tuple[int, int]:
        """The most rows and the most columns of tiles of `side` pixels."""
        if self.grids is not None:
            return max(rows for rows, _ in self.grids), max(columns for _, columns in self.grids)
        most = self.max_tiles or (self.longest_edge or 1) // side
        return most, most

    def most_parts(self, side: int) -> int:
        """The most tiles of an image, the picture of the whole included; at least 1."""
        if self.grids is not None:
            return 1 + max(rows * columns for rows, columns in self.grids)
        tiles = self.max_tiles or ((self.longest_edge or 1) // side) ** 2
        return tiles + 1 if tiles > 1 else 1


class ImageMarks(SpecModel):
    """Tokens of text before and between the embeddings of an image, in addition to those around all images."""

    alone: Ids = ()
    """Before the embeddings of an image that is not cut."""
    tiles: Annotated[tuple[Row, ...], Field(max_length=MAX_SIDE_TILES), OF_JSON] = ()
    """Before the embeddings of each tile, row by row: `<row_1_col_1>` and so on. Needed for as many tiles as an image
    can have."""
    row_end: Ids = ()
    """After each row of tiles but the last one."""
    whole: Ids = ()
    """After the last row of tiles, before the embeddings of the smaller picture of the whole."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({len(row) for row in self.tiles}) > 1 or any(len(row) > MAX_SIDE_TILES for row in self.tiles):
            raise ValueError(
                f"sizing.marks.tiles has rows of {sorted({len(row) for row in self.tiles})} tiles; rows of one length "
                f"are required, at most {MAX_SIDE_TILES}"
            )
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all marks, in the order of the fields."""
        return *self.alone, *self.row_end, *self.whole, *(i for row in self.tiles for ids in row for i in ids)

    @property
    def counts(self) -> dict[str, int | list[list[int]]]:
        """How many tokens there are of each."""
        found = {name: len(getattr(self, name)) for name in ("alone", "row_end", "whole")}
        return {**found, "tiles": [[len(ids) for ids in row] for row in self.tiles]}
