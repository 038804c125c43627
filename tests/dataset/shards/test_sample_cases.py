"""Samples of unusual members, one by one: what is read, each limit on both sides, and the words of every finding."""

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from PIL import Image
from shards import make_image

from dataserver.dataset.errors import Findings, TarError
from dataserver.dataset.shards.groups import MAX_SAMPLE_MEMBERS
from dataserver.dataset.shards.members import MAX_TEXT_BYTES, Member
from dataserver.dataset.shards.samples import MAX_SCALARS, ImagePart, Sample, read_samples
from dataserver.images import IMAGE_SUFFIXES

Found = list[tuple[str, tuple[int, ...], tuple[str, ...], tuple[ImagePart, ...]]]
Odd = list[tuple[str, str, str]]

PNG = make_image(np.random.default_rng(0), 31, 20, "PNG")
WEBP = make_image(np.random.default_rng(0), 32, 20, "WEBP")


def turned() -> bytes:
    """A JPEG of 40 x 30 pixels that its EXIF data turns."""
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


JPEG = turned()
PNG_PART = ImagePart(7, len(PNG), 31, 20, 1, 1)
WEBP_PART = ImagePart(7, len(WEBP), 32, 20, 1, 2)
JPEG_PART = ImagePart(7, len(JPEG), 30, 40, 6, 0)


def member(name: str, content: bytes = b"") -> Member:
    return Member(name, 7, len(content), content)


def large(name: str, length: int) -> Member:
    return Member(name, 7, length, None)


def special(name: str) -> Member:
    return Member(name, 7, 0, None, special=True)


