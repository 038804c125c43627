"""From the start of a server to the first microbatch in a client that runs already: `service_start.py SHARDS`.

Prints seconds until the server listened, until the first microbatch was there, and the server's CPU time by then.
"""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from loaders.service import MODULE, job_data, serve_command
from trainclient.client import DataClient


def main() -> None:
    """Start a server once, and print what that took."""
    began = time.perf_counter()
    server = subprocess.Popen(serve_command(Path(sys.argv[1])), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        listening_s = time.perf_counter() - began
        with DataClient(address, job_data("encoder"), MODULE, 0) as client:
            next(iter(client))
            first_s = time.perf_counter() - began
            times = psutil.Process(server.pid).cpu_times()
        cpu_s = times.user + times.system + times.children_user + times.children_system
        print(f"{listening_s} {first_s} {cpu_s}")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
