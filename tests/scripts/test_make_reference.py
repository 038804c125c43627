"""docs/reference says what schema, protos and help say."""

import pytest
from make_reference import FOLDER, pages


def test_the_reference_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name, text in pages().items():
        assert (FOLDER / name).read_text() == text, f"{name} is not up to date; run scripts/generate_stubs"


def test_help_shows_no_empty_default() -> None:
    text = (FOLDER / "cli.md").read_text()
    assert "(default: 14)" in text
    assert "(default: )" not in text
    assert "(default: '')" not in text