def document(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def ending(members: Iterable[Member], error: TarError | None) -> Iterator[Member]:
    yield from members
    if error is not None:
        raise error


def read(members: Iterable[Member], error: TarError | None = None) -> tuple[list[Sample], Odd]:
    findings = Findings()
    found = list(read_samples(ending(members, error), findings))
    return found, [(o.key, o.kind, o.detail) for o in findings.details]


def alone(key: str, text: str) -> tuple[str, tuple[int, ...], tuple[str, ...], tuple[ImagePart, ...]]:
    return key, (0,), (text,), ()


def pair(key: str, text: str, image: ImagePart) -> tuple[str, tuple[int, ...], tuple[str, ...], tuple[ImagePart, ...]]:
    return key, (1, 0), (text,), (image,)


TEXT = member("0.txt", b"t")
NO_CAPTION = ("0", "missing_caption", "no text in .txt or in the caption of .json")
AGAIN = (
    "the key came before in this shard, and its first members count; those of a sample must lie together: make the tar"
    " with --sort=name"
)
CUT = "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
UNUSED = "; the sample does without it"
REMEDY = " file; store the file itself: tar --hard-dereference --dereference, without --sparse"
SPECIAL = f"is a link, device or sparse{REMEDY}"
NO_IMAGE = "which the tar does not hold under its key"


def test_members_make_these_samples_and_findings() -> None:
    most = 4096
    parts = [(f"0.{i}", b"") for i in range(most - 1)]
    broken = "it is PPM; neither JPEG, PNG, WebP, GIF, BMP, AVIF nor TIFF"
    cases: list[tuple[list[Member], Found, Odd]] = [
        ([], [], []),
        ([member("README"), TEXT, member(".x")], [alone("0", "t")], []),
        ([member("0.jpg", JPEG), TEXT], [pair("0", "t", JPEG_PART)], []),
        ([TEXT, member("0.bin", WEBP)], [pair("0", "t", WEBP_PART)], []),
        ([large("0.bin", 9), TEXT], [alone("0", "t")], []),
        ([member("0.png", PNG), member("0.json", document(caption="c"))], [pair("0", "c", PNG_PART)], []),
        ([member("0.png", PNG), member("0.json", document(caption="c")), TEXT], [pair("0", "t", PNG_PART)], []),
        ([member("0.png", PNG), member("0.json", document(caption=3))], [], [NO_CAPTION]),
        ([member("0.png", PNG), member("0.json", document(caption=" "))], [], [NO_CAPTION]),
        ([member("0.png", PNG)], [], [NO_CAPTION]),
        ([member("0.txt", b" \n")], [], [("0", "missing_caption", "the text in .txt is blank")]),
        (
            [member("0.json", document(caption="c"))],
            [],
            [("0", "missing_image", "the sample has neither an image nor a text")],
        ),
        ([member("0.json", document(texts=["x"])), TEXT], [alone("0", "t")], []),
        ([member("0.json", document(images=["x"])), TEXT], [alone("0", "t")], []),
        (
            [TEXT, member("0.txt", b"u"), member("1.txt", b"v"), member("0.txt", b"w")],
            [alone("0", "t"), alone("1", "v")],
            [
                ("0", "duplicate_member", "0.txt comes twice; the first is kept"),
                (
                    "0",
                    "duplicate_key",
                    AGAIN,
                ),
            ],
        ),
        (
            [member("0.json", document(caption="c")), member("0.json", document(caption="d")), member("0.png", PNG)],
            [pair("0", "c", PNG_PART)],
            [("0", "duplicate_member", "0.json comes twice; the first is kept")],
        ),
        (
            [member("0.a.webp", WEBP), member("0.png", PNG), member("0.PNG", JPEG), member("0.jpg", JPEG), TEXT],
            [pair("0", "t", PNG_PART)],
            [
                ("0", "duplicate_member", "0.PNG comes twice; the first is kept"),
                (
                    "0",
                    "extra_image",
                    "3 images, only .png is used; index with --several-images all to serve all of them",
                ),
            ],
        ),
        ([large("0.jpg", 70_000_000), TEXT], [], [("0", "image_too_large", "0.jpg: 70000000 bytes, limit 67108864")]),
        ([special("0.jpg"), TEXT], [], [("0", "needs_special_member", f"0.jpg {SPECIAL}")]),
        ([special("0.txt"), member("0.png", PNG)], [], [("0", "needs_special_member", f"0.txt {SPECIAL}")]),
        (
            [special("0.txt"), member("0.png", PNG), member("0.json", document(caption="c"))],
            [pair("0", "c", PNG_PART)],
            [("0", "unused_part", f"0.txt {SPECIAL} (needs_special_member){UNUSED}")],
        ),
        (
            [special("0.json"), TEXT],
            [alone("0", "t")],
            [("0", "unused_part", f"0.json {SPECIAL} (needs_special_member){UNUSED}")],
        ),
        (
            [member("0.jpg", b"P6 2 2"), member("0.png", PNG), TEXT],
            [pair("0", "t", PNG_PART)],
            [("0", "unused_part", f"0.jpg: {broken} (unreadable_header){UNUSED}")],
        ),
        (
            [member("0.png", PNG), member("0.txt", b" "), member("0.json", document(caption="\ufeffc"))],
            [pair("0", "c", PNG_PART)],
            [("0", "unused_part", ".txt is blank; another caption is used")],
        ),
        (
            [member("0.png", PNG), member("0.txt", b"\xff"), member("0.json", document(caption="c"))],
            [pair("0", "c", PNG_PART)],
            [("0", "unused_part", f"0.txt: byte 0 is not UTF-8 (not_utf8){UNUSED}")],
        ),
        (
            [
                member("0.a.png", PNG),
                member("0.txt", b"\xff"),
                member("0.json", document(texts=[None], images=["0.a.png"])),
            ],
            [("0", (1,), (), (PNG_PART,))],
            [("0", "unused_part", f"0.txt: byte 0 is not UTF-8 (not_utf8){UNUSED}")],
        ),
        ([member("0.png", PNG), member("0.json", b"{")], [], [("0", "bad_json", f"0.json: {CUT}")]),
        ([member("0.json", b"{")], [], [("0", "bad_json", f"0.json: {CUT}")]),
        ([member("0.txt", b"\xef\xbb\xbft"), member("0.json", b'\xef\xbb\xbf{"a": 1}')], [alone("0", "t")], []),
        (
            [member("0.input.png", PNG), member("0.output.txt", b"t")],
            [],
            [
                (
                    "0",
                    "missing_caption",
                    "no text in .txt or in the caption of .json; a key ends at the first dot of a name, so that its"
                    " members are .input.png, .output.txt: rename them to KEY.jpg, KEY.txt, or"
                    " index with --key last-dot",
                )
            ],
        ),
        ([special("0.bin"), TEXT, special("0.x.cls")], [alone("0", "t")], []),
        ([large("0.txt", 5)], [], [("0", "text_too_large", "0.txt: 5 bytes, limit 4194304")]),
        ([member("0.txt", b"t" * (4 << 20))], [alone("0", "t" * (4 << 20))], []),
        (
            [member("0.txt", b"t" * ((4 << 20) + 1))],
            [],
            [("0", "text_too_large", "0.txt: 4194305 bytes, limit 4194304")],
        ),
        ([member("0.txt", b"abc\xff")], [], [("0", "not_utf8", "0.txt: byte 3 is not UTF-8")]),
        (
            [TEXT, member("0.json", b'{"a": "\\ud800"}')],
            [alone("0", "t")],
            [("0", "unused_part", f"0.json: a string holds a lone surrogate (not_utf8){UNUSED}")],
        ),
        ([TEXT, member("0.json", b'{"a": "\\u00e4"}')], [alone("0", "t")], []),
        (
            [TEXT, member("0.json", b"[]")],
            [alone("0", "t")],
            [("0", "unused_part", f"0.json: is a list, not an object (bad_json){UNUSED}")],
        ),
        (
            [TEXT, member("0.json", b"[")],
            [alone("0", "t")],
            [
                (
                    "0",
                    "unused_part",
                    f"0.json: JSONDecodeError: Expecting value: line 1 column 2 (char 1) (bad_json){UNUSED}",
                )
            ],
        ),
        ([TEXT, *(member(*part) for part in parts)], [alone("0", "t")], []),
        (
            [TEXT, *(member(*part) for part in parts), member("0.x")],
            [],
            [("0", "too_many_members", "4097 members, limit 4096")],
        ),
        ([TEXT, member("0.json", document(**{str(i): i for i in range(1024)}, a=[], b=None))], [alone("0", "t")], []),
        (
            [TEXT, member("0.json", document(**{str(i): i for i in range(1025)}))],
            [alone("0", "t")],
            [("0", "too_many_scalars", "1025 entries in .json, limit 1024; the sample has no columns")],
        ),
        (
            [member("0.json", document(texts=["a"] * most, images=[None] * most))],
            [("0", (0,) * most, ("a",) * most, ())],
            [],
        ),
        (
            [member("0.json", document(texts=["a"] * (most + 1), images=[None] * (most + 1)))],
            [],
            [("0", "too_many_members", "4097 parts, limit 4096")],
        ),
        (
            [member("0.json", document(texts=["a", "b"], images=[None]))],
            [],
            [("0", "bad_document", "2 texts but 1 images")],
        ),
        *(
            (
                [member("0.a.png", PNG), member("0.json", document(texts=["a", text], images=[None, image]))],
                [],
                [("0", "bad_document", "position 1 needs one string, in texts or in images")],
            )
            for text, image in (("b", "0.a.png"), (None, None), (3, None), (None, 3))
        ),
        (
            [member("0.json", document(texts=[" ", ""], images=[None, None]))],
            [],
            [("0", "empty_document", "the document has neither images nor text")],
        ),
        ([member("0.json", document(texts=[" ", "a"], images=[None] * 2))], [("0", (0, 0), (" ", "a"), ())], []),
        (
            [
                member("d/0.a.png", PNG),
                member("d/0.b.jpg", b"P6 2 2"),
                member("d/0.webp", WEBP),
                member("d/0.json", document(texts=[None, "t", None], images=["0.a.png", None, "d/0.webp"])),
            ],
            [("d/0", (1, 0, 1), ("t",), (PNG_PART, WEBP_PART))],
            [("d/0", "unused_part", "its .json does not name .b.jpg; the document goes without")],
        ),
        (
            [member("d/0.png", PNG), member("d/0.json", document(texts=[None], images=["e/0.png"]))],
            [],
            [("d/0", "missing_image", f"the document names 'e/0.png', {NO_IMAGE}")],
        ),
        *(
            (
                [member("0.png", PNG), member("0.json", document(texts=[None], images=[name]))],
                [],
                [("0", "missing_image", f"the document names {name!r}, {NO_IMAGE}")],
            )
            for name in ("0", "0.jpg", "1.png")
        ),
        *(
            ([member(f"0.x.{suffix}", b"P6 2 2"), TEXT], [], [("0", "unreadable_header", f"0.x.{suffix}: {broken}")])
            for suffix in sorted(IMAGE_SUFFIXES)
        ),
    ]
    for members, samples, findings in cases:
        found, odd = read(members)
        assert [(s.key, s.kinds, s.texts, s.images) for s in found] == samples
        assert odd == findings
    (sample,), _ = read([TEXT, member("0.json", b'{"i": 1, "f": 1.5, "b": true, "s": "x", "n": null, "l": []}')])
    assert sample.scalars == {"i": 1, "f": 1.5, "b": True, "s": "x"}
    assert (most, 1024, 4 << 20) == (MAX_SAMPLE_MEMBERS, MAX_SCALARS, MAX_TEXT_BYTES)


def test_where_the_members_end_too_early() -> None:
    """The last sample counts if the member that is cut is another's, or it has all that the one before has."""
    first, cls = [TEXT, member("0.cls")], member("1.cls")
    text, other = member("1.txt", b"u"), member("1.other")
    zero, one = alone("0", "t"), alone("1", "u")
    last = "d; the last sample before it is "
    cases: list[tuple[list[Member], bytes | None, Found, Odd]] = [
        ([], None, [], [("", "cut_tar", "d")]),
        ([], b"./5.txt", [], [("5", "cut_tar", "d")]),
        ([TEXT], None, [zero], [("", "cut_tar", f"{last}0")]),
        ([TEXT], b"0.cls", [], [("0", "cut_tar", "d")]),
        ([*first, text], None, [zero], [("1", "cut_tar", "d")]),
        ([*first, text, other], None, [zero], [("1", "cut_tar", "d")]),
        ([*first, text, cls], None, [zero, one], [("", "cut_tar", f"{last}1")]),
        ([*first, text, cls, other], None, [zero, one], [("", "cut_tar", f"{last}1")]),
        ([*first, text], b"1.cls", [zero], [("1", "cut_tar", "d")]),
        ([*first, text], b"2.cls", [zero, one], [("2", "cut_tar", f"{last}1")]),
        ([*first, member("1.a.txt", b"u"), member("1.b.cls"), text], None, [zero, one], [("", "cut_tar", f"{last}1")]),
    ]
    for members, cut, samples, findings in cases:
        found, odd = read(members, TarError("cut_tar", "d", cut))
        assert [(s.key, s.kinds, s.texts, s.images) for s in found] == samples
        assert odd == findings
