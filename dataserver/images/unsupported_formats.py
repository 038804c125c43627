"""Image formats that are not read: they are recognised only so that messages can name them."""

from typing import Final

_OTHERS: Final = (
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypmsf1", "HEIF"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "Photoshop"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"P1", "PBM"),
    (0, b"P2", "PGM"),
    (0, b"P3", "PPM"),
    (0, b"P4", "PBM"),
    (0, b"P5", "PGM"),
    (0, b"P6", "PPM"),
    (0, b"\x76\x2f\x31\x01", "OpenEXR"),
    (0, b"DDS ", "DirectDraw"),
    (0, b"\x1a\x45\xdf\xa3", "Matroska or WebM"),
    (4, b"ftyp", "MP4"),
    (0, b"RIFF", "RIFF"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"PK\x03\x04", "zip"),
    (0, b"version https://git-lfs", "a pointer of Git LFS, whose file git lfs pull brings"),
)
"""What stands at which byte, in the order in which it is looked for."""
OTHER_SUFFIXES: Final = frozenset(
    {"jxl", "heif", "heics", "hif", "avci", "jp2", "j2k", "jpf", "jpx", "jxr", "wdp", "svg", "svgz", "psd", "tga"}
    | {"ico", "exr", "pgm", "pbm", "pnm", "dng", "cr2", "cr3", "nef", "arw"}
)
"""Types of files that are images of formats that are not read, whatever they hold."""
_MARKUP: Final = ((b"<svg", "SVG"), (b"<!doctype html", "HTML"), (b"<html", "HTML"), (b"<?xml", "XML"))


def other_format(data: bytes) -> str:
    """Return the name of a format that is not read; nothing where it is not known."""
    for at, magic, name in _OTHERS:
        if data.startswith(magic, at):
            return name
    begin = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    found = next((name for magic, name in _MARKUP if begin.startswith(magic)), "")
    return "SVG" if found == "XML" and b"<svg" in begin else found
