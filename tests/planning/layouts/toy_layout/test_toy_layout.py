"""A layout takes one folder and one name in the registry: this adds one to a copy of the server and uses it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
REGISTRY = "AnyLayout = PipelinedOptions | GroupedOptions | ColocatedOptions | ContrastiveOptions\n"
IMPORT = "from dataserver.planning.layouts.pipelined.options import PipelinedOptions\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the server's package with the toy's folder, and its options in the union of all."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(ROOT / "dataserver", folder / "dataserver", ignore=shutil.ignore_patterns("__pycache__"))
    planning = folder / "dataserver" / "planning"
    shutil.copytree(HERE / "toy", planning / "layouts" / "toy", ignore=shutil.ignore_patterns("__pycache__"))
    registry = (planning / "job" / "spec.py").read_text()
    assert registry.count(REGISTRY) == registry.count(IMPORT) == 1
    registry = registry.replace(REGISTRY, REGISTRY.rstrip() + " | ToyOptions\n")
    registry = registry.replace(IMPORT, IMPORT + "from dataserver.planning.layouts.toy.options import ToyOptions\n")
    (planning / "job" / "spec.py").write_text(registry)
    return folder


def test_a_toy_layout_does_all_that_layouts_do(server: Path) -> None:
    environment = os.environ | {
        "NUMBA_DISABLE_JIT": "1",  # numba caches by path, and the copy has another
        "PYTHONPATH": f"{server}:{ROOT / 'protos'}:{ROOT / 'tests'}",
    }
    ran = subprocess.run(
        [sys.executable, HERE / "use.py"], env=environment, cwd=server, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["at"] == str(server / "dataserver" / "__init__.py")
    assert found["kinds"] == ["pipelined", "grouped", "colocated", "contrastive", "toy"]
    assert found["same_id"]
    assert found["samples"] == 40
    assert found["each_once"]
    assert found["programs_simulated"] == [True]
    assert 0 < found["bound_ns"] <= found["busiest_ns"] == found["makespan_ns"]
    assert found["other_baseline"]
    assert found["message_hash"]
    rows = {(heading, name): figures for heading, name, figures in found["rows"]}
    assert {name for heading, name in rows if heading == "packing"} == {"balanced", "best_fit"}
    assert {name for heading, name in rows if heading == "order"} <= {"disttrain", "search", "none"}
    assert ("ablation", "best fit, canonical order") in rows
    assert [name for name, _ in found["ablation"]][1:] == [
        "balanced packing",
        "sequences spread over ranks",
        "within memory",
        "turned",
    ]
    assert found["ablation"][-1][1] == found["makespan_ns"]
    assert all(0 < figures["fill_percent"] <= 100 for figures in rows.values())
    assert found["in_schema"]
    assert found["mapping"] == ["colocated", "contrastive", "grouped", "pipelined", "toy"]


def test_without_the_line_in_the_registry_the_toy_is_unknown(server: Path, tmp_path: Path) -> None:
    shutil.copytree(server / "dataserver", tmp_path / "dataserver")
    registry = "dataserver/planning/job/spec.py"
    (tmp_path / registry).write_text((ROOT / registry).read_text())
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'protos'}:{ROOT / 'tests'}"}
    ran = subprocess.run(
        [sys.executable, HERE / "use.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode != 0
    assert 'kind is "toy"; one of pipelined, grouped, colocated, contrastive is required' in ran.stderr
