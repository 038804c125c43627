"""The jobs of the README and of the page on training as people write them, and what they are filled in from."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dataserver.jobs import Catalog
from dataserver.planning.job.fields.text import parse_yaml

ROOT = Path(__file__).resolve().parents[2]

FINGERPRINT, QUARANTINE = "a" * 64, "b" * 64


def readme_job() -> Any:
    """The values of the README's job.yaml."""
    return _jobs_of(ROOT / "README.md")[0]


def chats_job() -> Any:
    """The values of chats.yaml on the page on training."""
    return _jobs_of(ROOT / "docs" / "training.md")[0]


def _jobs_of(page: Path) -> list[Any]:
    """The values of the whole jobs on a page."""
    found = re.findall(r"```yaml\n(stream:.*?)```", page.read_text(), re.DOTALL)
    return [parse_yaml(text.encode()) for text in found]


def tokenizer(name: str, vocab_size: int) -> Any:
    return SimpleNamespace(name=name, digest=name[:1].encode().hex()[:1] * 64, vocab_size=vocab_size)


def dataset(fingerprint: str, quarantine: Any = None) -> Any:
    """Without earlier sets of shards."""
    found = SimpleNamespace(fingerprint=fingerprint, quarantine=quarantine)
    found.as_it_was = lambda wanted: found if wanted == fingerprint else None
    return found


def catalog(*tokenizers: str) -> Catalog:
    """Three datasets, one with a quarantine list; `bytes`, and tokenizers of 32000 ids. No file lies behind them."""
    datasets: dict[str, Any] = {
        "laion": dataset(FINGERPRINT, SimpleNamespace(digest=QUARANTINE)),
        "x": dataset("0" * 64),
        "docs": dataset("c" * 64),
    }
    known = {"bytes": tokenizer("bytes", 256), **{name: tokenizer(name, 32_000) for name in tokenizers}}
    return Catalog(datasets, known)
