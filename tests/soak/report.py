"""What a soak saw, and what of it should not have been."""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

SPARE_MIB: Final = 32
SPARE_FILES: Final = 16
SPARE_THREADS: Final = 64
"""What may come and go by chance: arenas, connections that are still closing, threads of pools."""
MANY: Final = 5000
"""Microbatches after which blocks of all servers have been read in every way there is."""


@dataclass(frozen=True)
class Usage:
    """What the first server, or this process with its readers, holds at a time."""

    at_s: float
    rss_mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process, began: float) -> "Usage":
        """Now."""
        rss = process.memory_info().rss / (1 << 20)
        return cls(time.monotonic() - began, rss, process.num_fds(), process.num_threads())


@dataclass
class Report:
    """What was seen."""

    seconds: float
    seed: int
    stall_s: float = 60.0
    """A reader that gets nothing for so long is stalled."""
    microbatches: int = 0
    wrong: list[str] = field(default_factory=list)
    """Microbatches whose digest was another one, and readers that ended with an error."""
    faults: dict[str, int] = field(default_factory=dict)
    stalls: int = 0
    longest_wait_s: float = 0.0
    """Between two microbatches of any reader."""
    image_bytes: dict[str, int] = field(default_factory=dict)
    """Of the S3 dataset, by what gave them to the servers that were running at the end."""
    server: list[Usage] = field(default_factory=list)
    readers: list[Usage] = field(default_factory=list)

    def growth(self, of: str) -> dict[str, float]:
        """By how much the least that `server` or `readers` held in the last third is above the median of the second.

        In MiB or counts; empty before there were three looks. What comes and goes with faults does not count, and the
        first third is left out: caches fill, and pools make their threads.
        """
        seen: list[Usage] = getattr(self, of)
        third = len(seen) // 3
        if not third:
            return {}
        before, after = seen[third : 2 * third], seen[2 * third :]
        return {
            name: min(getattr(usage, name) for usage in after) - statistics.median(getattr(u, name) for u in before)
            for name in ("rss_mib", "files", "threads")
        }

    def problems(self) -> list[str]:
        """What should not have been."""
        found = [*self.wrong[:10], *[f"{self.stalls} stalls"] * bool(self.stalls)]
        if self.microbatches >= MANY:
            found += [f"no byte came from {source}" for source, count in self.image_bytes.items() if not count]
        most = {"rss_mib": SPARE_MIB, "files": SPARE_FILES, "threads": SPARE_THREADS}
        for of in ("server", "readers"):
            grown = self.growth(of)
            found += [f"{of}: {name} grew by {grown[name]:.0f}" for name in grown if grown[name] > most[name]]
        return found

    def text(self) -> str:
        """As Markdown."""
        lines = [f"| {what} | {found} |" for what, found in self._rows()]
        verdict = "; ".join(self.problems()) or "nothing wrong"
        return "\n".join(["| what | seen |", "|---|---|", *lines, "", f"Verdict: {verdict}.", ""])

    def _rows(self) -> Iterator[tuple[str, str]]:
        lasted_s = self.server[-1].at_s if self.server else 0.0
        yield "seconds until the last look, seed", f"{lasted_s:.0f} of {self.seconds:.0f}, {self.seed}"
        yield "microbatches, all compared with an undisturbed run", f"{self.microbatches:,}"
        yield "faults", ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        sources = ", ".join(f"{count / 1e6:,.1f} from {source}" for source, count in self.image_bytes.items())
        yield "MB of images in S3, of the servers running at the end", sources or "not looked at"
        what = f"longest wait of a reader, stalls of {self.stall_s:.0f} s"
        yield what, f"{self.longest_wait_s:.1f} s, {self.stalls}"
        for of, who in (("server", "the server that was never killed"), ("readers", "the process of the readers")):
            seen: list[Usage] = getattr(self, of)
            ends = "; ".join(f"{usage.rss_mib:.0f}, {usage.files}, {usage.threads}" for usage in seen[:1] + seen[-1:])
            grown = ", ".join(f"{name} {value:+.1f}" for name, value in self.growth(of).items())
            yield f"{who}: MiB, files, threads at first and at last", ends or "not looked at"
            yield f"{who}: growth", grown or "too few looks"


def write_report(report: Report, path: Path) -> None:
    """Write the table, and beside it all that was looked at."""
    command = f"scripts/soak --minutes {report.seconds / 60:g} --seed {report.seed}"
    path.write_text(f"# Soak\n\n`{command}`\n\n{report.text()}")
    path.with_suffix(".json").write_text(json.dumps(asdict(report)))
