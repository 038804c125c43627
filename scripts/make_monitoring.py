#!/usr/bin/env python
"""Writes deploy/grafana and deploy/prometheus: the dashboard and the alert rules, from scripts/monitoring."""

from pathlib import Path
from typing import Final

from monitoring.rendering import files

ROOT: Final = Path(__file__).parents[1]


def main() -> None:
    """Write the dashboard and the alert rules."""
    for name, text in files().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
