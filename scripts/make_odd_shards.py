"""Makes odd and hostile shards, with a manifest of what `index`, `lint --decode` and servers must say of them.

The verdicts follow from how the shards are made, in the words of docs/datasets.md; the code that they judge takes no
part. Same seed, same bytes (with the same versions of Pillow and pyarrow).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from odd_shards.formats import WRITERS
from odd_shards.shards import COPIES, FILES, SHARDS, make_file, make_shard
from odd_shards.verdicts import LEFT_OUT, SERVED, TEXT, Odd

ALWAYS = ("mixture", "sidecar")
"""Shards that are made for every seed: others lack a sidecar only beside one that has it."""


def make(
    folder: Path, seed: int, text_only: bool = True, accept_truncated: bool = False, light: bool = False
) -> dict[str, Any]:
    """Write all shards into a folder; return the manifest, which is written beside the folder as FOLDER.json.

    The manifest maps each shard to `kinds`, what must be said of the shard without a key, and to `samples`, which maps
    each key to its verdict (`served`, `invalid` or `left out`), to the kinds that must be named with it, and to the
    form in which it is served (`pair`, `text` or `document`). `files` are those beside shards, each with its kind.

    Args:
        folder: for the shards, which are indexed with `--allow-duplicates`.
        seed: another one makes other shards.
        text_only: whether they are indexed with `--text-only allow`; otherwise texts without an image are left out.
        accept_truncated: whether they are indexed with `--truncated-images accept`.
        light: without samples that take long, and only a third of the shards that are odd as a whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {}
    chosen = [name for i, name in enumerate(SHARDS) if not light or name in ALWAYS or (i + seed) % 3 == 0]
    for name in (*chosen, *(name for name, of in COPIES.items() if of in chosen)):
        shard = make_shard(COPIES.get(name, name), seed, light)
        (folder / f"{name}.tar").write_bytes(shard.content)
        if shard.sidecar is not None:
            (folder / f"{name}.parquet").write_bytes(shard.sidecar)
        samples = {key: _judged(odd, text_only, accept_truncated) for key, odd in shard.samples.items()}
        is_served = any(sample["verdict"] != LEFT_OUT for sample in samples.values())
        missing = ["missing_sidecar"] if is_served and shard.sidecar is None and not shard.has_columns else []
        copied = ["duplicate_shard"] if name in COPIES else []
        shards[f"{name}.tar"] = {"kinds": [*shard.kinds, *missing, *copied], "samples": samples}
    for name in FILES:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make_file(name, seed))
    manifest = {"seed": seed, "shards": shards, "files": dict.fromkeys(FILES, "unread_file")}
    folder.with_name(f"{folder.name}.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def make_as(
    folder: Path, kind: str, seed: int, text_only: bool = True, accept_truncated: bool = False
) -> tuple[str, dict[str, Any]]:
    """Write the light mixture of a seed in another format; return what names the dataset, and the manifest.

    Args:
        folder: for the files.
        kind: of `WRITERS`.
        seed: as in `make`, which writes the same samples into `mixture.tar`.
        text_only: as in `make`.
        accept_truncated: as in `make`.
    """
    rng = np.random.default_rng([seed, list(WRITERS).index(kind)])
    written = WRITERS[kind](make_shard("mixture", seed, light=True), rng)
    for name, content in written.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    samples = {key: _judged(odd, text_only, accept_truncated) for key, odd in written.said.samples.items()}
    shards = {written.shard: {"kinds": written.said.kinds, "samples": samples}}
    manifest = {"seed": seed, "shards": shards, "files": dict.fromkeys(written.unread, "unread_file")}
    return f"{folder}{written.split}", manifest


def _judged(odd: Odd, text_only: bool, accept_truncated: bool) -> dict[str, Any]:
    """What the manifest says of a sample."""
    verdict, kinds = odd.verdict, list(odd.kinds)
    if odd.truncated and accept_truncated:
        verdict, kinds = SERVED, ["truncated_image" if kind == "undecodable" else kind for kind in kinds]
    if not text_only and (verdict, odd.form) == (SERVED, TEXT):
        verdict, kinds = LEFT_OUT, [*(kind for kind in kinds if kind != "lost_image"), "orphan_text"]
    return {"verdict": verdict, "kinds": kinds, "form": odd.form}


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the shards; the manifest is written beside it")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other shards (default: 0)")
    arguments = parser.parse_args()
    manifest = make(arguments.folder, arguments.seed)
    num_samples = sum(len(shard["samples"]) for shard in manifest["shards"].values())
    print(f"{len(manifest['shards'])} shards, {num_samples} samples in {arguments.folder}; {arguments.folder}.json")


if __name__ == "__main__":
    main()
