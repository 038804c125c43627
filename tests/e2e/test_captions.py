"""Named captions from the command line to a client: what `index` was told is what trainers read."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli.server_process import refused, run, serving
from e2e.streams import read_views
from serving.harness import job_data
from shards import make_image, write_tar

from dataserver.planning.job.identity import JobSpecError
from trainclient.client import DataClient

MODULES = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("captions") / "d"
    for shard in range(2):
        members = []
        for row in range(8):
            key = f"{shard}{row}"
            entries = {"long": f"<long {key}>"} if row else {}
            members += [
                (f"{key}.0.jpg", make_image(rng, 32, 32)),
                (f"{key}.1.jpg", make_image(rng, 48, 32)),
                (f"{key}.txt", f"<own {key}>".encode()),
                (f"{key}.recaption.json", json.dumps(entries).encode()),
            ]
        write_tar(folder / f"{shard}.tar", members)
    done = run("index", folder, "--caption", "long=recaption.json:long", "--several-images", "all")
    assert done.returncode == 0, done.stderr
    assert "  served       2 missing_named_caption\n" in done.stdout
    assert "(bytes, caption long, digest" in done.stdout
    return folder


def texts(address: str, **entry: object) -> list[str]:
    """The texts of all samples of two epochs, as trainers get them."""
    data = job_data(
        modules=MODULES,
        datasets=[{"name": "d", **entry}],
        generation={"ratio": "0"},
        end={"epochs": 2},
    )
    with DataClient([address], data, "llm", 0) as client:
        job = client.job
    views = read_views([address], job, lambda batch: (batch.tensors.get("token_ids"), batch.items))
    ids = [tokens.flatten().tolist() for tokens, _ in views["llm", 0] if tokens is not None]
    found = b"".join(bytes(token for token in tokens if token < 256) for tokens in ids)
    assert sum(len(items.sample) for _, items in views["vit", 0]) == 2 * 2 * 16, "every sample has two images"
    return sorted(text.rstrip(b"\0").decode() for text in found.replace(b">", b">\n").split(b"\n") if text.strip(b"\0"))


def test_a_trainer_reads_the_caption_that_its_job_names(folder: Path) -> None:
    keys = [f"{shard}{row}" for shard in range(2) for row in range(8)]
    long = [f"<own {key}>" if key[1] == "0" else f"<long {key}>" for key in keys]
    with serving("--dataset", f"d={folder}") as server:
        assert texts(server.address) == sorted(2 * [f"<own {key}>" for key in keys])
        assert texts(server.address, caption="long") == sorted(2 * long)
        drawn = texts(server.address, captions=[{"name": "long"}, {"name": "own"}])
        assert sorted(text.split()[1] for text in drawn) == sorted(2 * [f"{key}>" for key in keys])
        assert 6 < sum(text.startswith("<long") for text in drawn) < 22
        with pytest.raises(JobSpecError, match=r"the job names the caption 'huge', the index has \['own', 'long'\]"):
            texts(server.address, caption="huge")


def test_a_caption_that_nobody_has_ends_in_one_line(folder: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"a")])
    assert refused("index", tmp_path, "--caption", "long=recaption.json:long") == (
        f"dataserver: no sample of {tmp_path} has the caption long (member .recaption.json, 'long'); correct the"
        " extension of the member, its key, or the column of the parquet files, or leave the caption out"
    )
    assert "--caption own=x.txt: a caption is called 'own'" in refused("index", tmp_path, "--caption", "own=x.txt")
    assert "names the caption 'huge'" in refused("sizes", folder, "--output", tmp_path / "s", "--caption", "huge")
    done = run("sizes", folder, "--output", tmp_path / "s", "--caption", "long")
    tokens = {len(f"<own {n}>") for n in ("00",)} | {len("<long 01>")}
    assert {s["text_tokens"] for s in json.loads((tmp_path / "s").read_text())["samples"]} == tokens, done.stderr
