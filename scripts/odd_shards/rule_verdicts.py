"""What becomes of samples under the rules that `dataserver index` can be given, in the words of docs/datasets.md.

Members are given by what they are, not by their bytes. Nothing here asks the code that it judges.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

IMAGE_TYPES: Final = ("jpg", "png")
UNENCODABLE: Final = "\N{SNOWMAN}"
"""A text with this character is one that the tokenizer cannot encode."""


@dataclass(frozen=True)
class Part:
    """A member: its name, and what it holds."""

    name: str
    size: tuple[int, int] | None = None
    """Of an image, which is whole."""
    text: str | None = None
    """Of a text in UTF-8."""
    value: Mapping[str, Any] | None = None
    """Of a JSON object."""
    fault: str = ""
    """What is wrong with a member that cannot be used."""
    content: bytes = b""
    """Of all but whole images."""


@dataclass(frozen=True)
class Caption:
    """A named caption."""

    name: str
    part: str
    field: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.part}" + (f":{self.field}" if self.field else "")


@dataclass(frozen=True)
class Rules:
    """What `dataserver index` is given."""

    last_dot: bool = False
    all_images: bool = False
    allow_texts: bool = False
    skip_token_errors: bool = True
    captions: tuple[Caption, ...] = ()
    """In the order of their names."""


@dataclass
class Expected:
    """A sample that is served."""

    texts: tuple[str, ...]
    images: tuple[Part, ...]
    captions: Mapping[str, str] | None
    """Those that its members hold; None of a document."""
    is_lone_text: bool = False


@dataclass
class Verdict:
    """What becomes of the samples of one shard."""

    served: dict[str, Expected] = field(default_factory=dict)
    """By key, in the order of the shard."""
    said: list[tuple[str, str]] = field(default_factory=list)
    """Key and kind of each finding."""
    seen: set[str] = field(default_factory=set)
    """All keys."""
    has_images: bool = False

    def leave_orphans_out(self) -> None:
        """Texts without an image are findings."""
        for key in [key for key, sample in self.served.items() if sample.is_lone_text]:
            del self.served[key]
            self.said.append((key, "orphan_text"))


class _LeftOutError(Exception):
    """The sample is a finding of this kind."""


def key_of(name: str, rules: Rules) -> tuple[str, str]:
    """Key and type of a member name without folders."""
    stem, _, kind = name.rpartition(".") if rules.last_dot else name.partition(".")
    return stem, kind


def judge(
    parts: Sequence[Part], joined: Sequence[Mapping[str, Sequence[Part]]], rules: Rules, columns: Mapping[str, str]
) -> Verdict:
    """Return what becomes of a shard.

    Args:
        parts: its members in order.
        joined: of each joined tar, the members by key.
        rules: by which it is indexed.
        columns: texts of columns that are named captions, by key.
    """
    verdict = Verdict()
    for key, group in groups(parts, rules):
        if key in verdict.seen:
            verdict.said += [(key, "duplicate_key"), *_repeated(key, group, rules)]
            verdict.has_images |= any(_is_image(key_of(part.name, rules)[1]) for part in group)
            continue
        verdict.seen.add(key)
        members: dict[str, Part] = {}
        verdict.said += _repeated(key, group, rules)
        for part in (*group, *(part for tar in joined for part in tar.get(key, ()))):
            members.setdefault(key_of(part.name, rules)[1], part)
        verdict.has_images |= any(map(_is_image, members))
        try:
            verdict.served[key] = _sample(key, members, rules, columns.get(key), verdict.said)
        except _LeftOutError as error:
            verdict.said.append((key, str(error)))
    return verdict


def groups(parts: Sequence[Part], rules: Rules) -> Iterator[tuple[str, list[Part]]]:
    """Yield runs of members with one key."""
    key, group = "", list[Part]()
    for part in parts:
        found, _ = key_of(part.name, rules)
        if group and found != key:
            yield key, group
            group = []
        key, group = found, [*group, part]
    if group:
        yield key, group


def _repeated(key: str, group: Sequence[Part], rules: Rules) -> list[tuple[str, str]]:
    kinds = [key_of(part.name, rules)[1] for part in group]
    used = [kind for kind in kinds if kind in ("txt", "json") or _is_image(kind) or _is_caption(kind, rules)]
    return [(key, "duplicate_member")] * (len(used) - len(set(used)))


def _is_image(kind: str) -> bool:
    return kind.rpartition(".")[2] in IMAGE_TYPES


def _is_caption(kind: str, rules: Rules) -> bool:
    return any(caption.part == kind for caption in rules.captions)


def _sample(
    key: str, members: Mapping[str, Part], rules: Rules, column: str | None, said: list[tuple[str, str]]
) -> Expected:
    own, json = members.get("txt"), members.get("json")
    value = {} if json is None or json.value is None else json.value
    images = {kind: part for kind, part in members.items() if _is_image(kind)}
    unused = [part for part in (own, json) if part is not None and part.fault]
    if "texts" in value:
        return _document(key, value, images, unused, said)
    if not images and own is None:
        raise _LeftOutError(json.fault if json is not None and json.fault else "missing_image")
    captions = _captions(key, members, rules, said)
    text = _text(own, json, bool(images), [*captions.values(), column] if column else [*captions.values()])
    if not images:
        said += [(key, "unused_part")] * sum(part is not own for part in unused)
        return Expected((text,), (), captions, is_lone_text=True)
    chosen = _all_images(images) if rules.all_images else _first_image(key, images, said)
    is_blank = own is not None and own.text is not None and not own.text.strip()
    said += [(key, "unused_part")] * (len(unused) + is_blank)
    return Expected((text,), chosen, captions)


def _document(
    key: str, value: Mapping[str, Any], images: Mapping[str, Part], unused: Sequence[Part], said: list[tuple[str, str]]
) -> Expected:
    found, named = [], set()
    for name in filter(None, value["images"]):
        kind = name.removeprefix(f"{key}.")
        if kind == name or kind not in images:
            raise _LeftOutError("missing_image")
        found.append(_usable(images[kind]))
        named.add(kind)
    said += [(key, "unused_part")] * (len(unused) + bool(images.keys() - named))
    return Expected(tuple(text for text in value["texts"] if text is not None), tuple(found), None)


def _captions(key: str, members: Mapping[str, Part], rules: Rules, said: list[tuple[str, str]]) -> dict[str, str]:
    found, broken = {}, set()
    for caption in rules.captions:
        part = members.get(caption.part)
        if part is None:
            continue
        text = (part.value or {}).get(caption.field) if caption.field else part.text
        if isinstance(text, str) and text.strip():
            found[caption.name] = text
        elif part.fault and caption.part not in ("txt", "json"):
            broken.add(caption.part)
    said += [(key, "unused_part")] * len(broken)
    return found


def _text(own: Part | None, json: Part | None, has_image: bool, captions: Sequence[str]) -> str:
    """The text that a sample has without a named caption."""
    given = [own.text] if own is not None else []
    given += [(json.value or {}).get("caption")] if json is not None and has_image else []
    given += captions[:1] if has_image else []
    for text in given:
        if isinstance(text, str) and text.strip():
            return text
    faults = [part.fault for part in (own, json if has_image else None) if part is not None and part.fault]
    raise _LeftOutError(faults[0] if faults else "missing_caption")


def _usable(part: Part) -> Part:
    if part.fault:
        raise _LeftOutError(part.fault)
    return part


def _all_images(images: Mapping[str, Part]) -> tuple[Part, ...]:
    """By name, numbers by their value; `KEY.jpg` before `KEY.2.jpg`."""

    def rank(kind: str) -> list[tuple[int, str]]:
        pieces = re.findall(r"\d+|\D+", kind.rpartition(".")[0])
        return [*((int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces), (-2, kind)]

    return tuple(_usable(images[kind]) for kind in sorted(images, key=rank))


def _first_image(key: str, images: Mapping[str, Part], said: list[tuple[str, str]]) -> tuple[Part, ...]:
    """The first good one, those called as the key alone before the others."""
    ordered = [part for wanted in (False, True) for kind, part in images.items() if ("." in kind) == wanted]
    good = [part for part in ordered if not part.fault]
    if not good:
        raise _LeftOutError(ordered[0].fault)
    said += [(key, "unused_part")] * (len(ordered) - len(good))
    said += [(key, "extra_image")] * (len(good) > 1)
    return (good[0],)
