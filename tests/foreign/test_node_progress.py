"""The client in JavaScript says how far its reader is."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli.server_process import TIMEOUT_S
from disttrain.v1.data_service_pb2 import ReportProgressRequest
from foreign import node
from foreign.replay import replaying
from foreign.test_golden import BY_NAME, GOLDEN

READ = """
const fs = require('fs');
const pause = () => new Promise((resolve) => setTimeout(resolve, 20));
const data = new client.DataClient([value.address]);
return (async () => {
    await data.createJob(value.job);
    let step;
    for await (const { header } of data.stream('vit', 0)) {
        step = Number(header.step);
        while (!fs.existsSync(value.file)) await pause();
    }
    data.close();
    return step;
})();
"""


@pytest.mark.usefixtures("javascript")
def test_a_server_learns_the_step_that_a_reader_in_javascript_took(tmp_path: Path) -> None:
    """The reader works on its first microbatch until that was said."""
    file, said = tmp_path / "said", list[Any]()
    with replaying(GOLDEN, said) as address, ThreadPoolExecutor(1) as pool:
        job = BY_NAME["create_incomplete"].request.job_spec_json
        reading = pool.submit(node.evaluate, READ, {"address": address, "job": job, "file": str(file)})
        until = time.monotonic() + TIMEOUT_S
        while len(said) < 2 and not reading.done() and time.monotonic() < until:
            time.sleep(0.02)
        file.touch()
        last = reading.result()
    token, report = said[:2]
    assert len(token) == 16
    assert isinstance(report, ReportProgressRequest)
    assert (report.progress_token, report.step) == (token, 0)
    assert 0 < report.waited.ToNanoseconds() < TIMEOUT_S * 1e9
    assert last > 0
