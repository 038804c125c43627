"""A head that is the embedding of tokens, held by the first and the last stage: one parameter with both gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
from program.conftest import Fleet
from program.reference import reference_gradients
from program.runtime_cases import Case, Degrees, Pool
from program.test_gradients import BOUNDS, assert_close

from trainclient.models.backbone import BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.hf import Usage, export_pretrained
from trainclient.models.parameters import initialise

CONFIG = BackboneConfig(4, 32, 48, 4, 2, 1e4, 300, query_tokens=0, tied=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "degrees", [Degrees(1, 2, 2, 0), pytest.param(Degrees(1, 1, 3, 0), marks=pytest.mark.long)], ids=str
)
def test_both_stages_have_the_gradient_of_one_parameter(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees
) -> None:
    """`Pool.run` requires that what they have is equal to the bit."""
    network = BackboneStage(CONFIG)
    initialise(network, 5, "llm")
    export_pretrained(tmp_path / "c", CONFIG, network.state_dict(), usage=Usage(1, 2, seq_len=192, max_patches=64))
    ours, one = fleet.pair_of_jobs(degrees, generation={"ratio": "0"})
    case = Case("tied", fleet.address, ours, modules={"llm": {"weights": str(tmp_path / "c")}})
    found, expected = pool.run([case], tmp_path)["tied"], reference_gradients(replace(case, job=one))
    assert found.keys() == expected.keys()
    assert "llm.embed.weight" in found
    assert "llm.head.weight" not in found
    assert_close(found, expected, BOUNDS["float64"])
