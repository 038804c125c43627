"""A line for every step, for a person who looks on."""

from rich.console import Console

from trainclient.run_times.report import RunReport
from trainclient.training.metrics import EvaluationMetrics, StepMetrics


class Screen:
    """Shows the steps of a run."""

    def __init__(self, console: Console, num_steps: int) -> None:
        """Show on a console how many of `num_steps` are done."""
        self._console = console
        self._num_steps = num_steps

    def write(self, metrics: StepMetrics) -> None:
        """Print the metrics of one step."""
        self._console.print(_line(metrics, self._num_steps), highlight=False, soft_wrap=True)

    def finish(self, report: RunReport) -> None:
        """Show where the time of the run went."""
        self._console.print(report.text(), end="", highlight=False, markup=False, soft_wrap=True)

    def sync(self) -> None:
        """Do nothing: the screen buffers no lines."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def _line(m: StepMetrics, num_steps: int) -> str:
    held_out = "" if m.evaluation is None else f"  held out: {_losses(m.evaluation)}{_recall(m.evaluation)}"
    norm = "not finite, skipped" if m.grad_norm is None else f"{m.grad_norm:.3g}"
    return (
        f"step {m.step + 1}/{num_steps}  {_losses(m)}{held_out}  grad norm {norm}  "
        f"{m.samples / max(m.seconds, 1e-9):.1f} samples/s  {m.seconds:.2f} s  data wait {m.data_wait_percent:.1f} %"
    )


def _losses(m: StepMetrics | EvaluationMetrics) -> str:
    found = (("text", m.text_loss), ("image", m.image_loss), ("contrastive", m.contrastive_loss))
    return "  ".join(f"{name} loss {loss:.4f}" for name, loss in found if loss is not None)


def _recall(m: EvaluationMetrics) -> str:
    """Recall each way between towers, at 1, 5 and so on."""
    ways: dict[str, list[str]] = {}
    for name, share in (m.recall or {}).items():
        way, _, among = name.rpartition("_r")
        ways.setdefault(way, []).append(f"R@{among} {100 * share:.1f}")
    return "".join(f"  {way}: {' '.join(shares)} %" for way, shares in ways.items())
