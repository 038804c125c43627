"""The pages: what they link to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    goals = [(page if not file else page.parent / file, anchor) for file, anchor in LINK.findall(text)]
    assert [f"{g}" for g, _ in goals if not g.exists()] == []
    assert [f"{g}#{a}" for g, a in goals if a and g.suffix == ".md" and a not in anchors(g)] == []
