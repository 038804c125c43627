"""The package of docs/transforms.md: found, applied to a dataset and served, as the page says."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.jobs import compose, module
from serving.harness import running, tensors
from shards import write_pairs
from transforms.packages import write_package

from dataserver.cli import main
from dataserver.planning.job.fields import InstalledTransform
from dataserver.planning.job.fields.text import parse_yaml
from dataserver.transforms import TransformPool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/transforms.md").read_text()


def block(language: str, begins: str) -> str:
    """The block of the page that begins so."""
    (found,) = [part for part in PAGE.split(f"```{language}\n")[1:] if part.startswith(begins)]
    return found.partition("```")[0]


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(block("toml", "[project]"))["project"]
    return found


@pytest.mark.long
def test_the_package_of_the_page_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = project()
    points = {group.rpartition(".")[2]: values for group, values in about["entry-points"].items()}
    code = block("python", "import numpy")
    write_package(tmp_path / "packages", about["name"], about["version"], "photo_recipes", code, points)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    folder = write_pairs(tmp_path / "photos", 12, 12, median_size=70)
    flags = ["--transform", 'shape=1.0.0:{"least": 64}', "--transform", "tidy=1.0.0"]
    assert main(["index", str(folder), "--workers", "1", *flags]) == 0
    assert "0 samples left out" not in capsys.readouterr().out
    stream = parse_yaml(block("yaml", "datasets:").encode())
    data = compose(
        modules=[module("encoder", dp=1), module("backbone", dp=1)],
        seq_len=512,
        global_batch=1,
        packing={"enabled": False},
        sizing={"max_patches": 64},
        end={"epochs": 1},
        datasets=[{**entry, "filter": "portrait == true or portrait == false"} for entry in stream["datasets"]],
    )
    with running({"photos": folder}, transforms={"warmth": about["version"]}) as server:
        found = []
        for transforms in ([{"kind": "horizontal_flip", "probability": "0"}], stream["transforms"]):
            whole = data | {"stream": {**data["stream"], "transforms": transforms}}
            received = server.read(server.create(whole).job_id, "vit").microbatches
            found.append(np.concatenate([tensors(*one)["patches"].reshape(-1, 3) for one in received]).astype(int))
    assert len(found[0]) > 0
    changes = (found[1] - found[0])[:, 1]
    assert np.abs(changes).max() == 0, "green stays"
    assert 0 < np.abs(found[1] - found[0])[:, 0].max() <= 31


@pytest.mark.long
def test_pip_installs_the_package_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With setuptools of this environment, which is there to build nothing else."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/pyproject.toml").write_text(block("toml", "[project]"))
    (tmp_path / "source/photo_recipes.py").write_text(block("python", "import numpy"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", str(tmp_path / "target"), str(tmp_path / "source")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(tmp_path / "target"))
    pool = TransformPool.of(dict.fromkeys(("shape", "tidy", "warmth"), project()["version"]))
    pool.check()
    wanted = InstalledTransform(name="tidy", version="1.0.0", options={"lower": True})
    assert [one.text for one in pool.texts(["A  cat\n on a MAT"], wanted)] == ["a cat on a mat"]
    pool.close()
