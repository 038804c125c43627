"""An encoder that once makes something that is not finite."""

from typing import Any

from modules.own_encoder import BlockEncoder

from trainclient.modules import Output, Rows, Site, View


class PoisonedEncoder(BlockEncoder):
    """Its forward number `call` in a process gives rows that are not finite."""

    def __init__(self, site: Site, call: int, **options: Any) -> None:
        super().__init__(site, **options)
        self._left = call

    def forward(self, view: View, rows: Rows | None) -> Output:
        output = super().forward(view, rows)
        self._left -= 1
        if self._left or output.rows is None:
            return output
        return Output(Rows(output.rows.values * float("inf"), output.rows.valid, output.rows.offsets))
