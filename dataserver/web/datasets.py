"""The page of a dataset as JSON: its card, its findings, and its samples by key, filter or size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from dataserver.dataset import KINDS, Dataset, LintReport, Progress, TokensMissingError, lint, printable
from dataserver.jobs import Catalog, dataset_card
from dataserver.reporting.card_sections import card_sections
from dataserver.web.background import Background
from dataserver.web.server import Query, RequestError

MAX_FINDINGS: Final = 20_000
"""Findings that are listed; all are counted."""
PAGE: Final = 100
"""Most findings in one answer."""
MAX_NAME_CHARS: Final = 256

Fingerprints = Callable[[], Mapping[str, str]]
"""The datasets that may be shown, by name, with the fingerprint that servers have."""


@dataclass(frozen=True, slots=True)
class LocalData:
    """Datasets and tokenizers of this machine, and where the datasets lie."""

    catalog: Catalog
    paths: Mapping[str, Path]
    index_dirs: Mapping[str, Path]


NO_DATASETS: Final = LocalData(Catalog({}, {}), {}, {})


class DatasetPages:
    """The datasets of this machine that may be shown. Thread-safe."""

    def __init__(
        self, local: LocalData, work: Background, listed: Fingerprints | None, *, counts_withheld: bool = True
    ) -> None:
        """Show datasets.

        Args:
            local: the datasets.
            work: does what takes longer.
            listed: says which of them may be shown; None where all may be.
            counts_withheld: whether to say how many may not be.
        """
        self._counts_withheld = counts_withheld
        self._local, self._work, self._listed = local, work, listed
        self._datasets = local.catalog.datasets

    def names(self, _query: Query) -> dict[str, Any]:
        """The datasets, and how many more there are that may not be shown."""
        listed = None if self._listed is None else self._listed()
        shown = [name for name in sorted(self._datasets) if listed is None or name in listed]
        found = [
            {
                "name": name,
                "fingerprint": self._datasets[name].fingerprint,
                "of_servers": None if listed is None else printable(listed[name], 64),
                "shards": len(self._datasets[name].shards),
                "samples": sum(shard.num_samples for shard in self._datasets[name].shards),
            }
            for name in shown
        ]
        return {"datasets": found, "withheld": len(self._datasets) - len(found) if self._counts_withheld else 0}

    def named(self, query: Query) -> tuple[str, Dataset]:
        """The dataset that a request names.

        Raises:
            RequestError: it is not here, or may not be shown, which sounds the same.
        """
        name = query.get("dataset", "")
        dataset = self._datasets.get(name)
        if dataset is None or (self._listed is not None and name not in self._listed()):
            raise RequestError(f"no dataset is named {printable(name, MAX_NAME_CHARS)!r}", HTTPStatus.NOT_FOUND)
        return name, dataset

    def card(self, query: Query) -> dict[str, Any]:
        """The sections that `dataserver describe` prints, but for findings, once they are worked out."""
        name, dataset = self.named(query)
        return self._work.ask(("card", name), lambda progress: list(self._sections(dataset, progress)))

    def findings(self, query: Query) -> dict[str, Any]:
        """Counts by kind, and a page of the findings of one kind, or of all."""
        name, _ = self.named(query)
        kind, first = query.get("kind", ""), number(query, "first", 0, MAX_FINDINGS)
        if kind and kind not in KINDS:
            raise RequestError(f"kind is {printable(kind, 64)!r}; one of {', '.join(sorted(KINDS))} is required")
        answer = self._work.ask(("findings", name), lambda progress: self._lint(name, progress))
        return {"found": _page(answer["found"], kind, first)} if "found" in answer else answer

    def _lint(self, name: str, progress: Progress) -> LintReport:
        return lint(
            self._local.paths[name],
            self._local.index_dirs.get(name),
            progress=progress,
            max_listed=MAX_FINDINGS,
            wants_quarantine=False,
        )

    def _sections(self, dataset: Dataset, progress: Progress) -> Iterator[dict[str, Any]]:
        for section in card_sections(self._card(dataset, progress), {}):
            yield {"title": section.title, "rows": [asdict(row) for row in section.rows]}

    def _card(self, dataset: Dataset, progress: Progress) -> Any:
        """The card by the tokens of the first tokenizer that was counted; a file's before the built-in one."""
        missing: TokensMissingError | None = None
        for tokenizer in reversed(tuple(self._local.catalog.tokenizers.values())):
            try:
                return dataset_card(dataset, tokenizer, [], progress)
            except TokensMissingError as error:
                missing = missing or error
        raise missing or RequestError("no tokenizer is named; add --tokenizer NAME=FILE")


def number(query: Query, name: str, default: int, most: int) -> int:
    """A field that is an integer from 0.

    Raises:
        RequestError: it is none, or larger than `most`.
    """
    text = query.get(name, "") or str(default)
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) <= most):
        raise RequestError(f"{name} is {printable(text, 40)!r}; an integer from 0 to {most} is required")
    return int(text)


def _page(report: LintReport, kind: str, first: int) -> dict[str, Any]:
    fitting: Sequence[Any] = [f for f in report.findings if not kind or f.kind == kind]
    return {
        "counts": [{"kind": k, "count": n, "effect": KINDS[k]} for k, n in report.counts.items()],
        "listed": len(fitting),
        "unlisted": report.num_unlisted,
        "first": first,
        "findings": [
            {**{name: printable(text, 512) for name, text in asdict(f).items()}, "effect": KINDS[f.kind]}
            for f in fitting[first : first + PAGE]
        ],
    }
