"""Rewrites the assertions of all tests once, before several processes of pytest would each do it.

Pytest rewrites `assert` as it first imports a module of tests, and caches the code beside it. The processes of
pytest-xdist begin together and import all modules in the same order, so without a cache each of them rewrites
everything: 16 seconds of a core, which a fresh checkout would pay once for each process.

It calls functions that pytest has for itself. Where a release changes them, or nothing can be cached, it says so in a
line and pytest does all of it as ever; that this pytest takes what is cached, a test tells.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
_QUIET: Final[Any] = SimpleNamespace(trace=lambda _text: None)
_NO_CONFIG: Final[Any] = None
"""A configuration only says whether a hook hears of assertions that hold; ours has none."""


def modules(folder: Path) -> Iterator[Path]:
    """Yield the files whose assertions pytest rewrites: modules of tests, and `conftest.py`."""
    yield from sorted(folder.rglob("test_*.py"))
    yield from sorted(folder.rglob("conftest.py"))


def rewrite_module(module: Path) -> bool:
    """Cache the rewritten code of a module where pytest looks for it; return whether that was necessary.

    Raises:
        OSError: the cache cannot be written.
    """
    from _pytest.assertion import rewrite  # some releases may not have it

    cache = rewrite.get_cache_dir(module) / (module.name.removesuffix(".py") + rewrite.PYC_TAIL)
    if rewrite._read_pyc(module, cache) is not None:
        return False
    cache.parent.mkdir(parents=True, exist_ok=True)
    version, code = rewrite._rewrite_test(module, _NO_CONFIG)
    if not rewrite._write_pyc(_QUIET, code, version, cache):
        raise OSError(f"{cache} cannot be written; pytest would rewrite {module} in each of its processes")
    return True


def main() -> None:
    """Rewrite the assertions of all test modules."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TESTS
    found = list(modules(folder))
    try:
        with ProcessPoolExecutor() as pool:
            done = sum(pool.map(rewrite_module, found, chunksize=16))
    except Exception as error:  # whatever it is, pytest can do without
        print(f"assertions of tests are left for pytest to rewrite ({type(error).__name__}: {error})")
        return
    print(f"assertions of {done} of {len(found)} modules of tests were rewritten")


if __name__ == "__main__":
    main()
