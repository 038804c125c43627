"""Who imports whom: no circles, packages by their faces, and layouts only by their options and interface."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANNING = "dataserver.planning"
LAYOUTS = tuple(
    f"{PLANNING}.layouts.{path.parent.name}"
    for path in sorted((ROOT / "dataserver/planning/layouts").glob("*/layout.py"))
)
"""Folders of layouts: those that say how they are planned."""
OPEN = ("options", "layout")
"""Modules of a layout's folder that others may import."""
BESIDE_THE_LAYOUT = {
    ("trainclient.layouts.grouped.degrees", f"{PLANNING}.layouts.grouped.compositions"),
    ("dataserver.cli.towers", f"{PLANNING}.layouts.contrastive.choice"),
    ("dataserver.cli.towers", f"{PLANNING}.layouts.contrastive.profiles"),
}
"""The command that places towers is about contrastive jobs alone; each layout finds its own degrees in the trainer."""
NAMES_A_LAYOUT = {
    "dataserver.cli.towers": "it is about contrastive jobs alone",
}
OF_TRAINER = "trainclient.layouts"
PARTS = ("topology", "exchange", "degrees")
"""Modules of a layout's folder in the trainer, which the registry finds by their names."""


@cache
def modules() -> Mapping[str, Path]:
    """All modules by their names; a package by its own."""
    found = {}
    for top in ("dataserver", "trainclient"):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(name: str) -> frozenset[tuple[str, str]]:
    """(module, name taken from it, or nothing) of every import of ours, within functions and type checks too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, name
            found |= {(node.module or "", alias.name) for alias in node.names}
    return frozenset(f for f in found if f[0].split(".")[0] in ("dataserver", "trainclient"))


def exports(name: str) -> frozenset[str]:
    """What a package's face offers: its `__all__`."""
    for node in ast.parse(modules()[name].read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def target(module: str, name: str) -> str:
    """The module that an import enters: a name that a face offers is the face's, even if a module is called so."""
    whole = f"{module}.{name}"
    return whole if whole in modules() and name not in exports(module) else module


def entered(name: str) -> set[str]:
    """The modules that importing `name` runs before its own end: what it imports, and the faces on the way."""
    found = set()
    for module, taken in imports(name):
        goal = target(module, taken)
        packages = {".".join(goal.split(".")[:n]) for n in range(1, goal.count(".") + 1)}
        found |= {goal} | {p for p in packages if not name.startswith(f"{p}.")}
    return found - {name}


def is_package(name: str) -> bool:
    return modules()[name].name == "__init__.py"


def test_there_is_no_circle() -> None:
    """Not under TYPE_CHECKING and not within functions either."""
    assert len(modules()) > 150
    try:
        tuple(TopologicalSorter({name: entered(name) for name in modules()}).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def closed_faces(goal: str, name: str) -> Iterator[str]:
    """The packages with a face that an import of `goal` from `name` passes by."""
    parts = goal.split(".")
    for n in range(1, len(parts)):
        package = ".".join(parts[:n])
        if exports(package) and not (name == package or name.startswith(f"{package}.")):
            yield package


@pytest.mark.parametrize("top", ["dataserver", "trainclient"])
def test_packages_are_entered_by_their_faces(top: str) -> None:
    passed_by = {
        (name, goal)
        for name in modules()
        if name.split(".")[0] == top
        for goal in (target(*i) for i in imports(name))
        for _ in closed_faces(goal, name)
    }
    assert passed_by == set()


def test_a_face_offers_what_it_names() -> None:
    for name in modules():
        if is_package(name) and exports(name):
            assert exports(name) <= set(_bound(ast.parse(modules()[name].read_text()))), name


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (t.id for t in targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def test_layouts_are_entered_by_their_options_and_their_interface() -> None:
    assert [name.rpartition(".")[2] for name in LAYOUTS] == ["colocated", "contrastive", "grouped", "pipelined"]
    found = {
        (name, goal)
        for name in modules()
        for goal in (target(*i) for i in imports(name))
        for folder in LAYOUTS
        if goal.startswith(f"{folder}.") and not (name == folder or name.startswith(f"{folder}."))
        if goal.removeprefix(f"{folder}.") not in OPEN
    }
    assert found == BESIDE_THE_LAYOUT


@pytest.mark.parametrize("folder", LAYOUTS)
def test_a_layout_has_one_name(folder: str) -> None:
    """From the kind in a job to the modules that know it alone, and its page."""
    name = folder.rpartition(".")[2]
    assert f'Literal["{name}"]' in modules()[f"{folder}.options"].read_text()
    assert {f"{OF_TRAINER}.{name}.{part}" for part in PARTS} <= modules().keys()
    assert (ROOT / "docs/layouts" / f"{name}.md").is_file()


def mentions(tree: ast.AST) -> set[str]:
    """How a module asks which layout a job has: classes of options by name, and comparisons of `layout.kind`."""
    options = {"PipelinedOptions", "GroupedOptions", "ColocatedOptions", "ContrastiveOptions"}
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in options}
    for node in ast.walk(tree):
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        compared += [node.subject] if isinstance(node, ast.Match) else []
        compared += [node.slice] if isinstance(node, ast.Subscript) else []
        found |= {ast.unparse(c) for c in compared if ast.unparse(c).endswith("layout.kind")}
    return found


def test_nothing_but_the_registry_asks_which_layout_it_is() -> None:
    outside = [n for n in modules() if not any(n == f or n.startswith(f"{f}.") for f in (*LAYOUTS, OF_TRAINER))]
    found = {name for name in outside if mentions(ast.parse(modules()[name].read_text()))}
    assert found - {f"{PLANNING}.job.spec"} == NAMES_A_LAYOUT.keys()


KIND = "(pipelined|grouped|colocated|contrastive)"
IS_A_KIND = re.compile(rf"(is_|has_|_)*{KIND}(_layout)?")
"""Names of what is true of one layout alone."""


def layout_branches(tree: ast.AST) -> set[str]:
    """Where code does one thing for one layout and another for the others: conditions that are true of one layout, and
    names of layouts that something is compared with or looked up by."""
    conditions, compared = list[ast.expr](), list[ast.expr]()
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                conditions.append(test)
            case ast.BoolOp(values=values):
                conditions += values
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                conditions.append(operand)
            case ast.comprehension(ifs=ifs):
                conditions += ifs
            case ast.Compare(left=left, comparators=others):
                compared += [left, *others]
            case ast.MatchValue(value=value) | ast.Subscript(slice=value):
                compared.append(value)
            case ast.Dict(keys=keys):
                compared += [key for key in keys if key is not None]
            case ast.Call(func=ast.Attribute(attr="get" | "startswith"), args=args):
                compared += args
            case _:
                pass
    constants = [c for found in compared for c in ast.walk(found) if isinstance(c, ast.Constant)]
    found = {ast.unparse(c) for c in constants if isinstance(c.value, str) and re.fullmatch(KIND, c.value)}
    for condition in conditions:
        called = condition.func if isinstance(condition, ast.Call) else condition
        name = {ast.Attribute: "attr", ast.Name: "id"}.get(type(called))
        if name is not None and IS_A_KIND.fullmatch(getattr(called, name)):
            found.add(ast.unparse(condition))
    return found


def test_the_trainer_branches_on_no_layout_outside_their_folders() -> None:
    of_trainer = [n for n in modules() if n.startswith("trainclient.") and not n.startswith(f"{OF_TRAINER}.")]
    trees = {name: ast.parse(modules()[name].read_text()) for name in of_trainer}
    assert {name: found for name, tree in trees.items() if (found := layout_branches(tree) | mentions(tree))} == {}


def test_the_trainer_enters_layouts_by_its_registry() -> None:
    found = set()
    for name in (n for n in modules() if n.startswith("trainclient.")):
        for goal in (target(*i) for i in imports(name)):
            folder = re.match(rf"{re.escape(OF_TRAINER)}\.{KIND}\b", goal)
            if folder is not None and not name.startswith(folder[0]):
                found.add((name, goal))
    assert found == set()


@pytest.mark.parametrize(
    "branch",
    [
        "x = 1 if topology.colocated else 2",
        "for e in (() if self._topology.colocated else edges): pass",
        "pipelined = world_size > 1 and not topology.colocated",
        "while job.is_contrastive(): pass",
        "if pipelined: pass",
        "shared = choice.layout == 'colocated'",
        "if kind in ('grouped', 'pipelined'): pass",
        "match kind:\n  case 'grouped': pass",
        "{'colocated': 1}[kind]",
        "table.get('grouped')",
        "options['contrastive']",
    ],
)
def test_no_branch_on_a_layout_is_overlooked(branch: str) -> None:
    assert layout_branches(ast.parse(branch))


def test_words_that_layouts_share_with_others_are_no_branches() -> None:
    said = "config.contrastive.loss; x = y if stream.contrastive_batch is None else z; f('colocated')"
    assert layout_branches(ast.parse(said)) == set()


def test_the_checks_see_what_they_look_for() -> None:
    asks = "if isinstance(e.layout, GroupedOptions) or e.layout.kind == 'x' or T[job.layout.kind]: pass"
    assert mentions(ast.parse(asks)) == {"GroupedOptions", "e.layout.kind", "job.layout.kind"}
    assert mentions(ast.parse("text = f'a {e.layout.kind} layout'; o = e.options(WaveOptions)")) == set()
    assert list(closed_faces(f"{PLANNING}.fitting.outliers", f"{PLANNING}.planner")) == [f"{PLANNING}.fitting"]
    assert list(closed_faces(f"{PLANNING}.fitting.outliers", f"{PLANNING}.fitting.fitting")) == []
    assert target(f"{PLANNING}.balancing", "padded") == f"{PLANNING}.balancing"
    assert target(f"{PLANNING}.balancing", "interface") == f"{PLANNING}.balancing.interface"


ASKS_FOR_KINDS = {
    "trainclient.modules.registry": "it is the registry",
    "trainclient.adapters.full_model": "ranks of other trainers run an encoder and no generator",
}
"""Of parts of the trainer. What they test otherwise is not what a module is: types in JSON and YAML, errors, layers and
tensors of torch (linear or adapted, DTensor or not), and the layout (`NAMES_A_LAYOUT`)."""
OF_A_KIND = re.compile(r"(Image|Text)?(Encoder|Backbone|Generator|Tower)(Config|Stage|Block|Model)?")
"""Classes that belong to kinds of modules."""


def asked_kinds(tree: ast.AST) -> set[str]:
    """How a module asks which kind a module is; messages may say it."""
    nodes = list(ast.walk(tree))
    spoken = {id(node) for text in nodes if isinstance(text, ast.JoinedStr) for node in ast.walk(text)}
    found = set()
    for node in (node for node in nodes if id(node) not in spoken):
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute | ast.Compare | ast.Call) else ""
        if text == "ModuleKind" or (isinstance(node, ast.Attribute) and text.endswith("module.kind")):
            found.add(text)
        if isinstance(node, ast.Compare) and re.search(r"kind.*'(encoder|backbone|generator|tower)'", text):
            found.add(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            classes = (n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name))
            found |= {text} if any(OF_A_KIND.fullmatch(name) for name in classes) else set()
    return found


def test_no_other_part_of_the_trainer_asks_which_kind_a_module_is() -> None:
    of_trainer = [name for name in modules() if name.split(".")[0] == "trainclient"]
    found = {name for name in of_trainer if asked_kinds(ast.parse(modules()[name].read_text()))}
    assert found == ASKS_FOR_KINDS.keys()


def test_no_way_to_ask_for_kinds_is_overlooked() -> None:
    ways = ("x is ModuleKind.TOWER", "site.module.kind", "n.kind == 'tower'", "d['kind'] in ('encoder', 'generator')",
            "isinstance(x, int | TextTowerConfig)", "isinstance(model, BackboneModel)")  # fmt: skip
    assert all(asked_kinds(ast.parse(way)) for way in ways)
    assert not asked_kinds(ast.parse("f'a {site.module.kind}'; isinstance(x, dict); choice.kind == 'colocated'"))


def test_exchange_and_program_know_no_model() -> None:
    """The exchange moves rows and the interpreter runs operations, of whatever modules there are."""
    for folder, forbidden in (
        ("exchange", ("models", "modules", "program", "training")),
        ("program", ("models", "training")),
    ):
        for name in modules():
            if name.startswith(f"trainclient.{folder}."):
                entered_folders = {target(*i).split(".")[1] for i in imports(name) if i[0].startswith("trainclient.")}
                assert not entered_folders & set(forbidden), name


def test_no_module_that_pytest_collects_defines_an_operator() -> None:
    """Imported by a test, it would come twice: torch frees an operator that is defined again, and calls of it crash."""
    collected = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name, text in collected.items() if re.search(r"^@torch\.library", text, re.MULTILINE)] == []
