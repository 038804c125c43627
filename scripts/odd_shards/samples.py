"""Samples that are odd, hostile or broken beside their images."""

import json
from collections.abc import Callable
from typing import Any, Final

from odd_shards.images import Rng, encode, jpeg, picture
from odd_shards.verdicts import CAPTION, DOCUMENT, LEFT_OUT, PAIR, SERVED, TEXT, Members, Odd

Maker = Callable[[Rng, str], Odd]
"""Takes the key, since documents name their images by it."""

MIB = 1 << 20


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _texts(*contents: bytes, kinds: tuple[str, ...] = ()) -> Maker:
    """Text alone; several times where there are several contents."""
    return lambda _rng, _key: Odd(tuple(("txt", content) for content in contents), SERVED, kinds, TEXT)


def _pair(*rest: tuple[str, bytes], kinds: tuple[str, ...] = ()) -> Maker:
    """A good image with these other members."""
    return lambda rng, _key: Odd((("jpg", jpeg(rng)), *rest), SERVED, kinds, PAIR)


def _unused(*rest: tuple[str, bytes]) -> Maker:
    """A good image beside members that include one that it does without."""
    return _pair(*rest, kinds=("unused_part",))


def _left_out(kind: str, *members: tuple[str, bytes], image: bool = True) -> Maker:
    """These members, after a good image."""

    def make(rng: Rng, _key: str) -> Odd:
        first: Members = (("jpg", jpeg(rng)),) if image else ()
        return Odd((*first, *members), LEFT_OUT, (kind,))

    return make


def _document(rng: Rng, texts: list[Any], images: list[Any]) -> Members:
    """The members of a document with two images; its JSON names `images`."""
    stored = tuple((f"{n}.jpg", jpeg(rng)) for n in range(2))
    return (*stored, ("json", _json({"texts": texts, "images": images})))


def _good_document(rng: Rng, key: str) -> Odd:
    members = _document(rng, ["before", None, None, "after"], [None, f"{key}.1.jpg", f"{key}.0.jpg", None])
    return Odd(members, SERVED, (), DOCUMENT)


def _bad_document(kind: str, texts: list[Any], images: list[Any]) -> Maker:
    return lambda rng, _key: Odd(_document(rng, texts, images), LEFT_OUT, (kind,))


def _other_formats(rng: Rng, _key: str) -> Odd:
    extension, image_format = (("jpg", "WEBP"), ("png", "JPEG"), ("webp", "PNG"), ("dat", "JPEG"))[rng.integers(4)]
    return Odd.pair(encode(picture(rng), image_format), SERVED, extension=extension)


def _two_images(rng: Rng, _key: str) -> Odd:
    members = (("seg.png", encode(picture(rng), "PNG")), ("jpg", jpeg(rng)), ("txt", CAPTION))
    return Odd(members, SERVED, ("extra_image",))


def _image_twice(rng: Rng, _key: str) -> Odd:
    return Odd((("jpg", jpeg(rng)), ("jpg", b"second"), ("txt", CAPTION)), SERVED, ("duplicate_member",))


def _lost_image(rng: Rng, _key: str) -> Odd:
    size = _json({"width": int(rng.integers(1, 999)), "height": 480, "caption": "a"})
    return Odd((("txt", CAPTION), ("json", size)), SERVED, ("lost_image",), TEXT)


