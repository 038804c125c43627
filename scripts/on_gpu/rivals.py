"""webdataset's loader beside a trainer that takes as long as ours did, and transformers' loop on the same backbone."""

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loaders.webdataset_loader import batches

from dataserver.planning.job.fields import MODELS
from on_gpu.preset import SMALL, Size
from on_gpu.processes import Ended, run_bounded
from on_gpu.telling import Given, Told, given, spread
from trainclient.modules.work import forward_flops
from trainclient.training.peak_flops import peak_flops

WARM_UP = 2
STEPS = 6


def rival_waits(shards: Path, images: int, busy_s: float, steps: int) -> list[float]:
    """Share of each step in which a trainer waits for webdataset's loader, which lives in its process, in percent.

    The trainer takes `images` a step, and is then busy for as long as ours was: it sleeps, so that the loader has all
    cores, as beside a GPU.
    """
    waits, loaded = [], batches(shards, "fast")
    for _ in range(steps + 1):
        begun, seen = time.perf_counter(), 0
        while seen < images:
            seen += next(loaded)
        waited = time.perf_counter() - begun
        time.sleep(busy_s)
        waits.append(100 * waited / (waited + busy_s))
    return waits[1:]


def rivals(asked: Given) -> None:
    """Both at once: one takes cores, the other one the device."""
    told, training = asked.told("rivals"), asked.told("training").data
    preset = training.get("preset")
    if preset is None:
        raise SystemExit("nothing was trained; run both stages in one call")
    size = SMALL if asked.small else Size(*preset)
    ours: list[dict[str, Any]] = next((v["steps"] for v in training["variants"].values() if v["steps"]), [])
    table = told.table("Rivals", "what", "least / median / largest", "ours")
    with ThreadPoolExecutor(1) as beside:
        trained = beside.submit(transformers_loop, asked, size)
        if ours:
            images = max(1, round(statistics.median(m["images"] for m in ours)))
            busy_s = statistics.median(m["seconds"] * (1 - m["data_wait_percent"] / 100) for m in ours)
            waits = rival_waits(asked.shards, images, busy_s, min(STEPS, max(2, round(asked.limit_s / 4 / busy_s))))
            told.data["webdataset_wait_percent"] = waits
            theirs = spread([m["data_wait_percent"] for m in ours], ".2f")
            table.rows.append(["webdataset in the trainer's process: wait, % of a step", spread(waits, ".2f"), theirs])
            told.save()
        tell_loop(told, table.rows, size, trained.result(), ours)
    told.save()


def transformers_loop(asked: Given, size: Size) -> Ended:
    """Its Trainer, in a process of its own."""
    device = "cpu" if asked.small else "cuda"
    script = Path(__file__).with_name("transformers_loop.py")
    command = [sys.executable, script, size.preset, size.layers, size.seq_len, size.sequences, device]
    log, steps = asked.work / "rivals-transformers.log", ["--steps", "3"] if asked.small else []
    return run_bounded([*command, *steps], asked.limit_s - 8, log, {})


def tell_loop(told: Told, rows: list[list[str]], size: Size, ended: Ended, ours: list[dict[str, Any]]) -> None:
    """Its steps, and its utilisation by our formula."""
    name = f"transformers' Trainer, {size.preset} with {size.layers} layers, no encoder, bfloat16 throughout"
    if ended.code != 0:
        rows.append([name, f"{ended.how}: {ended.tail(3)}", ""])
        return
    seconds = json.loads(ended.log.read_text().splitlines()[-1])[WARM_UP:]
    told.data["transformers_seconds"] = seconds
    rows.append([f"{name}: s a step", spread(seconds, ".3f"), spread([m["seconds"] for m in ours], ".3f")])
    peak = peak_flops(None, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if peak is not None:
        offsets = torch.arange(size.sequences + 1) * size.seq_len
        sizes = replace(MODELS["backbone"][size.preset], layers=size.layers)
        flops = 3 * forward_flops("backbone", sizes, offsets)
        shares = [100 * flops / (s * peak) for s in seconds]
        told.data["transformers_mfu_percent"] = shares
        mfu = [m["mfu_percent"] for m in ours if m["mfu_percent"] is not None]
        rows.append([f"{name}: MFU by our formula, %", spread(shares, ".1f"), spread(mfu, ".1f")])


if __name__ == "__main__":
    rivals(given(__doc__))
