"""Metrics to Weights & Biases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataserver.extras import pip_install
from trainclient.run_times.report import RunReport
from trainclient.training.config import ConfigError
from trainclient.training.metrics import StepMetrics
from trainclient.training.sinks.scalars import scalars
from trainclient.training.sinks.writer import SinkLostError


def require_wandb() -> None:
    """Raise ConfigError, with the command that installs it, unless Weights & Biases is there."""
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--wandb needs a package that is not installed ({error}); run {pip_install('wandb')}"
        ) from None


class WeightsAndBiases:
    """Sends the numbers of every step to a project."""

    def __init__(self, project: str, run: str, config: dict[str, Any]) -> None:
        """Go on with a run, or begin it.

        Args:
            project: its name.
            run: name of the run; one that resumes goes on in the same curves, which ignore steps that they have.
            config: what to show beside them.

        Raises:
            ConfigError: the package is not installed, or its server does not take the run.
        """
        require_wandb()
        import wandb

        quiet = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(project=project, id=run, resume="allow", config=config, settings=quiet)
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb {project}: the run is refused ({error}); log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None

    def write(self, metrics: StepMetrics) -> None:
        """Send the metrics of one step to the service."""
        with _explained():
            self._run.log(scalars(metrics), step=metrics.step)

    def finish(self, report: RunReport) -> None:
        """Nothing: a report is no curve."""

    def sync(self) -> None:
        """Its own process sends what was taken."""

    def close(self) -> None:
        """Wait until all is sent."""
        with _explained():
            self._run.finish()


@contextmanager
def _explained() -> Iterator[None]:
    """Its errors, and those of the folder that it writes to, end no run."""
    import wandb

    try:
        yield
    except (wandb.Error, OSError) as error:
        raise SinkLostError(f"Weights & Biases takes no more metrics ({' '.join(str(error).split())})") from None