HEAVY: Final = frozenset({"more text than allowed", "very long text", "many members", "JSON nested without end"})
"""Those that take longer than all others together."""
SAMPLES: dict[str, Maker] = {
    "good pair": _pair(("txt", CAPTION)),
    "caption in JSON": _pair(("json", _json({"caption": "from the JSON", "score": 1.5}))),
    "other members": _pair(("cls", b"3"), ("npy", b"\x93NUMPY"), ("txt", CAPTION)),
    "upper case": lambda rng, _key: Odd.pair(jpeg(rng), SERVED, extension="JPG"),
    "extension of another format": _other_formats,
    "good document": _good_document,
    "text": _texts(CAPTION),
    "text with NUL bytes": _texts(b"\0one\0two\0"),
    "text with a byte order mark": _texts(b"\xef\xbb\xbftext"),
    "text in many scripts": _texts("\u0645\u0631\u062d \u4f60\u597d \U0001f600\u200d\u202e e\u0301".encode()),
    "text like a special token": _texts(b"<|endoftext|></s><s>[INST]"),
    "caption like an image": _pair(("txt", b"words <image> words </s>")),
    "very long text": _texts(b"word " * 40_000),
    "text with a size of nothing": lambda _rng, _key: Odd(
        (("txt", CAPTION), ("json", _json({"width": None, "height": 0}))), SERVED, (), TEXT
    ),
    "text twice": _texts(CAPTION, b"second", kinds=("duplicate_member",)),
    "two images": _two_images,
    "image twice": _image_twice,
    "size of an image that is not there": _lost_image,
    "no caption": _left_out("missing_caption"),
    "blank caption": _left_out("missing_caption", ("txt", b" \n\t")),
    "caption of null": _left_out("missing_caption", ("json", b'{"caption": null}')),
    "caption that is a number": _left_out("missing_caption", ("json", b'{"caption": 3}')),
    "empty text": _left_out("missing_caption", ("txt", b""), image=False),
    "JSON alone": _left_out("missing_image", ("json", _json({"caption": "a"})), image=False),
    "something else alone": _left_out("missing_image", ("cls", b"3"), image=False),
    "text in Latin-1": _left_out("not_utf8", ("txt", "gr\u00fc\u00df".encode("latin-1"))),
    "text in UTF-16": _left_out("not_utf8", ("txt", "text".encode("utf-16"))),
    "JSON with half a surrogate": _left_out("not_utf8", ("json", b'{"caption": "\\ud83d"}')),
    "more text than allowed": _left_out("text_too_large", ("txt", b"x" * (4 * MIB + 1)), image=False),
    "broken JSON without a text": _left_out("bad_json", ("json", b'{"caption": "a')),
    "JSON that ends too early": _unused(("txt", CAPTION), ("json", b'{"caption": "a')),
    "JSON of a list": _unused(("txt", CAPTION), ("json", b"[]")),
    "JSON nested without end": _unused(("txt", CAPTION), ("json", b"[" * 200_000)),
    "JSON with an endless number": _unused(("txt", CAPTION), ("json", b'{"a": ' + b"9" * 5000 + b"}")),
    "blank text beside a caption": _unused(("txt", b" "), ("json", _json({"caption": "a"}))),
    "text in Latin-1 beside a caption": _unused(("txt", b"gr\xfc\xdf"), ("json", _json({"caption": "a"}))),
    "broken image beside a good one": _unused(("png", b"no image"), ("txt", CAPTION)),
    "JSON with a byte order mark": _pair(("json", b"\xef\xbb\xbf" + _json({"caption": "a"}))),
    "JSON with many entries": _pair(
        ("txt", CAPTION), ("json", _json({f"c{n}": n for n in range(1025)})), kinds=("too_many_scalars",)
    ),
    "text whose download failed": _left_out(
        "failed_download", ("txt", CAPTION), ("json", _json({"status": "failed_to_download"})), image=False
    ),
    "many members": _left_out("too_many_members", *((f"{n}.txt", b"") for n in range(4097)), image=False),
    "document of another key": _bad_document("missing_image", [None], ["other.0.jpg"]),
    "document of a path": _bad_document("missing_image", [None], ["../../../etc/0.jpg"]),
    "document of unequal lists": _bad_document("bad_document", ["a", "b"], [None]),
    "document with a hole": _bad_document("bad_document", ["a", None], [None, None]),
    "document of numbers": _bad_document("bad_document", [3], [None]),
    "document of both": _bad_document("bad_document", ["a"], ["0.0.jpg"]),
    "empty document": _bad_document("empty_document", [], []),
    "blank document": _bad_document("empty_document", [" "], [None]),
}
"""By name: makes such a sample."""
