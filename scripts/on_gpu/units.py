"""Tests of kernels on the device."""

from on_gpu.cases import run_cases
from on_gpu.telling import Given, given

TESTS = ("gpu/test_attention.py", "models/test_noise.py")
SMALL_TESTS = TESTS[:1]


def units(asked: Given) -> None:
    """Run them, and show those that fail."""
    told, table = asked.told("units"), None
    cases = run_cases(SMALL_TESTS if asked.small else TESTS, asked.limit_s - 5, asked.work / "units-tests.log", {})
    table = told.table("Tests", "what", "outcome", "seconds")
    table.rows.append([", ".join(TESTS), f"{cases.counts}; {cases.ended.how}", f"{cases.ended.seconds:.0f}"])
    for case in cases.found:
        if case["outcome"] == "failed":
            table.rows.append([case["test"], case["said"][-600:], f"{case['seconds']:.1f}"])
    told.data["cases"] = list(cases.found)
    told.save()


if __name__ == "__main__":
    units(given(__doc__))
