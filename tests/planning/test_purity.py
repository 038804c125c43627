"""Law 4: the planner imports nothing of ours but itself, and no float or chance takes part in a decision."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dataserver.planning

FOLDER = Path(dataserver.planning.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
LIBRARIES = {"llvmlite", "numba", "numpy", "pydantic", "pydantic_core", "rfc8785"}
PARSERS = {"job/fields/yaml_values.py": {"yaml"}}
"""What single modules may import beside: text in, values out, and no file is opened."""
COMPILED = {"kernels/cache.py", "kernels/compiler.py"}
"""Modules that compile kernels and cache them. No decision depends on the cache."""
IMPURE = {
    "asyncio", "datetime", "io", "multiprocessing", "os", "pathlib", "pickle", "random", "secrets", "shutil", "socket",
    "subprocess", "tempfile", "time", "urllib", "uuid",
}  # fmt: skip
"""Input and output, clocks and chance of the standard library."""
FORBIDDEN_AT_RUNTIME = [
    "numba",
    "grpc",
    "torch",
    "PIL",
    "pyarrow",
    "google.protobuf",
    "disttrain",
    "tokenizers",
]
FOR_PEOPLE = {
    ("plan/expectation.py", "imbalance"),
    ("layouts/shared/sequences.py", "fill_percent"),
    ("layouts/shared/sequences.py", "empty_percent"),
    ("layouts/interface.py", "figures"),
    ("layouts/colocated/layout.py", "_figures"),
    ("layouts/colocated/decisions.py", "_imbalance"),
    ("costs/profile.py", "error_percent"),
}
"""Functions, and a field, that may know of floats: what they return is shown, never decided by."""
ROUNDED = {"float", "sqrt", "exp", "log", "mean", "std", "average", "random", "default_rng", "shuffle", "true_divide"}


def test_importing_all_of_it_loads_nothing_else() -> None:
    parts = [
        ("dataserver", "planning", *module.relative_to(FOLDER).with_suffix("").parts)
        for module in MODULES
        if "kernels" not in module.relative_to(FOLDER).parts  # loaded on first use, with numba and what that brings
    ]
    names = [".".join(p).removesuffix(".__init__") for p in parts]
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
print([m for m in {FORBIDDEN_AT_RUNTIME} if m in sys.modules])
print(sorted(m for m in sys.modules if m.startswith(("dataserver.", "trainclient")) and
             not m.startswith("dataserver.planning")))
"""
    environment = {"PYTHONPATH": str(FOLDER.parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split("\n")[:2] == ["[]", "[]"]
    assert len(names) > 10


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.relative_to(FOLDER).as_posix())
def test_imports(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top == "dataserver":
                assert name.startswith("dataserver.planning")
            else:
                place = module.relative_to(FOLDER).as_posix()
                also = IMPURE if place in COMPILED else PARSERS.get(place, set())
                assert top in LIBRARIES | also | (sys.stdlib_module_names - IMPURE)


def rounded(tree: ast.AST) -> list[tuple[str, int]]:
    """Every true division, float literal, and call or attribute of a rounded or random function."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            found.append(("/", node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            found.append((repr(node.value), node.lineno))
        elif isinstance(node, ast.Attribute) and (node.attr in ROUNDED or node.attr.startswith("float")):
            found.append((node.attr, node.lineno))
        elif isinstance(node, ast.Name) and node.id in ROUNDED:
            found.append((node.id, node.lineno))
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.relative_to(FOLDER).as_posix())
def test_no_float_takes_part_in_a_decision(module: Path) -> None:
    place = module.relative_to(FOLDER).as_posix()
    if place in COMPILED:
        return
    shown = {name for where, name in FOR_PEOPLE if where == place}
    tree, left = ast.parse(module.read_text()), []
    for node in [*tree.body, *(inner for c in tree.body if isinstance(c, ast.ClassDef) for inner in c.body)]:
        name = node.name if isinstance(node, ast.FunctionDef) else ""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        if name in shown:
            shown.remove(name)
        elif not isinstance(node, ast.ClassDef):
            left.append(node)
    assert not shown, "FOR_PEOPLE names what is not there"
    assert [line for node in left for line in rounded(node)] == []


def test_the_check_sees_floats() -> None:
    code = "x = a / 2; x /= 2; y = float(z); w = np.sqrt(v); u = 0.5; t = v.astype(np.float64); r = np.random"
    assert [what for what, _ in rounded(ast.parse(code))] != []
    assert {what for what, _ in rounded(ast.parse(code))} == {"/", "float", "sqrt", "0.5", "float64", "random"}
    assert rounded(ast.parse("x = a // 2; y = int(z)")) == []
