"""The card of a dataset as rows of text with bars, for terminals and pages alike."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dataserver.dataset import KINDS, OWN, printable
from dataserver.jobs import ColumnCard, DatasetCard, Drops, Histogram

_BAR: Final = 24
"""Characters of the longest bar."""
_LONGEST: Final = 400
"""Characters of a filter that are shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line: what it is of, a value, and a share that a bar shows."""

    label: str
    value: str = ""
    share: float | None = None
    """Length as a share of the longest bar, 0 to 1."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Some lines below a title."""

    title: str
    rows: tuple[Row, ...]


def card_sections(card: DatasetCard, findings: Mapping[str, int]) -> Iterator[Section]:
    """Yield the sections of a card.

    Args:
        card: the card.
        findings: counts by kind.
    """
    yield Section("Dataset", tuple(_facts(card)))
    for histogram in card.histograms:
        yield _histogram(histogram)
    if card.columns:
        rows = [Row(_column(c), ", ".join(c.types), *_share(c.num_nulls, card.num_samples)) for c in card.columns]
        yield Section("Columns, and their share of nulls", tuple(rows))
    if findings:
        listed = sorted(findings.items(), key=lambda item: (KINDS[item[0]], item[0]))
        yield Section("Findings", tuple(Row(kind, f"{count:,}", note=KINDS[kind]) for kind, count in listed))
    for number, drops in enumerate(card.filters, 1):
        title = "What the filter drops" if len(card.filters) == 1 else f"What filter {number} drops"
        yield Section(title, tuple(_dropped(part, card.num_samples, n) for n, part in enumerate(drops)))


def bars(section: Section, width: int) -> Iterator[str]:
    """Yield the lines of a section, none wider than `width` characters unless a word alone is."""
    values, notes = (max((len(cell) for cell in cells), default=0) for cells in _cells(section))
    has_bars = any(row.share is not None for row in section.rows)
    room = width - 2 - sum(2 + part for part in (values, _BAR * has_bars, notes) if part)
    labels = max((len(row.label) for row in section.rows if len(row.label) <= room), default=0)
    for row in section.rows:
        label = row.label
        if len(label) > labels:  # above its numbers
            yield from textwrap.wrap(label, width - 2, initial_indent="  ", subsequent_indent="      ")
            label = ""
        bar = "" if row.share is None else _bar(row.share).ljust(_BAR)
        cells = [row.value.rjust(values)] * bool(values) + [bar] * has_bars + [row.note]
        yield f"  {'  '.join([label.ljust(labels), *cells])}".rstrip()


def _cells(section: Section) -> tuple[list[str], list[str]]:
    return [row.value for row in section.rows], [row.note for row in section.rows]


def _facts(card: DatasetCard) -> Iterator[Row]:
    yield Row("fingerprint", note=card.fingerprint)
    yield Row("shards", note=f"{card.num_shards:,} ({_bytes(card.num_bytes)})")
    forms = ", ".join(f"{form}: {count:,}" for form, count in card.forms.items())
    yield Row("samples", note=f"{card.num_samples:,}" + (f" ({forms})" if forms else ""))
    yield Row("images", note=f"{card.num_images:,}")
    for caption, tokens in card.tokens.items():
        yield (
            Row("tokens", note=f"{tokens:,}")
            if caption == OWN
            else Row(f"caption {caption}", note=f"{tokens:,} tokens")
        )
    if card.quarantined:
        yield Row("quarantined", note=f"{card.quarantined:,} of the samples")
    if card.transformed_out:
        yield Row("left out", note=f"{card.transformed_out:,} of the samples, by transforms")


def _column(column: ColumnCard) -> str:
    made_by = f" ({printable(column.made_by)})" if column.made_by else ""
    return printable(column.name) + made_by


def _histogram(histogram: Histogram) -> Section:
    bins = histogram.bins()
    most = max(count for _, _, count in bins)
    title = f"{histogram.name}: {histogram.smallest:,} to {histogram.largest:,}, mean {histogram.mean:,.1f}"
    rows = [
        Row(f"{first:,}" if first == last else f"{first:,} - {last:,}", f"{count:,}", count / most)
        for first, last, count in bins
    ]
    return Section(title[0].upper() + title[1:], tuple(rows))


def _dropped(drops: Drops, num_samples: int, number: int) -> Row:
    text = printable(drops.text, _LONGEST)
    label = text if number == 0 else f"alone: {text[1:-1]}"
    share, note = _share(drops.num_dropped, num_samples)
    nulls = f", {drops.num_null:,} for a null" if drops.num_null else ""
    return Row(label, f"{drops.num_dropped:,}", share, note + nulls)


def _share(count: int, whole: int) -> tuple[float, str]:
    """The share for a bar, and in words: only nothing is 0 %, and only all is 100 %."""
    share = count / max(whole, 1)
    if 0 < share < 0.0005:
        return share, "< 0.1 %"
    return (share, "> 99.9 %") if 0.9995 <= share < 1 else (share, f"{100 * share:.1f} %")


def _bar(share: float) -> str:
    """At least a dot where there is anything."""
    full = round(share * _BAR)
    return "#" * full if full or not share else "."


def _bytes(number: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:,.1f} TiB"
