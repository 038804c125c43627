import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli.server_process import command, refused, run, spawn
from shards import write_pairs, write_tar

from dataserver.dataset import Dataset
from dataserver.dataset.quarantine import Quarantine

JOB = {
    "stream": {"datasets": [{"name": "d"}], "seq_len": 256, "global_batch": 4, "sizing": {"max_patches": 256}},
    "execution": {
        "modules": [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2}],
        "end": {"steps": 3},
    },
}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("cli") / "d", 20, 8)
    assert run("index", folder).returncode == 0
    return folder


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    return file


def test_index_prints_what_it_found_and_the_same_fingerprint_again(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 12, 8)
    first, second = run("index", folder, "--workers", "2"), run("index", folder)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "2 (2 indexed now)" in first.stdout
    assert "2 (0 indexed now)" in second.stdout
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]
    assert "fingerprint" in first.stdout.splitlines()[-1]


SHORT_OF_MEMORY = """
import resource, sys
from dataserver.cli import main
import dataserver.cli.index, dataserver.dataset.index.indexing
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (32 << 20),) * 2)
sys.exit(main(["index", sys.argv[1], "--workers", "1"]))
"""


def test_a_lack_of_memory_is_one_line(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.jpg", bytes(48 << 20)), ("0.txt", b"x")])
    ran = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY, tmp_path], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "dataserver: not enough memory" in ran.stderr.splitlines()[-1]


