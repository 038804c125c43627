"""Runs of several processes over NCCL, which take the steps of the same runs on CPUs: one pipeline alone comes first.

Each has a time of its own; of one that hangs, all stacks are in the record. On one device nothing about speed follows.
"""

import time
from typing import Final

from on_gpu.cases import Cases, run_cases
from on_gpu.mps import mps
from on_gpu.telling import Given, Table, Told, given

STEPS_OF_A_CPU: Final = "gpu/test_runs.py::test_a_gpu_takes_the_steps_of_a_cpu"
FIRST: Final = f"{STEPS_OF_A_CPU}[pipeline]"
OTHERS: Final = (
    *(f"{STEPS_OF_A_CPU}[{name}]" for name in
      ("pipeline-never-by-host", "stages", "groups", "tensor-parallel", "sequence-parallel", "interleaved-zero2")),
    "gpu/test_runs.py::test_towers_take_the_steps_of_a_cpu",
    *(f"{STEPS_OF_A_CPU}[{name}]" for name in ("colocated-zero3", "recomputed-zero3", "frozen", "alone")),
    "gpu/test_runs.py::test_bfloat16_is_near_float32",
)  # fmt: skip
"""Cases in the order of what is not known yet."""
CASE_S: Final = 75.0
AT_ONCE: Final = 3
"""How many of the other cases run together: most of a run is the start of its processes."""
HOSTS: Final = "rows through hosts in all steps"
BY_HOST: Final = {"DISTTRAIN_ROWS_BY_HOST": "always"}
SMALL: Final = ("gpu/test_shared_gpu.py",)


def pipelines(asked: Given) -> None:
    """One alone, in one way after the other until it works; then the others in the way that worked.

    If it works only with rows that move through hosts, the transfers between devices are what does not.
    """
    told, ends = asked.told("pipelines"), time.monotonic() + asked.limit_s - 8
    table = told.table("Runs over NCCL", "case", "outcome", "seconds", "how")

    def run(tests: tuple[str, ...], way: str, variables: dict[str, str], at_once: int = 1) -> Cases:
        number = len(told.data.setdefault("runs", []))
        variables |= {"DISTTRAIN_CASE_S": f"{CASE_S:g}"}
        left = ends - time.monotonic()
        cases = run_cases(tests, max(5.0, left), asked.work / f"pipelines-{number}.log", variables, at_once)
        told.data["runs"].append({"way": way, "ended": cases.ended.how, "cases": list(cases.found)})
        _tell(told, table, cases, tests, way)
        return cases

    if asked.small:
        run(SMALL, "stand-in on a CPU", {})
        return
    turns = "processes take turns"
    with mps() as (variables, about):
        told.data["mps"] = about
        ways: list[tuple[str, dict[str, str]]] = [(turns, {}), (f"{turns}, {HOSTS}", dict(BY_HOST))]
        if variables is not None:
            at_once = [("MPS", dict(variables)), (f"MPS, {HOSTS}", {**variables, **BY_HOST})]
            ways = [*at_once, ways[0]]
        table.title += f"; {about}"
        worked = next((way for way in ways if _passed(run((FIRST,), *way))), ways[-1])
        if ends - time.monotonic() > CASE_S / 2:
            run(OTHERS, *worked, AT_ONCE)


def _passed(cases: Cases) -> bool:
    return any(case["outcome"] == "passed" for case in cases.found)


def _tell(told: Told, table: Table, cases: Cases, tests: tuple[str, ...], way: str) -> None:
    for case in cases.found:
        name = case["test"].rpartition("::")[2]
        said = "" if case["outcome"] == "passed" else f": {case['said'][-700:]}"
        table.rows.append([name, case["outcome"] + said, f"{case['seconds']:.0f}", way])
    if len(cases.found) < len(tests):
        table.rows.append(["the rest", f"{cases.ended.how}: {cases.ended.tail(5)}", "", way])
    told.save()


if __name__ == "__main__":
    pipelines(given(__doc__))
