"""Gradients of every layout where any two of its choices meet: covers of pairs instead of all that could be combined.

Of each layout a few degrees, for which processes are started, and for each of these the rest of its choices.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from program.conftest import Fleet
from program.covers import Factors, Row, cover, covering, every, pairs
from program.reference import Gradients, reference_gradients
from program.runtime_cases import Case, Degrees, Pool
from program.test_contrastive import SMALL, STAGED, TENSOR_PARALLEL, WIDE, case_of
from program.test_gradients import BOUNDS, DEGREES, KINDS, MODULES, WEIGHTS, assert_close, degrees_of, fits
from program.test_gradients import FACTORS as PIPELINES
from program.test_grouped import HEADS, MIXED
from program.towers import SINGLE, towers_in_one_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FROZEN = ((), ("vit",), ("llm",), ("vit", "llm"), ("dit",))
SHARDING = ("none", "zero2", "zero3")
fits_eight = partial(fits, processes=8)
PIPELINED = cover({name: PIPELINES[name] for name in DEGREES}, fits_eight)
"""Degrees of pipelines, every pair of values together."""
FEW = 5
"""Of these, for continuous integration: with one row each, every value of every choice comes."""
REST: Factors = {name: values for name, values in PIPELINES.items() if name not in DEGREES}
PIPELINED_ROWS = covering(
    [row for of, rest in product(PIPELINED, every(REST, lambda _: True)) if fits_eight(row := of | rest)]
)
"""Any two of all their choices."""
ALL = every({name: PIPELINES[name] for name in DEGREES}, fits)
COLOCATED: Factors = {
    "degrees": (
        Degrees(2, 2, 1, 2, colocated=True),
        Degrees(2, 2, 1, 2, second_encoder=2, second_generator=2, colocated=True),
        Degrees(4, 4, 1, 4, colocated=True),
    ),
    "frozen": FROZEN,
    "recompute": (False, True),
    "sharding": SHARDING,
    "rounds": (False, True),
}
GROUPED: Factors = {
    "degrees": (Degrees(1, 4, 1, 1, group=4), Degrees(2, 4, 1, 1, second_encoder=1, group=4)),
    "frozen": FROZEN,
    "recompute": (False, True),
    "sharding": SHARDING,
    "policy": ("search", "homogeneous", "static"),
    "schedule": ("1f1b", "gpipe"),
}
TOWERS = {"image 2": SMALL, "stages": STAGED, "tp": TENSOR_PARALLEL, "image 2 x 2 and text 1 x 2": WIDE}
FEW_TOWERS = ("tp", "image 2 x 2 and text 1 x 2")
"""Of these, for continuous integration; every value of every other choice comes."""
CONTRASTIVE: Factors = {
    "degrees": tuple(TOWERS),
    "frozen": ((), ("image",), ("text",)),
    "sharding": SHARDING,
    "loss": ("clip", "siglip"),
    "dataset": ("pairs", "understanding"),
    "schedule": ("distmm_pipe", "batch_sync"),
    "microbatches": (1, 2),
}


Some = Callable[[dict[str, Row]], dict[str, Row]]
"""Chooses rows."""


def named(rows: Iterable[Row]) -> dict[str, Row]:
    """Each with its name."""
    return {f"row-{number}": row for number, row in enumerate(rows)}


def rows_of(factors: Factors, degrees: Any) -> dict[str, Row]:
    """The rows of a cover with these degrees."""
    return named(row for row in cover(factors, lambda _: True) if row["degrees"] == degrees)


@cache
def expected_of(case: str) -> Gradients:
    """The gradients of a case that trains all modules in one process, given as JSON."""
    return reference_gradients(Case(**json.loads(case)))


def check(fleet: Fleet, pool: Pool, folder: Path, rows: dict[str, Row], degrees: Degrees, **options: Any) -> None:
    """Gradients of all rows with these degrees, in the same processes; the reference trains all modules."""
    reference, of_backbone, cases = {}, options.pop("backbone", {}), []
    for name, row in rows.items():
        again = tuple(m for m in MODULES if row["recompute"] and m not in row["frozen"])
        retained = (64, 0 if {"llm", "dit"} & {*row["frozen"]} else 192) if row.get("rounds") else (0, 0)
        marked = replace(degrees, frozen=row["frozen"], recompute=again, retained=retained)
        layout = {"extra_in_flight": row["extra"]} if row.get("extra") else {}
        layout |= {key: row[key] for key in ("policy", "schedule") if row.get(key)}
        ours, reference = fleet.pair_of_jobs(marked, **options)
        ours["execution"]["layout"] |= layout
        modules = {"llm": {**of_backbone, "sharding": row["sharding"]}}
        sharding = dict.fromkeys(KINDS, row["sharding"])
        cases.append(Case(name, fleet.address, ours, sharding=sharding, modules=modules, **WEIGHTS))
    found = pool.run(cases, folder)
    alone = Case("alone", fleet.address, reference, modules={"llm": of_backbone} if of_backbone else {}, **WEIGHTS)
    expected = expected_of(json.dumps(asdict(alone)))
    for name, row in rows.items():
        trained = {key: g for key, g in expected.items() if key.split(".")[0] not in row["frozen"]}
        assert found[name].keys() == trained.keys(), row
        assert_close(found[name], trained, BOUNDS["float64"])


def pipelined_rows(of: Row) -> dict[str, Row]:
    """With these degrees; the first is the one in which most choices meet."""
    return named(row for row in PIPELINED_ROWS if row.items() >= of.items())


def long_unless(chosen: Iterable[Any], everything: Iterable[Any]) -> list[Any]:
    """All of them, those that were not chosen for the long tests."""
    few = list(chosen)
    return [one if one in few else pytest.param(one, marks=pytest.mark.long) for one in everything]


@pytest.mark.parametrize("of", long_unless(PIPELINED[:FEW], PIPELINED), ids=lambda of: str(degrees_of(of)))
def test_pipelined(fleet: Fleet, pool: Pool, tmp_path: Path, of: Row) -> None:
    """Every value of every choice, and with the long ones any two degrees; the next test has any two of all choices."""
    check(fleet, pool, tmp_path, dict(islice(pipelined_rows(of).items(), 1)), degrees_of(of))


@pytest.mark.long
@pytest.mark.parametrize("of", PIPELINED, ids=lambda of: str(degrees_of(of)))
def test_pipelined_with_all_choices(fleet: Fleet, pool: Pool, tmp_path: Path, of: Row) -> None:
    check(fleet, pool, tmp_path, pipelined_rows(of), degrees_of(of))


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda number: str(degrees_of(ALL[number])))
def test_all_degrees_of_pipelines(fleet: Fleet, pool: Pool, tmp_path: Path, number: int) -> None:
    """On ten processes at most, with all ways to hold parameters; what else they differ in comes in turn."""
    of, turns = ALL[number], every({name: REST[name] for name in REST if name != "sharding"}, lambda _: True)
    with_shares = [of | turns[(3 * number + k) % len(turns)] | {"sharding": edge} for k, edge in enumerate(SHARDING)]
    rows = [row if fits(row) else row | {"extra": 0} for row in with_shares]
    check(fleet, pool, tmp_path, named(rows), degrees_of(of))


def test_any_two_choices_of_a_pipeline_on_eight_processes_meet() -> None:
    met = frozenset().union(*map(pairs, PIPELINED_ROWS))
    assert met == frozenset().union(*map(pairs, every(PIPELINES, fits_eight)))
    assert len(met) > 300
    assert all(any(row.items() >= of.items() for row in PIPELINED_ROWS) for of in PIPELINED)
    tried = [row for of in PIPELINED[:FEW] for row in islice(pipelined_rows(of).values(), 1)]
    assert all({row[name] for row in tried} == {*values} for name, values in PIPELINES.items())


def test_every_choice_of_towers_is_tried() -> None:
    tried = [row for degrees in FEW_TOWERS for row in rows_of(CONTRASTIVE, degrees).values()]
    others = {name: values for name, values in CONTRASTIVE.items() if name != "degrees"}
    assert all({row[name] for row in tried} == {*values} for name, values in others.items())


def each_value(rows: dict[str, Row]) -> dict[str, Row]:
    """Some of the rows, in which every value of every choice comes that comes in any."""
    left, found = {value for row in rows.values() for value in row.items()}, dict[str, Row]()
    while left:
        name = max(rows, key=lambda one: len(left & rows[one].items()))
        found[name] = rows[name]
        left -= rows[name].items()
    return found


def of_layout(factors: Factors) -> list[Any]:
    """The first degrees of a layout with some rows; for the long tests all degrees with all of them."""
    everything = [pytest.param(degrees, dict, marks=pytest.mark.long) for degrees in factors["degrees"]]
    return [(factors["degrees"][0], each_value), *everything]


@pytest.mark.parametrize(
    ("degrees", "some"), of_layout(COLOCATED), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_colocated(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, some: Some) -> None:
    check(fleet, pool, tmp_path, some(rows_of(COLOCATED, degrees)), degrees)


@pytest.mark.parametrize(
    ("degrees", "some"), of_layout(GROUPED), ids=lambda value: getattr(value, "__name__", str(value))
)
def test_grouped(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, some: Some) -> None:
    check(fleet, pool, tmp_path, some(rows_of(GROUPED, degrees)), degrees, backbone=HEADS, **MIXED)


@pytest.mark.parametrize("degrees", long_unless(FEW_TOWERS, TOWERS))
def test_contrastive(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: str) -> None:
    """With an image that cannot be decoded in `understanding`."""
    cases = []
    for name, row in (rows := rows_of(CONTRASTIVE, degrees)).items():
        options = {key: row[key] for key in ("dataset", "schedule", "microbatches", "frozen")}
        case = case_of(fleet, name, TOWERS[degrees], row["loss"], **options)
        cases.append(replace(case, sharding=dict.fromkeys(("encoder", "backbone"), row["sharding"])))
    found = pool.run(cases, tmp_path)
    for name, row in rows.items():
        skip = frozenset({fleet.victims[row["dataset"]]} if row["dataset"] in fleet.victims else ())
        _, expected = towers_in_one_process(case_of(fleet, "alone", SINGLE, row["loss"], dataset=row["dataset"]), skip)
        trained = {key: g for key, g in expected.items() if key.split(".")[0] not in row["frozen"]}
        assert found[name].keys() == trained.keys(), row
        assert_close(found[name], trained, BOUNDS["float64"])
