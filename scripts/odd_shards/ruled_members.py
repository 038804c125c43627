"""Draws the members of ruled datasets."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from odd_shards.rule_verdicts import UNENCODABLE, Part, Rules, groups, key_of

BROKEN_IMAGE = b"no image at all"
TEXTS = ("words {}", "words {}", "words {}", "other words {}", " \n", f"{UNENCODABLE} {{}}")


class Drawer:
    """Draws from one generator; images have sizes of their own, so that they can be told."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._num_images = 0

    def one_in(self, number: int) -> bool:
        """True once in so many times."""
        return int(self.rng.integers(number)) == 0

    def some(self, keys: Sequence[str]) -> list[str]:
        """At least one of some keys."""
        ordered = [str(key) for key in self.rng.permutation(sorted(keys))]
        return ordered[: int(self.rng.integers(1, len(ordered) + 1))]

    def shard(self, prefix: str) -> list[Part]:
        """The members of a shard, most of them beside those of the same sample."""
        parts: list[Part] = []
        for n in range(int(self.rng.integers(4, 9))):
            base = f"{prefix}{n}.5" if self.one_in(4) else f"{prefix}{n}"
            group = [*self._images(base), *self._texts(base)]
            group = [group[i] for i in self.rng.permutation(len(group))]
            if self.one_in(5):
                group = self._document(base)
            if group and self.one_in(8):
                group.append(group[int(self.rng.integers(len(group)))])
            parts += group
        if parts and self.one_in(3):
            parts.append(parts[0])
        return parts or [self._text(f"{prefix}0.txt")]

    def join_kinds(self, rules: Rules) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield folders of joined tars, with the types of members that they bring."""
        if self.one_in(2):
            yield "texts", ("txt", "json") if rules.last_dot else ("txt", "json", "re.json")
        if self.one_in(2):
            yield "images", ("png", "jpg") if rules.last_dot else ("jpg", "depth.png", "7.jpg")

    def joined_tars(self, shards: dict[str, list[Part]], rules: Rules, kinds: Sequence[str]) -> dict[str, list[Part]]:
        """The members that one folder brings for the samples of some shards, never one that the shard has."""
        found: dict[str, list[Part]] = {}
        for name, parts in shards.items():
            own: dict[str, set[str]] = {}
            for key, group in groups(parts, rules):
                own.setdefault(key, {key_of(part.name, rules)[1] for part in group})
            if found and self.one_in(4):
                continue
            chosen = [(key, kind) for key in self.some([*own]) for kind in kinds if kind not in own[key]]
            if not chosen:
                continue
            chosen = chosen[: max(len(chosen) * 2 // 3, 1)]
            chosen += [(f"x{n}", kinds[0]) for n in range(int(self.rng.integers(2)))]
            found[name] = [self._of_kind(f"{key}.{kind}") for key, kind in chosen]
        return found

    def _of_kind(self, name: str) -> Part:
        if name.endswith("json"):
            return self._json(name)
        return self._text(name) if name.endswith("txt") else self._image(name)

    def _images(self, base: str) -> Iterator[Part]:
        names = [str(name) for name in self.rng.permutation(["jpg", "0.jpg", "10.png", "2.jpg", "seg.png", "png"])]
        if not self.one_in(6):
            yield self._image(f"{base}.jpg")
        for name in names[: int(self.rng.integers(3))] if self.one_in(3) else ():
            if name != "jpg":
                yield self._image(f"{base}.{name}")

    def _texts(self, base: str) -> Iterator[Part]:
        if not self.one_in(4):
            yield self._text(f"{base}.txt")
        if self.one_in(2):
            yield self._json(f"{base}.json")
        if self.one_in(3):
            yield self._json(f"{base}.re.json")
        if self.one_in(3):
            yield self._text(f"{base}.short.txt")

    def _image(self, name: str) -> Part:
        if self.one_in(10):
            return Part(name, fault="unreadable_header", content=BROKEN_IMAGE)
        self._num_images += 1
        return Part(name, size=(16 + self._num_images % 50, 16 + self._num_images // 50))

    def _text(self, name: str) -> Part:
        if self.one_in(10):
            return Part(name, fault="not_utf8", content=b"gr\xfc\xdf")
        text = TEXTS[int(self.rng.integers(len(TEXTS)))].format(name)
        return Part(name, text=text, content=(b"\xef\xbb\xbf" if self.one_in(5) else b"") + text.encode())

    def _json(self, name: str) -> Part:
        if self.one_in(8):
            return Part(name, fault="bad_json", content=b'{"caption": ')
        texts = [f"json {name}", f"other json {name}", " ", None]
        value: dict[str, Any] = {}
        for entry in ("caption", "alt", "long", "depth"):
            if self.one_in(2):
                value[entry] = texts[int(self.rng.integers(len(texts)))]
        if self.one_in(6):
            value["caption"] = 3
        return Part(name, value=value, content=json.dumps(value).encode())

    def _document(self, base: str) -> list[Part]:
        images = [self._image(f"{base}.{n}.jpg") for n in range(int(self.rng.integers(1, 3)))]
        named = [part.name for part in images] + (["elsewhere.jpg"] if self.one_in(6) else [])
        value = {"texts": ["first", *[None] * len(named), f"last {base}"], "images": [None, *named, None]}
        text = [self._text(f"{base}.txt")] if self.one_in(3) else []
        return [*images, Part(f"{base}.json", value=value, content=json.dumps(value).encode()), *text]
