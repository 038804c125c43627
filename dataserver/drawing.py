"""Pictures by matplotlib: the same figure makes the same bytes. Servers and trainers use this alike."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: Final = ("#4477AA", "#EE7733", "#228833", "#AA3377", "#66CCEE", "#CCBB44")
"""One for each module, in their order; distinguishable without colour vision (Tol's bright scheme)."""
_DATES: Final = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@contextmanager
def drawing() -> Iterator[None]:
    """Figures are drawn and written within this.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ValueError("drawing needs matplotlib, which is not installed; run: pip install matplotlib") from None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "disttrain"}):
        yield


def file_of(figure: "Figure", suffix: str) -> bytes:
    """What a file with this suffix (.png, .svg, .pdf) holds. Raises ValueError for others."""
    kind, drawn = suffix.lower().removeprefix("."), io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=110, metadata=_DATES.get(kind))
    return drawn.getvalue()
