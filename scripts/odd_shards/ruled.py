"""Datasets whose samples are decided by rules: keys, several images, named captions, joins, texts no tokenizer takes.

A dataset is drawn with the rules that it is indexed by, and with all that is served and found by them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from odd_shards.images import encode, picture
from odd_shards.rule_verdicts import UNENCODABLE, Caption, Part, Rules, Verdict, judge, key_of
from odd_shards.ruled_members import Drawer
from odd_shards.tars import FORMATS, Tar

CAPTIONS: Final = (
    Caption("alt", "json", "alt"),
    Caption("blip", "parquet", "blip"),
    Caption("depth", "re.json", "depth"),
    Caption("long", "re.json", "long"),
    Caption("own2", "txt"),
    Caption("short", "short.txt"),
)
Said = tuple[str, str, str]
"""Shard, key and kind of a finding; where it belongs to a joined file alone, that stands for the shard."""
Shards = Mapping[str, Sequence[Part]]


@dataclass
class JoinedTable:
    """A parquet: of one shard, or of all."""

    path: Path
    shard: str
    """Empty where it is of all."""
    column: str
    rows: dict[str, Any]
    """Value of the column by key."""


@dataclass
class RuledDataset:
    """What was drawn and written."""

    folder: Path
    rules: Rules
    shards: Shards
    tars: dict[str, Shards]
    """Joined ones, by folder."""
    tables: list[JoinedTable] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By shard."""
    said: list[Said] = field(default_factory=list)
    """What must be found while indexing, and nothing else."""

    @property
    def joins(self) -> list[Path]:
        """What is joined."""
        named = {self.folder / name for name in self.tars}
        return sorted(named | {table.path if not table.shard else table.path.parent for table in self.tables})

    def caption(self, key: str, name: str) -> str | None:
        """A named caption of a sample that is served; None where it lacks it."""
        sample = next(verdict.served[key] for verdict in self.verdicts.values() if key in verdict.served)
        if name != "blip" or sample.captions is None:
            return None if sample.captions is None else sample.captions.get(name)
        return self.blips.get(key)

    @property
    def blips(self) -> dict[str, str]:
        """The texts of the column that is a caption, by key."""
        rows = next((table.rows for table in self.tables if table.column == "blip"), {})
        return {key: text for key, text in rows.items() if text and text.strip()}

    def unencodable(self, name: str = "") -> list[Said]:
        """Samples with a text that the tokenizer cannot encode, where a caption is read, or their own text."""
        return [
            (shard, key, "token_error")
            for shard, verdict in self.verdicts.items()
            for key, sample in verdict.served.items()
            if any(UNENCODABLE in text for text in self._texts(key, sample.texts, name))
        ]

    def _texts(self, key: str, own: Sequence[str], name: str) -> Sequence[str]:
        text = self.caption(key, name) if name else None
        return own if text is None else [text]


def make_ruled(folder: Path, seed: int) -> RuledDataset:
    """Write a dataset into `folder / "d"`, and what is joined to it beside."""
    rng = np.random.default_rng([seed, 38])
    drawer = Drawer(rng)
    asked = tuple(caption for caption in CAPTIONS if drawer.one_in(2))
    rules = Rules(drawer.one_in(3), drawer.one_in(2), drawer.one_in(3), not drawer.one_in(6), asked)
    shards = {f"{n}.tar": drawer.shard("abc"[n]) for n in range(int(rng.integers(2, 4)))}
    tars: dict[str, Shards] = {
        name: drawer.joined_tars(shards, rules, kinds) for name, kinds in drawer.join_kinds(rules)
    }
    made = RuledDataset(folder, rules, shards, tars)
    _judge(made)
    made.tables = list(_tables(made, drawer))
    _judge(made)  # columns may give texts, too
    given = tuple(c for c in asked if any(made.caption(k, c.name) for v in made.verdicts.values() for k in v.served))
    made.rules = replace(rules, captions=given)  # one that no sample has is refused
    _judge(made)
    made.said = [*_said(made), *_said_of_tars(made), *_said_of_tables(made)]
    _write(made, rng)
    return made


