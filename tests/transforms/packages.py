"""Packages with transforms, as pip would leave them in a folder: modules, and a dist-info that names entry points."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

PIXELS = """
    import os, signal, subprocess, sys, time
    import numpy as np

    def tint(pixels, words, options):
        rng = np.random.Generator(np.random.Philox(key=list(words[:2])))
        added = rng.integers(0, int(options.get("most", 40)), 3)
        return np.clip(pixels + added, 0, 255).astype(np.uint8)

    def raises(pixels, words, options):
        raise ValueError("no such colour")

    def crops(pixels, words, options):
        return pixels[:, 1:]

    def floats(pixels, words, options):
        return pixels / 255

    def nothing(pixels, words, options):
        return None

    def sleeps(pixels, words, options):
        time.sleep(600)

    def spins(pixels, words, options):
        while True:
            pass

    def dies(pixels, words, options):
        os.kill(os.getpid(), signal.SIGSEGV)

    def eats(pixels, words, options):
        return np.ones((1 << 33) + len(pixels), np.uint8)

    def forks(pixels, words, options):
        os.fork()
        return pixels + 1

    def leaves(pixels, words, options):
        command = "import time, os; os.setsid(); os.path.exists('/'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", command])
        time.sleep(600)

    def prints(pixels, words, options):
        print('{"bytes": 1, "cpu_ns": 1}')
        os.write(1, b"noise")
        return 255 - pixels

    def variables(pixels, words, options):
        raise ValueError(sorted(os.environ))

    def no_file(pixels, words, options):
        raise OSError(24, "Too many open files")

    def no_thread(pixels, words, options):
        raise RuntimeError("can't start new thread")

    class Mute(Exception):
        def __str__(self):
            raise KeyError("message")

    def mute(pixels, words, options):
        raise Mute

    def exits(pixels, words, options):
        sys.exit(3)

    def forges(pixels, words, options):
        raise ValueError("a\\nERROR all is lost")

    def starts(pixels, words, options):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return pixels

    def leaves_and_dies(pixels, words, options):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.kill(os.getpid(), signal.SIGKILL)

    counter = 0

    def counts(pixels, words, options):
        global counter
        counter += 1
        return pixels + np.uint8(counter)
"""
TEXT = """
    import os

    EXTRA = 0

    def shout(text, options):
        if text == options.get("secret"):
            raise ValueError("it is secret")
        return "A" * EXTRA + text.upper() + str(options.get("end", ""))

    def once(text, options):
        return f"{text} {os.getpid()}"

    def bytes_of(text, options):
        return text.encode()
"""
METADATA = """
    import time
    import pyarrow as pa

    EXTRA = 0

    def lengths(table, options):
        texts = table.column("texts")
        length = [sum(map(len, row)) for row in texts.to_pylist()]
        length = [found + EXTRA for found in length]
        keep = [found >= options.get("least", 0) for found in length]
        return pa.table({"length": pa.array(length, pa.int64()), "keep": pa.array(keep)})

    def drifts(table, options):
        return pa.table({"when": pa.array([time.time_ns()] * table.num_rows)})

    def fewer(table, options):
        return table.slice(1)
"""


def write_package(
    folder: Path, name: str, version: str, module: str, code: str, points: Mapping[str, Mapping[str, str]]
) -> None:
    """Write a package of one module.

    Args:
        folder: as `pip install --target` takes it.
        name: of the package.
        version: of the package.
        module: its name.
        code: its text.
        points: by kind, values by names of entry points.
    """
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for kind, values in points.items():
        lines += [f"[disttrain.transforms.{kind}]", *(f"{point} = {value}" for point, value in values.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{module}.py").write_text(dedent(code))


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Install packages of all three kinds for the time of a test or module."""
    for name, version, code, kind, points in (
        ("tints", "1.2.0", PIXELS, "pixels", [
            "tint", "raises", "crops", "floats", "nothing", "sleeps", "spins", "dies", "eats", "forks", "leaves",
            "prints", "variables", "counts", "no_file", "no_thread", "mute", "exits", "forges", "starts",
            "leaves_and_dies",
        ]),
        ("shouts", "3.1", TEXT, "text", ["shout", "once", "bytes_of"]),
        ("tables", "0.4", METADATA, "metadata", ["lengths", "drifts", "fewer"]),
    ):  # fmt: skip
        module = f"disttrain_test_{name}"
        write_package(folder, name, version, module, code, {kind: {point: f"{module}:{point}" for point in points}})
    monkeypatch.syspath_prepend(str(folder))
