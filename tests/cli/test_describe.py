"""`dataserver describe`: what it counts, in a terminal of 80 columns and as a page that fetches nothing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli.server_process import refused, run, spawn
from shards import make_image, write_tar

EVIL = "<script>alert(1)</script>"
FILTER = f'width >= 64 and (score > 0.5 or "{EVIL}" is not null) and kind in ("a", "b")'
JOB = f"""
stream:
  datasets:
    - {{name: d, filter: '{FILTER}'}}
    - {{name: other, filter: 'height < 48'}}
    - {{name: all}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pairs of 32 x 48 and 96 x 48 pixels and a broken one; columns with nulls, one of a hostile name."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("described") / "d"
    members, rows = [], []
    for n in range(8):
        image = make_image(rng, 32 if n < 3 else 96, 48)
        members += [(f"{n}.jpg", image), (f"{n}.txt", b"x" * (4 + n)), (f"{n}.long.txt", b"y" * 100)]
        rows.append({"key": f"{n}", "score": None if n % 2 else n / 8, "kind": "abc"[n % 3], EVIL: None if n else 1})
    members += [("8.jpg", b"no image"), ("8.txt", b"text")]
    write_tar(folder / "0.tar", members)
    pq.write_table(pa.Table.from_pylist(rows), folder / "0.parquet")
    assert run("index", folder, "--caption", "long=long.txt").returncode == 0
    (folder.parent / "job.yaml").write_text(JOB)
    return folder


def test_it_counts_what_is_there_in_80_columns(folder: Path) -> None:
    done = run("describe", folder, "--job", folder.parent / "job.yaml")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if str(folder) not in line) <= 80
    words = [line.split() for line in lines]
    for expected in (
        "samples 8 (one image: 8)",
        "images 8",
        f"tokens {sum(range(4, 12))}",
        "caption long 800 tokens",
        "Text tokens: 4 to 11, mean 7.5",
        f"4 - 7 4 {'#' * 24}",
        f"8 - 15 4 {'#' * 24}",
        "Image width: 32 to 96, mean 72.0",
        f"32 - 63 3 {'#' * 14}",
        f"64 - 127 5 {'#' * 24}",
        f"score double {'#' * 12} 50.0 %",
        "width int64 0.0 %",
        "caption.long string 0.0 %",
        f"{EVIL} int64 {'#' * 21} 87.5 %",
        "unreadable_header 1 left out",
        f"7 {'#' * 21} 87.5 %, 6 for a null",
        f"alone: width >= 64 3 {'#' * 9} 37.5 %",
        f"height < 48 8 {'#' * 24} 100.0 %",
    ):
        assert expected.split() in words, expected
    whole = lines.index("What filter 1 drops")
    assert " ".join(lines[whole + 1 : whole + 3]).split() == FILTER.split()


def test_what_a_filter_drops_is_what_a_job_does_not_get(folder: Path) -> None:
    job = folder.parent / "one.yaml"
    job.write_text(json.dumps({"stream": {"datasets": [{"name": "d", "filter": "score > 0.3 and width > 40"}]}}))
    done = run("describe", folder, "--job", job)
    kept = [n for n in range(8) if n % 2 == 0 and n / 8 > 0.3 and n >= 3]
    drops = done.stdout.partition("What the filter drops\n")[2].splitlines()
    assert drops[0].split()[7:9] == [str(8 - len(kept)), "#" * 18], drops
    assert drops[0].endswith("75.0 %, 4 for a null")
    sized = run("sizes", folder, "--output", folder.parent / "s", "--filter", "score > 0.3 and width > 40")
    assert sized.stdout.startswith(f"{len(kept)} samples"), sized


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_fetches_nothing_and_escapes_what_it_shows(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "card.html"
    done = run("describe", folder, "--job", folder.parent / "job.yaml", "--name", "d", "--output", page)
    assert done.returncode == 0, done.stderr
    assert "height < 48" not in done.stdout, "of another dataset of the job"
    text = page.read_text()
    found = _Page()
    found.feed(text)
    assert found.tags.isdisjoint({"script", "img", "link", "iframe", "svg", "object"})
    assert found.attributes <= {"lang", "charset", "class", "style"}
    assert not re.search(r"https?:|url\(|@import", text)
    assert EVIL in found.text
    assert {"8 samples, shards: 1", "unreadable_header", "37.5 %", "alone: width >= 64"} <= set(found.text)
    assert [p.name for p in tmp_path.iterdir()] == ["card.html"]


def test_the_page_on_stdout_is_all_that_is_there(folder: Path) -> None:
    done = spawn("describe", folder, "--output", "-")
    assert done.stdout.startswith("<!DOCTYPE html>")
    assert done.stdout.endswith("</html>\n")
    assert "  samples" in done.stderr


def test_what_cannot_be_described_is_refused(folder: Path, tmp_path: Path) -> None:
    job = folder.parent / "job.yaml"
    assert "--name is 'x', the datasets of" in refused("describe", folder, "--job", job, "--name", "x")
    assert "cannot be written" in refused("describe", folder, "--output", tmp_path / "nowhere" / "page.html")
    no_job = tmp_path / "no.yaml"
    for content in ("[]", "stream: {datasets: 3}", "stream: {datasets: [a]}"):
        no_job.write_text(content)
        assert "has no list stream.datasets" in refused("describe", folder, "--job", no_job)
    no_job.write_text("stream: {datasets: [{name: d, filter: 3}]}")
    assert "the filter of dataset 'd' is no text" in refused("describe", folder, "--job", no_job)
    no_job.write_text("stream: {datasets: [{name: d, filter: nothing > 3}]}")
    assert "the column 'nothing', which no shard has" in refused("describe", folder, "--job", no_job)
    write_tar(tmp_path / "e" / "0.tar", [("0.txt", b"a")])
    assert "dataserver index" in refused("describe", tmp_path / "e")
