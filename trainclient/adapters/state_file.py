"""The state of a stream in a file of its own, beside what a framework writes into a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataserver.outputs import write_whole

STATE_FILE = "data_state.json"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Put a stream's state there, as a whole or not at all; the folder is made if it is missing.

    Several processes may do so at once: with Megatron each that reads as the first data-parallel rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / STATE_FILE, json.dumps(state))


def read_state(folder: Path, otherwise: str) -> dict[str, Any]:
    """The state that was put there; ValueError if there is none, which says what to do otherwise."""
    try:
        found = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} says nothing of the stream ({STATE_FILE}: {error}); it was cut short, or written without this "
            f"adapter: {otherwise}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{folder / STATE_FILE} holds {type(found).__name__}, a mapping is required: {otherwise}")
    return found
