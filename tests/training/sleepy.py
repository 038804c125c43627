"""An encoder that takes as long as it is told, and on one rank longer."""

import os
import time
from typing import Any

from modules.own_encoder import BlockEncoder

from trainclient.modules import Output, Rows, Site, View


class SleepyEncoder(BlockEncoder):
    """Sleeps for each patch of a view; in a process whose global rank is `slow_rank`, `factor` times as long."""

    def __init__(self, site: Site, us_per_patch: float, factor: float = 1, slow_rank: int = -1, **options: Any) -> None:
        super().__init__(site, **options)
        self._us = us_per_patch * (factor if os.environ["RANK"] == str(slow_rank) else 1)

    def forward(self, view: View, rows: Rows | None) -> Output:
        time.sleep(len(view.tensors["patches"]) * self._us / 1e6)
        return super().forward(view, rows)

    def forward_flops(self, view: View) -> int:
        return len(view.tensors["patches"])
