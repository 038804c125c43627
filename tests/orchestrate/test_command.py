"""The command: what it prints is what servers plan, and what cannot be is refused in one line."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from cli.server_process import run as dataserver
from faults.disk import fill, missing, small_disk
from shards import write_pairs

from trainclient.__main__ import main as whole
from trainclient.cli import main as trainclient

SIZES = {"samples": [{"count": 3, "text_tokens": 40, "patches": [256]}, {"text_tokens": 90, "patches": [64, 1024]}]}
MODEL = ("--encoder", "tiny", "--backbone", "tiny", "--generator", "tiny", "--generation", "0.5")


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(SIZES))
    return file


def main(arguments: Sequence[str]) -> int:
    return trainclient(["orchestrate", *arguments])


def found(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main([*map(str, arguments), "--as-json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_the_block_is_planned_and_simulated_as_it_stands(tmp_path: Path, sizes: Path) -> None:
    block = tmp_path / "execution.yaml"
    assert main([*MODEL, "--gpus", "8", "--max-tp", "1", "--seq-len", "2048", "--global-batch", "16", "--sizes",
                 str(sizes), "--output", str(block), "--plot", str(tmp_path / "choices.svg")]) == 0  # fmt: skip
    picture = (tmp_path / "choices.svg").read_text()
    assert "monolithic" in picture
    assert "filling the pipeline" in picture
    folder = write_pairs(tmp_path / "d", 60, 20)
    assert dataserver("index", folder).returncode == 0
    stream = {"datasets": [{"name": "d"}], "seq_len": 2048, "global_batch": 16, "generation": {"ratio": "0.5"}}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"stream": stream, **yaml.safe_load(block.read_text())}))
    planned = dataserver("plan", "--job", job, "--dataset", f"d={folder}", "--step", 0, "--json")
    assert planned.returncode == 0, planned.stderr
    simulated = dataserver("simulate", "--job", job, "--dataset", f"d={folder}", "--steps", 1)
    assert simulated.returncode == 0, simulated.stderr


def test_choices_say_what_they_are(capsys: pytest.CaptureFixture[str], sizes: Path) -> None:
    made = found(capsys, *MODEL, "--gpus", 8, "--sizes", sizes, "--seq-len", 4096, "--global-batch", 32)
    assert {c["layout"] for c in made["choices"]} >= {"pipelined", "monolithic"}
    times = [c["simulated_ns"] or c["step_ns"] for c in made["choices"]]
    assert times == sorted(times)
    for choice in made["choices"]:
        assert sum(m["gpus"] for m in choice["modules"].values()) >= choice["gpus"] > 0
        assert 0 < choice["mfu_percent"] < 100
        assert 0 <= choice["bubble_percent"] < 100
        assert choice["simulated_ns"] in (None, pytest.approx(choice["step_ns"], rel=0.5))
    assert made["execution"] is not None


def test_steps_and_waves_are_those_of_several_draws(capsys: pytest.CaptureFixture[str], sizes: Path) -> None:
    asked = (*MODEL, "--sizes", str(sizes), "--seq-len", "4096", "--global-batch", "32")
    made = found(capsys, *asked, "--gpus", 8)
    drawn = [len(choice["simulated_steps_ns"]) for choice in made["choices"]]
    assert drawn.count(3) == 2, "the two fastest are drawn again"
    assert drawn[0] == 3 or drawn[1] == 3
    planned = [choice for choice in made["choices"] if choice["simulated_steps_ns"]]
    assert {c["layout"] for c in planned} == {c["layout"] for c in made["choices"]}, (
        "the best of each layout is planned"
    )
    fastest = min(c["simulated_ns"] for c in planned)
    assert 0 in drawn, "what is far slower as solved is not"
    assert all(c["step_ns"] > 1.2 * fastest for c in made["choices"] if c not in planned)
    for choice in planned:
        times, waves = choice["simulated_steps_ns"], choice["simulated_waves"]
        assert len(times) == len(waves)
        assert choice["simulated_ns"] == pytest.approx(sum(times) / len(times), abs=1)
        assert choice["spread_percent"] == pytest.approx(100 * (max(times) - min(times)) / choice["simulated_ns"])
    assert any(len(set(c["simulated_steps_ns"])) > 1 for c in planned), "each draw has other samples"
    assert any(set(c["simulated_waves"]) != {c["waves"]} for c in planned), "planned waves, not solved ones"
    assert main([*asked, "--gpus", "8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "as planned, over 3 steps of different samples of the fastest two, one of the others" in shown
    assert main([*asked, "--gpus", "8", "--steps", "2"]) == 0
    assert "as planned, over 2 steps of different samples" in capsys.readouterr().out


def test_on_large_clusters_the_best_of_each_layout_is_planned_once(
    capsys: pytest.CaptureFixture[str], sizes: Path
) -> None:
    asked = (*MODEL, "--sizes", sizes, "--seq-len", 4096, "--global-batch", 96, "--gpus", 136)
    choices = found(capsys, *asked)["choices"]
    layouts = [c["layout"] for c in choices]
    assert sorted(layouts) == sorted({c["layout"] for c in found(capsys, *asked, "--steps", 0)["choices"]})
    fastest = min(c["simulated_ns"] for c in choices if c["simulated_steps_ns"])
    for choice in choices:
        hopeless = choice["step_ns"] > 1.25 * fastest
        assert len(choice["simulated_steps_ns"]) == (0 if hopeless else 1)


def test_neither_help_nor_solving_loads_torch(sizes: Path) -> None:
    arguments = [*MODEL, "--gpus", "8", "--sizes", str(sizes)]
    for given in (["--help"], arguments):
        code = f"""
