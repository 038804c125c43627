"""What the allocator is told shows in page faults."""

import subprocess
import sys

SCRIPT = """
import resource, sys
from dataserver.allocator import cache_freed_memory
if sys.argv[1] == "cached":
    cache_freed_memory()

def messages():
    for _ in range(100):
        parts = [bytes(1 << 20) for _ in range(4)]

messages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_of_messages_is_used_again() -> None:
    assert faults("cached") < 1_000 < 4_000 < faults("given back")
