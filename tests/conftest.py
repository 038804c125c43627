"""Fixtures that every part of the suite uses."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from loaders.installing import install, python_of

EXAMPLES_PERCENT = float(os.environ.get("DISTTRAIN_TEST_EXAMPLES", 15))
"""The share of its examples that a Hypothesis test tries. `scripts/test --long` and `scripts/mutate` try all."""
FEWEST_EXAMPLES = 12
FUZZ_S = 10.0
"""How long fuzzing takes where all examples are tried: of requests, and of each kind of file."""
# No test asserts on time: machines are shared, and a first call may compile a kernel.
settings.register_profile("disttrain", deadline=None)
settings.load_profile("disttrain")

# A shell starts what runs in its background deaf to Ctrl-C, and children inherit that; tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(os.environ.get("DISTTRAIN_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
"""Where the data sets for development lie. They are not part of the repository."""
DATA_SETS = ("flexsp", "interleaved-mini", "laion-mini")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for garbage neither while thousands of tests are imported nor, later on, in what that has left."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests first: with whole files dealt out, the processes of pytest-xdist then end together."""
    for test in {getattr(item, "function", None) for item in items}:
        if getattr(test, "is_hypothesis_test", False):
            _try_a_share(test)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def _try_a_share(test: Any) -> None:
    """Have a Hypothesis test try its share of the examples it asks for.

    Hypothesis has no public way to change the settings of a decorated test; its own plugin of pytest reads this
    attribute, too.
    """
    asked = getattr(test, "_hypothesis_internal_use_settings", settings.get_profile("disttrain"))
    share = max(FEWEST_EXAMPLES, round(asked.max_examples * EXAMPLES_PERCENT / 100))
    if share < asked.max_examples:
        test._hypothesis_internal_use_settings = settings(asked, max_examples=share)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `tests/fuzz/` and `tests/adapters/`. Here, because pytest asks no deeper folder for options."""
    group = parser.getgroup("fuzzing")
    seconds = FUZZ_S * EXAMPLES_PERCENT / 100
    group.addoption("--fuzz-seconds", type=float, default=seconds, help="for requests, and for each kind of file")
    group.addoption("--fuzz-seed", type=int, default=0, help="another seed tries other inputs")
    group.addoption("--fuzz-blob", default="", help="try only the input of a @reproduce_failure that a test printed")
    parser.addoption("--install", action="store_true", help="install frameworks that long tests want")
    parser.addoption(
        "--torch-python", action="append", default=[], help="interpreter of an environment with another torch"
    )


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Let nothing but references keep objects alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of all development data sets: real photographs, documents and text lengths. Skips where it is not."""
    missing = [name for name in DATA_SETS if not (DATA / name).is_dir()]
    if missing:
        pytest.skip(f"{DATA} has no {', '.join(missing)}; set DISTTRAIN_TEST_DATA to the folder of the data sets")
    return DATA


@pytest.fixture(scope="session")
def python_with(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The interpreter of a framework's environment; skips where it is not installed and --install was not given."""

    def found(environment: str) -> Path:
        if request.config.getoption("--install"):
            install(environment)
        python = python_of(environment)
        if python is None:
            pytest.skip(f"the environment {environment} is not installed; --install does")
        return python

    return found
