"""Makes demo shards of audio or of videos with captions, offline.

Clips are rising tones in noise; videos pan over the photographs that scikit-image carries. Lengths are log-normal:
clips around 3 seconds (up to 12), videos around 2 (up to 8) at 8 frames a second. Same arguments, same bytes.
"""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from make_demo_shards import SUBJECTS, WORDS, read_photographs
from PIL import Image

RATE = 16_000
FPS = 8
SAMPLES = 150
SHARDS = 3
SUFFIXES = {"audio": "flac", "video": "mp4"}


def draw_seconds(rng: np.random.Generator, middle: float, longest: float) -> float:
    """Log-normal around the middle."""
    return float(np.clip(middle * np.exp(rng.normal(0, 0.7)), 0.5, longest))


def draw_clip(rng: np.random.Generator) -> bytes:
    """A FLAC of one channel."""
    import soundfile

    times = np.arange(int(draw_seconds(rng, 3, 12) * RATE)) / RATE
    tone = np.sin(2 * np.pi * rng.uniform(100, 800) * times * (1 + rng.uniform(0, 0.2) * times))
    file = io.BytesIO()
    soundfile.write(file, 0.3 * tone + 0.02 * rng.standard_normal(len(times)), RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def draw_video(rng: np.random.Generator, photograph: Image.Image) -> bytes:
    """An MP4 in which a window moves over a photograph."""
    import av

    width, height = (16 * int(rng.integers(6, most)) for most in (21, 16))
    frames = max(1, int(draw_seconds(rng, 2, 8) * FPS))
    picture = photograph.resize((2 * width, 2 * height))
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=FPS, options={"preset": "ultrafast", "x264-params": "log=0"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for number in range(frames):
            left, top = width * number // frames, height * number // frames
            window = np.asarray(picture.crop((left, top, left + width, top + height)))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(window, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def draw_caption(rng: np.random.Generator, subject: str) -> str:
    """Up to 20 words: captions are shorter than what they describe."""
    words = rng.integers(0, len(WORDS), int(rng.integers(2, 16)))
    return " ".join([subject, *(WORDS[i] for i in words)])


def write_shard(file: Path, modality: str, count: int, seed: tuple[int, int]) -> None:
    """One tar."""
    rng = np.random.default_rng(seed)
    photographs = read_photographs() if modality == "video" else []
    with webdataset.TarWriter(str(file), mtime=0) as tar:
        for number in range(count):
            which = int(rng.integers(len(SUBJECTS)))
            subject = SUBJECTS[which] if photographs else "a rising tone"
            data = draw_video(rng, photographs[which]) if photographs else draw_clip(rng)
            key = f"{file.stem}{number:04d}"
            tar.write({"__key__": key, SUFFIXES[modality]: data, "txt": draw_caption(rng, subject)})


def make_media(folder: Path, modality: str) -> Path:
    """Write all shards of a modality below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(SHARDS):
        print(f"shard {shard + 1} of {SHARDS}", flush=True)
        write_shard(folder / f"{shard:05d}.tar", modality, SAMPLES // SHARDS, ([*SUFFIXES].index(modality), shard))
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modality", choices=SUFFIXES)
    parser.add_argument("folder", type=Path, help="where the shards go")
    given = parser.parse_args()
    make_media(given.folder, given.modality)
    print(f"{SAMPLES} samples in {SHARDS} shards below {given.folder}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
