"""Makes odd and hostile shards, with a manifest of what `index`, `lint --decode` and servers must say of them.

The verdicts follow from how the shards are made, in the words of docs/datasets.md; the code that they judge takes no
part. Same seed, same bytes (with the same versions of Pillow and pyarrow).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from odd_shards.shards import SHARDS, make_shard
from odd_shards.verdicts import LEFT_OUT, SERVED, TEXT, Odd


def make(folder: Path, seed: int, text_only: bool = True) -> dict[str, Any]:
    """Write all shards into a folder; return the manifest, which is written beside the folder as FOLDER.json.

    The manifest maps each shard to `kinds`, what must be said of the shard without a key, and to `samples`, which maps
    each key to its verdict (`served`, `invalid` or `left out`), to the kinds that must be named with it, and to the
    form in which it is served (`pair`, `text` or `document`).

    Args:
        folder: for the shards.
        seed: another one makes other shards.
        text_only: whether they are indexed with `--text-only allow`; otherwise texts without an image are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, Any] = {}
    for name in SHARDS:
        shard = make_shard(name, seed)
        (folder / f"{name}.tar").write_bytes(shard.content)
        if shard.sidecar is not None:
            (folder / f"{name}.parquet").write_bytes(shard.sidecar)
        samples = {key: _judged(odd, text_only) for key, odd in shard.samples.items()}
        is_served = any(sample["verdict"] != LEFT_OUT for sample in samples.values())
        missing = ["missing_sidecar"] if is_served and shard.sidecar is None and not shard.has_columns else []
        shards[f"{name}.tar"] = {"kinds": [*shard.kinds, *missing], "samples": samples}
    manifest = {"seed": seed, "shards": shards}
    folder.with_name(f"{folder.name}.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def _judged(odd: Odd, text_only: bool) -> dict[str, Any]:
    """What the manifest says of a sample."""
    if text_only or (odd.verdict, odd.form) != (SERVED, TEXT):
        return {"verdict": odd.verdict, "kinds": list(odd.kinds), "form": odd.form}
    kinds = [kind for kind in odd.kinds if kind != "lost_image"]
    return {"verdict": LEFT_OUT, "kinds": [*kinds, "orphan_text"], "form": odd.form}


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
