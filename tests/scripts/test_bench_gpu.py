"""The benchmark of GPUs: what it would run where none is, and all of it in small on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_gpu import NOTHING_MEASURED, Row, rows
from on_gpu.preset import BYTES_OF_PARAMETER, SIZES, Size, fitting

from trainclient.models.backbone import BackboneStage
from trainclient.models.encoder import ImageEncoder
from trainclient.models.presets import backbone_config, encoder_config

BENCH = Path(__file__).parents[2] / "scripts" / "bench_gpu.py"
GIB = 1 << 30


def matrices(network: torch.nn.Module) -> int:
    return sum(p.numel() for name, p in network.named_parameters() if p.dim() == 2 and "layers." in name)


@pytest.mark.parametrize("size", [*SIZES, Size("tiny", 4, "tiny")])
def test_parameters_are_those_of_the_models(size: Size) -> None:
    with torch.device("meta"):
        backbone = BackboneStage(backbone_config(size.preset, 262, 0))
        encoder = ImageEncoder(encoder_config(size.encoder, 14, 2, 64))
    layers = len(backbone.layers)
    assert size.parameters == matrices(backbone) * size.layers // layers + matrices(encoder)


def test_the_largest_that_fits_is_taken() -> None:
    assert fitting(140 * GIB, 1) == SIZES[2]
    assert fitting(140 * GIB, 8) == SIZES[0]
    assert fitting(8 * GIB, 1) is None
    assert SIZES[0].bytes_on(1) == BYTES_OF_PARAMETER * SIZES[0].parameters


def test_rows_are_judged_by_their_targets() -> None:
    def steps(mfu: float, wait: float) -> list[dict[str, float]]:
        return [{"mfu_percent": mfu, "data_wait_percent": wait, "tokens_per_second": 1.0, "images_per_second": 1.0}] * 3

    def judged(found: list[Row]) -> list[bool | None]:
        return [row.reached for row in found]

    assert judged(list(rows(SIZES[2], steps(45.0, 0.9), judged=True))) == [True, True, None]
    assert judged(list(rows(SIZES[2], steps(44.9, 1.0), judged=True))) == [False, False, None]
    assert judged(list(rows(SIZES[2], steps(1.0, 9.0), judged=False))) == [None] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which it would take")
def test_without_a_gpu_it_says_what_it_would_run(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--records", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == NOTHING_MEASURED, ran.stderr
    assert ran.stdout.startswith("There is no GPU, so nothing is measured.")
    assert str(SIZES[0]) in ran.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--small", "--steps", "2", "--warm-up", "1", "--samples", "96"]
    ran = subprocess.run([*command, "--records", tmp_path], capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    (path,) = tmp_path.iterdir()
    assert path.name == "gpu-1x-cpu.md"
    text = path.read_text()
    for name in ("model FLOPs utilisation", "wait for data servers", "webdataset in the trainer's process", "tokens/s"):
        assert name in text
