"""The decision table of docs/layouts.md is what its script makes."""

import sys

import pytest
from decide_layouts import BEGIN, CLUSTERS, END, PAGE, SIZES, main


def test_the_page_has_a_row_for_each_case() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    for about in SIZES:
        for where in CLUSTERS:
            (row,) = (line for line in table.splitlines() if line.startswith(f"| {about} | {where} |"))
            assert row.count("**") == 2


@pytest.mark.long
def test_the_table_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decide_layouts.py", "--check"])
    assert main() == 0