def _judge(made: RuledDataset) -> None:
    columns = made.blips if any(caption.name == "blip" for caption in made.rules.captions) else {}
    for name, parts in made.shards.items():
        joined = []
        for of_shards in made.tars.values():
            members: dict[str, list[Part]] = {}
            for part in of_shards.get(name, ()):
                members.setdefault(key_of(part.name, made.rules)[0], []).append(part)
            joined.append(members)
        made.verdicts[name] = judge(parts, joined, made.rules, columns)
    if not made.rules.allow_texts and any(verdict.has_images for verdict in made.verdicts.values()):
        for verdict in made.verdicts.values():
            verdict.leave_orphans_out()


def _tables(made: RuledDataset, drawer: Drawer) -> Iterator[JoinedTable]:
    """Parquet files beside joined tars, and one, or a folder of them, with rows for all shards."""
    if drawer.one_in(2):
        for shard, verdict in made.verdicts.items():
            rows = {key: int(drawer.rng.integers(9)) for key in drawer.some([*verdict.seen])}
            strangers = {f"y{n}": 0 for n in range(drawer.rng.integers(2))}
            path = made.folder / "scores" / f"{shard.removesuffix('.tar')}.parquet"
            yield JoinedTable(path, shard, "score", rows | strangers)
    if drawer.one_in(2):
        seen = drawer.some([key for verdict in made.verdicts.values() for key in verdict.seen])
        texts = ["blip {}", "blip {}", " ", None]
        chosen = {key: texts[drawer.rng.integers(4)] for key in [*seen, *(f"z{n}" for n in range(3))]}
        blips = {key: text and text.format(key) for key, text in chosen.items()}
        yield JoinedTable(made.folder / "table.parquet", "", "blip", blips)


def _said(made: RuledDataset) -> Iterator[Said]:
    """What is found in shards."""
    for shard, verdict in made.verdicts.items():
        yield from ((shard, key, kind) for key, kind in verdict.said)
        for caption in made.rules.captions:
            pairs = [key for key, sample in verdict.served.items() if sample.captions is not None]
            if any(made.caption(key, caption.name) is None for key in pairs):
                yield shard, "", "missing_named_caption"


def _said_of_tars(made: RuledDataset) -> Iterator[Said]:
    """Who has no partner in a joined tar."""
    for of_shards in made.tars.values():
        for shard, verdict in made.verdicts.items():
            if shard not in of_shards:
                yield shard, "", "missing_partner"
                continue
            given = {key_of(part.name, made.rules)[0] for part in of_shards[shard]}
            if given - verdict.seen:
                yield shard, "", "row_without_sample"
            if verdict.seen - given:
                yield shard, "", "sample_without_row"


def _said_of_tables(made: RuledDataset) -> Iterator[Said]:
    every = {key for verdict in made.verdicts.values() for key in verdict.seen}
    for table in made.tables:
        for shard, verdict in made.verdicts.items():
            if table.shard in ("", shard) and verdict.served.keys() - table.rows.keys():
                yield shard, "", "sample_without_row"
        if table.rows.keys() - every:
            yield table.shard or str(table.path), "", "row_without_sample"


def _write(made: RuledDataset, rng: np.random.Generator) -> None:
    folders = {"d": made.shards, **made.tars}
    for folder, shards in folders.items():
        for name, parts in shards.items():
            tar = Tar(FORMATS[rng.integers(3)])
            for part in parts:
                tar.add(part.name, content_of(part))
            path = made.folder / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tar.whole())
    for table in made.tables:
        table.path.parent.mkdir(parents=True, exist_ok=True)
        kind = pa.int64() if table.column == "score" else pa.string()
        values = {"key": pa.array(table.rows, pa.string()), table.column: pa.array(table.rows.values(), kind)}
        pq.write_table(pa.table(values), table.path, row_group_size=int(rng.integers(1, 9)))


def content_of(part: Part) -> bytes:
    """The bytes of a member; the same for the same member."""
    if part.size is not None:
        width, height = part.size
        drawn = picture(np.random.default_rng(part.size), width=width, height=height)
        return encode(drawn, "PNG" if part.name.endswith("png") else "JPEG")
    return part.content