def test_index_of_a_read_only_dataset_lies_elsewhere(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    before = sorted(folder.iterdir())
    assert run("index", folder, "--index-dir", tmp_path / "i", "--tokenizer", "bytes").returncode == 0
    assert sorted(folder.iterdir()) == before
    assert list((tmp_path / "i").iterdir())


def test_index_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "nothing-here" in refused("index", tmp_path / "nothing-here")
    assert "empty" in refused("index", tmp_path / "empty")
    assert "one by one" in refused("index", "a", "b", "--index-dir", tmp_path)
    assert "NAME=PATH" in refused("index", "a", "--tokenizer", "llama")
    assert "no.json" in refused("index", "a", "--tokenizer", "llama=no.json")


def test_lint_lists_what_does_not_decode_and_writes_a_quarantine_list(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 6, 6, formats=("PNG",))
    shard = folder / "00000.tar"
    assert run("index", folder).returncode == 0
    ref = Dataset.open(folder).shards[0].image(0, 0)
    with shard.open("r+b") as file:
        file.seek(ref.offset + ref.length // 2)
        file.write(bytes(ref.length // 4))
    assert run("index", folder).returncode == 0, "the shard changed"
    found = run("lint", folder, "--decode", "--quarantine-file", tmp_path / "q")
    assert found.returncode == 1, found.stderr
    assert "00000.tar\t000000000\tundecodable" in found.stdout
    quarantine = Quarantine.load(tmp_path / "q")
    assert quarantine.num_samples == 1
    assert quarantine.digest in found.stdout
    clean = run("lint", folder)
    assert (clean.returncode, clean.stdout) == (0, "6 samples, no findings\n")


def test_lint_says_what_no_quarantine_list_can_hold(tmp_path: Path) -> None:
    write_tar(tmp_path / "d" / "0.tar", [("0.txt", b"x"), ("../1.txt", b"x"), ("2.txt", b"")])
    assert run("index", tmp_path / "d").returncode == 0
    *_, listed, unnamed, total, first, second = run(
        "lint", tmp_path / "d", "--quarantine-file", tmp_path / "q"
    ).stdout.splitlines()
    assert total == "1 sample, 2 findings:"
    assert [first.split(), second.split()] == [["unsafe_name", "1", "ignored"], ["missing_caption", "1", "left", "out"]]
    assert listed.startswith(f"1 sample in {tmp_path / 'q'}, digest ")
    assert unnamed == "1 finding of a shard and no sample: no quarantine list can hold them"
    assert (tmp_path / "q").read_text() == '["0.tar", "2"]\n'


def test_lint_as_json_says_what_becomes_of_each_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"x"), ("1.txt", b""), ("0.txt", b"again")])
    indexed = run("index", tmp_path)
    assert "left out     1 duplicate_key" in indexed.stdout
    found = run("lint", tmp_path, "--json")
    assert found.returncode == 1
    document = json.loads(found.stdout)
    assert [(f["shard"], f["key"], f["kind"], f["effect"]) for f in document["findings"]] == [
        ("0.tar", "1", "missing_caption", "left out"),
        ("0.tar", "0", "duplicate_key", "left out"),
    ]
    assert (document["samples"], document["unlisted"], document["quarantine"]["samples"]) == (1, 0, 1)
    assert document["counts"] == {"duplicate_key": 1, "missing_caption": 1}
    assert "not-here" in refused("lint", tmp_path / "not-here")


def test_plan_shows_a_step(indexed: Path, job_file: Path) -> None:
    shown = run("plan", "--job", job_file, "--step", "1", "--dataset", f"d={indexed}")
    assert shown.returncode == 0, shown.stderr
    for expected in ("step 1 of 3", "max / mean", "bubble %", "makespan ms", "understanding", "+ balanced packing"):
        assert expected in shown.stdout


def test_plan_as_json_is_the_same_every_time(indexed: Path, job_file: Path) -> None:
    line = ("plan", "--job", job_file, "--step", "0", "--dataset", f"d={indexed}", "--json")
    first, second = run(*line), run(*line)
    assert first.stdout == second.stdout
    plan = json.loads(first.stdout)
    backbone = next(a for a in plan["arrangements"] if a["module"] == "llm")
    assert sorted(backbone["item"]) == list(range(len(plan["samples"]["sample"])))
    assert [load["module"] for load in plan["loads"]] == ["vit", "llm"]


def test_plan_refuses_what_makes_no_sense(indexed: Path, job_file: Path, tmp_path: Path) -> None:
    data = f"d={indexed}"
    assert "ends after step 2" in refused("plan", "--job", job_file, "--step", "3", "--dataset", data)
    assert "counted from 0" in refused("plan", "--job", job_file, "--step=-1", "--dataset", data)
    assert "'d'" in refused("plan", "--job", job_file, "--step", "0", "--dataset", f"other={indexed}")
    assert "cannot be read" in refused("plan", "--job", tmp_path / "no.yaml", "--step", "0", "--dataset", data)
    for nothing in ("", "null"):
        job_file.write_text(nothing)
        line = refused("plan", "--job", job_file, "--step", "0", "--dataset", data)
        assert line.startswith("dataserver: the job is not valid: job: found null; ")
    job_file.write_text("stream: [")
    assert "not valid YAML" in refused("plan", "--job", job_file, "--step", "0", "--dataset", data)
    job_file.write_text("stream: {colour: 3}")
    assert "stream.colour" in refused("plan", "--job", job_file, "--step", "0", "--dataset", data)


def test_every_command_takes_the_built_in_tokenizer_by_its_name(indexed: Path, job_file: Path) -> None:
    job = ("--job", job_file, "--dataset", f"d={indexed}")
    commands = {
        "index": ("index", indexed),
        "plan": ("plan", *job, "--step", "0"),
        "simulate": ("simulate", *job, "--steps", "1"),
    }
    for name, given in commands.items():
        found = run(*given, "--tokenizer", "bytes")
        assert found.returncode == 0, (name, found.stderr)
    serve = ("serve", "--dataset", f"d={indexed}", "--listen", "nowhere")
    assert "HOST:PORT" in refused(*serve, "--tokenizer", "bytes"), "the tokenizer is accepted, the address is not"
    line = "dataserver: --tokenizer bytes=x.json: bytes is built in; give the file another name"
    assert {refused(*given, "--tokenizer", "bytes=x.json") for given in (*commands.values(), serve)} == {line}


def test_serve_refuses_to_start_without_what_it_needs(indexed: Path, tmp_path: Path) -> None:
    fresh = write_pairs(tmp_path / "fresh", 4, 4)
    assert "no dataset" in spawn("serve").refusal()
    assert "NAME=PATH" in refused("serve", "--dataset", "just-a-path")
    assert "twice" in refused("serve", "--dataset", "d=a", "--dataset", "d=b")
    assert "nothing-here" in refused("serve", "--dataset", f"d={tmp_path}/nothing-here")
    assert f"dataserver index {fresh}" in refused("serve", "--dataset", f"d={fresh}")
    assert "--insecure" in refused("serve", "--dataset", f"d={indexed}", "--listen", "0.0.0.0:0")
    assert "'peers' is (): it has no address" in refused("serve", "--dataset", f"d={indexed}", "--peers", "")
    assert "no.json" in refused("serve", "--dataset", f"d={indexed}", "--tokenizer", "llama=no.json")
    assert "no-list" in refused("serve", "--dataset", f"d={indexed}", "--quarantine", "d=no-list")


def test_serve_refuses_an_index_that_is_older_than_its_shard(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    assert run("index", folder).returncode == 0
    write_pairs(folder, 6, 4, seed=9)
    assert f"dataserver index {folder}" in refused("serve", "--dataset", f"d={folder}")


def test_serve_refuses_a_port_that_is_taken(indexed: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused("serve", "--dataset", f"d={indexed}", "--listen", f"127.0.0.1:{port}")
    assert "in use" in line
    assert "--listen" in line


def test_serve_names_an_unknown_key_of_its_file(indexed: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"datasets: {{d: {indexed}}}\nprefetch: 3\n")
    assert "'prefetch' is unknown" in refused("serve", "--config", file)


@pytest.mark.parametrize("arguments", [(), ("index",), ("lint",), ("plan",), ("serve",)])
def test_every_command_has_help(arguments: tuple[str, ...]) -> None:
    found = run(*arguments, "--help")
    assert found.returncode == 0
    assert "usage: dataserver" in found.stdout


def test_a_quarantine_list_that_cannot_be_written_names_its_flag(indexed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused("lint", indexed, "--quarantine-file", tmp_path / "file/list")
    assert line.startswith(f"dataserver: --quarantine-file {tmp_path}/file/list cannot be written (")


def test_output_that_cannot_be_written_is_one_line() -> None:
    for arguments in ((), ("lint",)):
        with Path("/dev/full").open("w") as full:
            line = command(*arguments, "--help")
            ran = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert ran.returncode == 2
        (said,) = ran.stderr.splitlines()
        assert said.startswith("dataserver: ")
        assert "No space left on device" in said


def test_a_data_server_never_imports_torch() -> None:
    code = "import sys, dataserver.cli; sys.exit(any(m in sys.modules for m in ('torch', 'trainclient')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
