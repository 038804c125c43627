"""Paths are any bytes: what has a name that is not UTF-8 is served, and messages show it escaped."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cli.server_process import command, run
from shards import write_pairs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dataserver.process import escaped, in_one_line

JOB = {
    "stream": {"datasets": [{"name": "d"}], "tokenizer": {"name": "t"}, "seq_len": 256, "global_batch": 4},
    "execution": {
        "modules": [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}],
        "end": {"steps": 3},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Latin-1 `größe`, with a dataset `d`."""
    plain = tmp_path_factory.mktemp("names")
    found = Path(os.fsdecode(os.fsencode(plain) + b"/gr\xf6\xdfe"))
    try:
        found.mkdir()
    except OSError as error:
        pytest.skip(f"this file system takes no names that are not UTF-8 ({error})")
    write_pairs(plain / "d", 12, 6).rename(found / "d")
    return found


def name(text: bytes) -> str:
    return os.fsdecode(text)


def test_everything_may_lie_in_such_a_folder(folder: Path) -> None:
    model = WordLevel({"a": 0, "the": 1, "x": 2}, unk_token="x")
    file = folder / name(b"t\xf6k")
    file.write_text(Tokenizer(model).to_str())
    tokenizer = f"t={file}"
    indexed = run("index", folder / "d", "--workers", "2", "--tokenizer", tokenizer, "--tokenizer", "bytes")
    assert indexed.returncode == 0, indexed.stderr
    apart = folder / name(b"\xefndex")
    assert run("index", folder / "d", "--index-dir", apart).stdout.splitlines()[-1] == indexed.stdout.splitlines()[-1]
    listed = folder / name(b"l\xefst")
    assert run("lint", folder / "d", "--index-dir", apart, "--quarantine-file", listed).returncode == 0
    sizes = folder / name(b"s\xefzes")
    assert run("sizes", folder / "d", "--quarantine", listed, "--output", sizes).returncode == 0
    assert sizes.stat().st_size
    job = folder / name(b"j\xf6b.yaml")
    job.write_text(yaml.safe_dump(JOB))
    given = ("--dataset", f"d={folder / 'd'}", "--tokenizer", tokenizer, "--quarantine", f"d={listed}")
    trace = folder / name(b"tr\xe4ce.json")
    planned = run("plan", "--job", job, *given, "--step", "0", "--trace", trace)
    assert planned.returncode == 0, planned.stderr
    assert trace.stat().st_size


@pytest.mark.parametrize(
    "arguments",
    [
        ["index", b"/nothing"],
        ["lint", b"/nothing"],
        ["serve", "--config", b"/nothing"],
        ["serve", "--dataset", b"d=/nothing"],
    ],
)
def test_what_is_not_there_is_named_escaped(folder: Path, arguments: list[str | bytes]) -> None:
    root = os.fsencode(folder)
    line = [a.replace(b"/", root + b"/") if isinstance(a, bytes) else a.encode() for a in arguments]
    said = run(*map(os.fsdecode, line)).refusal()
    assert said.startswith("dataserver: ")
    assert r"/gr\xf6\xdfe/nothing" in said


def test_output_and_log_show_names_escaped(folder: Path) -> None:
    done = subprocess.run(command("index", folder / "d"), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0
    assert rb"/gr\xf6\xdfe/d" in done.stdout.splitlines()[0]
    done = subprocess.run(command("lint", folder / "no"), capture_output=True, timeout=120, check=False)
    assert rb"/gr\xf6\xdfe/no cannot be opened" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("odd", [b"00\xfc.tar", b"s\xfcb/0.tar"])
def test_a_shard_with_such_a_name_is_refused_for_it(tmp_path: Path, odd: bytes) -> None:
    """Its name stands in indexes, in findings and in errors that travel."""
    folder = write_pairs(tmp_path / "d", 6, 6)
    shard = folder / name(odd)
    shard.parent.mkdir(exist_ok=True)
    shutil.copy(folder / "00000.tar", shard)
    line = run("index", folder).refusal()
    assert "is not UTF-8, or has control characters or line breaks; rename the file" in line
    assert line.isascii()


def test_text_that_must_be_utf8_is_named() -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        name(b"h\xfcst:50051").encode()
    assert in_one_line(caught.value) == r"h\xfcst:50051 is not UTF-8, which is required here; use another name"
    assert escaped("plain é \ud800") == r"plain é \ud800"
