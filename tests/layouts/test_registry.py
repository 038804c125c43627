"""A layout of the trainer: what a folder of its own must have, and that a line of the registry is enough."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from program.runtime_cases import Degrees, job_data
from topology.test_process_grid import parsed

from trainclient import layouts
from trainclient.layouts import registry
from trainclient.layouts.interface import ChunkEnds, chunk_ends_of
from trainclient.layouts.registry import LAYOUTS, layout_part
from trainclient.orchestrate.choice import LayoutDegrees
from trainclient.topology.process_grid import Topology, TopologyError

TOY = {
    "__init__": "",
    "topology": """
from trainclient.topology.process_grid import Topology, edges_of, processes_of_modules

def topology(execution):
    return Topology(processes_of_modules(execution)[::-1], edges_of(execution))
""",
    "exchange": """
from trainclient.layouts.interface import ChunkEnds

def chunk_ends(surroundings, modules):
    return [ChunkEnds() for _ in modules]
""",
}
"""Processes in the opposite order, which exchange nothing."""


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_line_of_the_registry_has_its_parts(kind: str) -> None:
    assert callable(layout_part(kind, "topology").topology)
    assert callable(layout_part(kind, "exchange").chunk_ends)
    assert isinstance(layout_part(kind, "degrees").DEGREES, LayoutDegrees)


def toy_spec() -> Any:
    execution = parsed(job_data(Degrees(1, 2, 1, 1))).spec.execution
    fields = ("modules", "exchanging", "identity_routing")
    toy = SimpleNamespace(kind="toy", num_chunks=1)
    return SimpleNamespace(execution=SimpleNamespace(layout=toy, **{name: getattr(execution, name) for name in fields}))


def test_a_folder_and_a_line_are_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TopologyError, match=r"layout is toy, .* set layout.kind to one of pipelined, colocated"):
        Topology.of(toy_spec())
    (tmp_path / "toy").mkdir()
    for name, text in TOY.items():
        (tmp_path / "toy" / f"{name}.py").write_text(text)
    monkeypatch.setattr(layouts, "__path__", [*layouts.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "LAYOUTS", (*LAYOUTS, "toy"))
    found = Topology.of(toy_spec())
    assert [process.modules[0].name for process in found.processes] == ["dit", "llm", "llm", "vit"]
    assert found.message_edges == ()
    around: Any = SimpleNamespace(spec=toy_spec())
    (ends,) = chunk_ends_of(around, [around])
    assert isinstance(ends, ChunkEnds)
    assert (ends.receiver, ends.sender) == (None, None)
