"""torchtitan's Trainer and Megatron-LM's `pretrain` over the stream, in real processes of their own environments."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters.examples import ExampleRun, calm_and_killed
from adapters.whole_jobs import pass_with_parity


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("environment", "loop"), [("torchtitan", "torchtitan_trainer"), ("megatron", "megatron_loop")])
def test_killed_and_resumed_twice_once_with_another_number_of_processes(
    server: str, tmp_path: Path, python_with: Callable[[str], Path], environment: str, loop: str
) -> None:
    """Every sample of the pass once, and the parameters are those of a run that nobody disturbed."""
    script, python = Path(__file__).with_name(f"{loop}.py").read_text(), python_with(environment)
    calm, killed = calm_and_killed(
        lambda folder: ExampleRun(script, server, None, folder, pass_with_parity, python), tmp_path, [0, 3, 5]
    )
    found, expected = (torch.load(run.out / "parameters.pt") for run in (killed, calm))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
