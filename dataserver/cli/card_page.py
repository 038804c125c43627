"""The card of a dataset as one HTML page, with nothing to fetch."""

from collections.abc import Sequence
from html import escape
from typing import Final

from dataserver.cli.pages import STYLE
from dataserver.jobs import DatasetCard
from dataserver.reporting.card_sections import Row, Section

_STYLE: Final = (
    STYLE
    + """.bar { min-width: 14rem; text-align: left; } .bar div { background: #4878a8; height: .8em; min-width: 1px; }
td:nth-child(n+4) { text-align: left; } td:first-child { overflow-wrap: anywhere; max-width: 40rem; }
"""
)


def card_page(title: str, card: DatasetCard, sections: Sequence[Section]) -> str:
    """Return the card as the HTML of a page."""
    facts = f"{card.num_samples:,} samples, shards: {card.num_shards:,}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<p>{escape(facts)}</p>\n"
        f'<div class="tables">{"".join(map(_section, sections))}</div></body></html>\n'
    )


def _section(section: Section) -> str:
    has_bars = any(row.share is not None for row in section.rows)
    body = "".join(_row(row, has_bars) for row in section.rows)
    return f"<section><h2>{escape(section.title)}</h2><table>{body}</table></section>\n"


def _row(row: Row, has_bars: bool) -> str:
    bar = "" if not row.share else f'<div style="width: {100 * row.share:.1f}%"></div>'
    cells = [f"<td>{escape(row.label)}</td>", f"<td>{escape(row.value)}</td>"]
    cells += [f'<td class="bar">{bar}</td>'] if has_bars else []
    return f"<tr>{''.join(cells)}<td>{escape(row.note)}</td></tr>"