import sys
from trainclient.__main__ import main
sys.argv = ["trainclient", "orchestrate", *{given!r}]
try:
    main()
except SystemExit:
    pass
sys.exit("torch" in sys.modules)"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "pipelined" in done.stdout or "--backbone" in done.stdout


def test_a_file_holds_the_same_options(capsys: pytest.CaptureFixture[str], tmp_path: Path, sizes: Path) -> None:
    config = tmp_path / "problem.yaml"
    config.write_text(
        yaml.safe_dump({"encoder": "tiny", "backbone": "tiny", "gpus": 4, "sizes": str(sizes), "steps": 0})
    )
    from_file = found(capsys, "--config", config)
    assert from_file["cluster"]["gpus"] == 4
    assert from_file["choices"][0]["simulated_ns"] is None
    assert found(capsys, "--config", config, "--gpus", 8)["cluster"]["gpus"] == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--gpus", 12), "12 GPUs are no whole number of nodes of 8; use 8 of them"),
        (("--gpu", "v100"), "there is no GPU kind named 'v100'; choose one of a800, h100, h200"),
        (("--memory-gb", 0), "memory-gb is 0.0; a number from 0.001"),
        (("--backbone", "llama9"), "there is no backbone named 'llama9'; give one of llama3-13b"),
        (("--backbone", "llama3-70b"), "does not fit 8 h100 with 72.0 GB for modules: each would need"),
        (("--backbone", "llama3-7b", "--memory-gb", 0.5), "colocated: does not fit 8 h100 with 0.5 GB for modules:"),
        (("--frozen", "tower"), "--frozen names ['tower']; the model has ['encoder', 'backbone', 'generator']"),
        (("--frozen", "encoder", "backbone", "generator"), "nothing would be trained"),
        (("--seq-len", 100), "tokens with the marks around them; seq-len is 100: raise it to "),
        (("--merge", 3), "a sample has an image of 256 patches; multiples of merge^2 = 9 are required"),
        (("--generation", 1.5), "generation is 1.5"),
        (("--generation", 0), "--generator has nothing to do"),
        (("--sizes", "nowhere.json"), "nowhere.json cannot be read"),
        (("--image-tower", "vit-h", "--generation", 0), "two towers, --image-tower and --text-tower; give both"),
        (("--image-tower", "vit-h", "--text-tower", "tiny", "--generation", 0), "leave --encoder, --backbone"),
        (("--gpus", -1), "--gpus: Input should be greater than or equal to 1"),
        (("--global-batch", 1 << 21), "global_batch: found 2097152; it should be less than or equal to 1048576"),
        (("--config", "nowhere.yaml"), "--config nowhere.yaml cannot be read"),
        (("--genration", 3), "--genration is unknown; did you mean --generation?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], sizes: Path, given: tuple[object, ...], said: str
) -> None:
    arguments = [*MODEL, "--gpus", 8, "--sizes", sizes, *given]
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_file_with_what_is_no_option_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "problem.yaml"
    for content, said in (("gpuz: 3", "gpuz"), ("gpus: many", "gpus"), ("[1]", "cannot be used")):
        config.write_text(content)
        assert main(["--config", str(config)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "pydantic" not in error


def test_what_is_no_list_of_sizes_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    for content, said in (
        ("[]", "holds no list `samples`"),
        ("{", "cannot be used"),
        ('{"samples": [{"count": 0, "text_tokens": 3}]}', "count (1 or more)"),
        ('{"samples": [{"count": true, "text_tokens": 3}]}', "all integers"),
        ('{"samples": [{"texttokens": 3}]}', "count (1 or more)"),
        ('{"samples": [{"count": 3}]}', "neither text nor images"),
    ):
        file.write_text(content)
        assert main(["--backbone", "tiny", "--sizes", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_trainclient_knows_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trainclient", "orchestrate"])
    assert whole() == 2
    assert "--sizes is missing" in capsys.readouterr().err


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_full_disk_leaves_the_files_that_are_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sizes: Path
) -> None:
    arguments = [*MODEL, "--gpus", "8", "--steps", "0", "--sizes", str(sizes)]
    with small_disk(tmp_path / "disk") as disk:
        for name in ("job.yaml", "choices.png"):
            (disk / name).write_text("precious")
        fill(disk)
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        (disk / "folder").mkdir()
        for flag, name, reason in (
            ("--output", "job.yaml", "No space left on device"),
            ("--plot", "choices.png", "No space left on device"),
            ("--output", "folder", "Is a directory"),
        ):
            assert main([*arguments, flag, str(disk / name)]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"trainclient: {flag} {disk / name} cannot be written ({reason}); name a file in a")
            assert error.count("\n") == 1
        (disk / "folder").rmdir()
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before
