"""The pages: what they link to is there, their commands have the options that they use, and their Python compiles."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BESIDE_CODE = ("protos/golden", "scripts/benchmarks", "trainclient/clients/node")
PAGES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / folder / "README.md" for folder in BESIDE_CODE))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|-m )(dataserver|trainclient) ([a-z]+)\b(.*)")


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of ours in blocks and in the text of a page, each with its arguments."""
    inline = re.findall(r"`([^`]+)`", BLOCK.sub("", page.read_text()))
    return [*block_commands(page), *_parsed(" ".join(text.split()) for text in inline)]


def block_commands(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of ours in blocks of a page: to be given as they are, unless they have `...`."""
    blocks = [text.replace("\\\n", " ") for _, language, text in BLOCK.findall(page.read_text()) if not language]
    return _parsed(line for block in blocks for line in block.splitlines())


def _parsed(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    found = [COMMAND.search(line.strip()) for line in lines]
    return [(f"{m[1]} {m[2]}", shlex.split(m[3].rstrip(" &"), comments=True)) for m in found if m and "]" not in m[3]]


def options() -> dict[str, set[str]]:
    """The options of each command, from the reference."""
    sections = re.split(r"^## ", (ROOT / "docs/reference/cli.md").read_text(), flags=re.MULTILINE)[1:]
    return {text.partition("\n")[0]: set(re.findall(r"--[a-z][\w.-]*", text)) for text in sections}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    goals = [(page if not file else page.parent / file, anchor) for file, anchor in LINK.findall(text)]
    assert [f"{g}" for g, _ in goals if not g.exists()] == []
    assert [f"{g}#{a}" for g, a in goals if a and g.suffix == ".md" and a not in anchors(g)] == []


def test_commands_have_the_options_that_pages_use() -> None:
    known = options()
    used = {
        (page.name, command, argument.partition("=")[0])
        for page in PAGES
        if "internal" not in page.parts
        for command, arguments in commands(page)
        for argument in arguments
        if argument.startswith("--") and argument != "--help"
    }
    assert len(used) > 50
    assert sorted(use for use in used if use[2] not in known.get(use[1], set())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_compiles(page: Path) -> None:
    for _, language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            compile(text, page.name, "exec")


def test_what_proves_a_claim_is_there() -> None:
    named = set(re.findall(r"`((?:tests/|scripts/|test_)[\w/.]+)", (ROOT / "docs/evidence.md").read_text()))
    tests = [(path.name, path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(named) > 30
    lost = [
        name
        for name in named - {"scripts/bench_"}
        if not (ROOT / name).exists()
        if not any(name == file or re.search(rf"^def {name}\(", text, re.MULTILINE) for file, text in tests)
    ]
    assert lost == []


def test_the_glossary_is_short_and_sorted() -> None:
    rows = re.findall(r"^\| (\w[^|]*?) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    words = rows[1:]  # the first is the heading of the table
    assert 30 < len(words) <= 40
    assert words == sorted(words)
