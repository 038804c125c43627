"""Files that look like shards, their metadata or their images and are not read: by their names, what helps."""

from typing import Final

_UNPACK: Final = "a compressed tar is not read; unpack it"
_CONVERT: Final = "or all: dataserver convert SOURCE TARGET"
_MANIFEST: Final = "a compressed manifest is not read; unpack it"
_ARCHIVE: Final = (
    "an archive of this kind is not read; unpack it, and make a tar of the files: tar --sort=name -cf NAME.tar"
)
_OTHER: Final = "is not read; write its samples as tars, or as Parquet with the bytes of images"
_ENDINGS: Final = {
    ".tar.gz": f"{_UNPACK} (gunzip FILE), {_CONVERT}",
    ".tgz": f"{_UNPACK}: gunzip < FILE > NAME.tar",
    ".tar.zst": f"{_UNPACK} (zstd -d --rm FILE), {_CONVERT}",
    ".tar.zstd": f"{_UNPACK}: zstd -d FILE -o NAME.tar",
    ".tzst": f"{_UNPACK}: zstd -d FILE -o NAME.tar",
    ".tar.bz2": f"{_UNPACK}: bunzip2 FILE",
    ".tbz2": f"{_UNPACK}: bunzip2 < FILE > NAME.tar",
    ".tbz": f"{_UNPACK}: bunzip2 < FILE > NAME.tar",
    ".tar.xz": f"{_UNPACK}: xz -d FILE",
    ".txz": f"{_UNPACK}: xz -dc FILE > NAME.tar",
    ".tar.lzma": f"{_UNPACK}: xz -d FILE",
    ".tar.lz4": f"{_UNPACK}: lz4 -d FILE",
    ".tar.z": f"{_UNPACK}: gunzip < FILE > NAME.tar",
    ".tar.br": f"{_UNPACK}: brotli -d FILE",
    ".tar": "only names that end in .tar in lower case are shards; rename it: mv FILE NAME.tar",
    ".zip": _ARCHIVE,
    ".7z": _ARCHIVE,
    ".rar": _ARCHIVE,
    ".jsonl.gz": f"{_MANIFEST}: gunzip FILE",
    ".jsonl.zst": f"{_MANIFEST}: zstd -d --rm FILE",
    ".jsonl.bz2": f"{_MANIFEST}: bunzip2 FILE",
    ".jsonl.xz": f"{_MANIFEST}: xz -d FILE",
    ".jsonl": "only names that end in .jsonl in lower case are manifests; rename it: mv FILE NAME.jsonl",
    ".ndjson": "only names that end in .jsonl are manifests; rename it: mv FILE NAME.jsonl",
    "metadata.csv": "a table of this kind is not read; write its rows as lines of JSON: NAME.jsonl",
    ".parquet": "only names that end in .parquet in lower case are read; rename it: mv FILE NAME.parquet",
    ".parquet.gz": "a compressed Parquet file is not read; unpack it: gunzip FILE",
    ".parquet.zst": "a compressed Parquet file is not read; unpack it: zstd -d --rm FILE",
    ".arrow": f"an Arrow file {_OTHER} (datasets: load_from_disk(FOLDER).to_parquet(FILE))",
    **{
        f".mds{compression}": "MDS (MosaicML Streaming) is not read; rewrite it: dataserver convert SOURCE TARGET"
        for compression in ("", ".zstd", ".gz", ".bz2", ".br", ".snappy")
    },
    ".lance": "Lance datasets are not read; rewrite them: dataserver convert SOURCE TARGET",
    ".tfrecord": f"a TFRecord {_OTHER}",
    ".tfrecords": f"a TFRecord {_OTHER}",
}
"""What helps with a file, by the end of its name in lower case."""

LONE_SIDECAR: Final = (
    "a dataset of tars reads a parquet beside the .tar of the same name, and there is none; rename it, or give Parquet"
    " files with images a folder of their own"
)
LONE_MANIFEST: Final = (
    "a dataset of tars or Parquet reads no manifest; give a manifest and its images a folder of their own"
)
LONE_MEDIA: Final = (
    "a dataset of tars or Parquet reads no images, clips or videos in files of their own, and this folder has some;"
    " give such files a folder of their own, or make a tar of them: tar --sort=name -cf NAME.tar"
)
LONE_PAIRS: Final = (
    "a folder of images, clips or videos with texts beside them: a dataset of manifests reads what these name, and no"
    " texts beside it; name the files in a manifest, or give them a folder of their own"
)
LONE_TEXTS: Final = (
    "a folder with texts and without images, clips or videos: texts are read beside these alone; put each text beside"
    " its image, under the same name"
)
ARRAY: Final = (
    "a JSON array is read where it is named itself; name FILE as the dataset, in `serve` too, or write its objects as"
    " lines of NAME.jsonl"
)
ODD_LINK: Final = (
    "a link that leaves the dataset is not followed to see whether it is a JSON array, such as LLaVA's manifests; if it"
    " is one, copy it here, and name the copy as the dataset, in `serve` too"
)
UNOPENED_JSON: Final = (
    "it cannot be opened to see whether it is a JSON array, which is read where it is named itself; make it readable"
)
REMOTE_MANIFEST: Final = (
    "manifests and loose images are read from disks alone, since each image would be a request to the store; copy them"
    " to a disk, or name tars or Parquet files"
)
UNNAMED_TAR: Final = "only names that end in .tar are shards, and this is a tar; rename it: mv FILE NAME.tar"
ODD_NAME: Final = "a part of its name is empty, '.' or '..'; give the object another name"
FOLDER_LINK: Final = "a link to a folder is not followed; name the folder itself, or put the shards where the link is"
_ABOUT: Final = ("readme", "license", "licence", "notice", "requirements", "copying", "version", "changelog")
"""How files are called that tell of a folder, and are no captions."""
_LISTS: Final = (
    "classes",
    "labels",
    "names",
    "train",
    "val",
    "valid",
    "test",
    "trainval",
    "urls",
    "files",
    "index",
    "list",
)
"""How lists are called that stand beside folders of images; no captions either."""


def remedy_of(name: str) -> str:
    """Say what helps with a file that looks like a shard and is not read; nothing for any other file."""
    lower = name.lower()
    return next((remedy for ending, remedy in _ENDINGS.items() if lower.endswith(ending)), "")


def may_be_caption(base: str) -> bool:
    """Whether a file may be the text of an image, by its name without folders."""
    lower = base.lower()
    return lower.endswith(".txt") and lower.removesuffix(".txt") not in _LISTS and not lower.startswith(_ABOUT)


def is_about(base: str) -> bool:
    """Whether a file without a dot in its name tells of a dataset, as README does; one of many would have a number."""
    return base.lower().startswith(_ABOUT) and not any(letter.isdigit() for letter in base)
