"""docs/reference says what schema, protos and help say."""

import pytest
from make_reference import FOLDER, pages


def test_the_reference_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name, text in pages().items():
        assert (FOLDER / name).read_text() == text, f"{name} is not up to date; run scripts/generate_stubs"
