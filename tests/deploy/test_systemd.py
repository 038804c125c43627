"""The unit of systemd: checked by systemd itself, and by our own parser."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.manifests import ROOT

from dataserver.serving.config import load_config

FOLDER = ROOT / "deploy/systemd"
UNIT = FOLDER / "dataserver@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("misspelled", [False, True])
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, misspelled: bool) -> None:
    server = Path(sys.executable).parent / "dataserver"
    text = UNIT.read_text().replace("/opt/disttrain/bin/dataserver", str(server))
    assert str(server) in text
    if misspelled:
        text = text.replace("CPUQuota=", "CPUQuta=")
    unit = tmp_path / "dataserver@50051.service"
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    found = [line for line in done.stderr.splitlines() if unit.name in line or "dataserver" in line]
    assert ["CPUQuta" in line for line in found] == [True] * misspelled, done.stderr


def test_the_unit_gives_the_server_what_it_takes() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    program, command, *arguments = line.split()
    assert (Path(program).name, command) == ("dataserver", "serve")
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert flags.keys() == {"--config", "--listen", "--cache-dir"}
    config = load_config(FOLDER / "serve.yaml", {"listen": flags["--listen"].replace("%i", "50051")})
    assert "cpu1:50051" in config.peers
    limits = UNIT.read_text()
    assert "CPUQuota=" in limits, "threads follow from a limit"
    assert "MemoryMax=" in limits, "memory budgets follow from a limit"
