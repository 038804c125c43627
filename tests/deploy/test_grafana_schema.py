"""The dashboard is one by Grafana's own schema, in a release other than the one that wrote it.

No registry of packages has Grafana itself. Its schema is the npm package `@grafana/schema`, whose types the compiler of
TypeScript compares with the JSON: unknown fields, wrong types and values that no enumeration has.
"""

import copy
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from monitoring.rendering import files

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PACKAGES = ("@grafana/schema@13", "typescript@5")
RAW = "@grafana/schema/dist/esm/raw"
HEAD = f"""
import type {{ Dashboard }} from "{RAW}/dashboard/x/Dashboard_types.gen";
import type {{ Options as timeseries, FieldConfig }} from "{RAW}/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";
import type {{ Options as stat }} from "{RAW}/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
// JSON has the values of enumerations, which TypeScript takes for other types than their members.
type Plain<T> = T extends string ? `${{T}}` : T extends (infer E)[] ? Plain<E>[]
    : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
"""  # noqa: E501


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages."""
    if found := os.environ.get("DISTTRAIN_GRAFANA_SCHEMA"):
        return Path(found)
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: Node.js 20 with npm is required")
    folder = tmp_path_factory.mktemp("schema")
    line = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"the schema cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def checked(dashboard: Any) -> str:
    """A program that is right if a dashboard is."""
    lines = [HEAD, f"export const dashboard: Plain<Dashboard> = {json.dumps(dashboard)};"]
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        lines.append(f"export const o{panel['id']}: Plain<Partial<{panel['type']}>> = {json.dumps(panel['options'])};")
        if panel["type"] == "timeseries":
            custom = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
            lines.append(f"export const f{panel['id']}: Plain<Partial<FieldConfig>> = {custom};")
    return "\n".join(lines)


def test_the_dashboard_fits_the_schema_and_what_does_not_is_found(schema: Path, tmp_path: Path) -> None:
    dashboard = json.loads(files()["deploy/grafana/fleet.json"])
    graph = next(n for n, panel in enumerate(dashboard["panels"]) if panel["type"] == "timeseries")
    changes: dict[str, Any] = {
        "as_it_is": lambda other, _: other,
        "unknown_field": lambda other, _: other.update(paneels=[]),
        "wrong_type": lambda other, _: other.update(title=3),
        "no_member": lambda _, panel: panel["options"]["tooltip"].update(mode="many"),
        "wrong_in_panel": lambda _, panel: panel["gridPos"].update(h="8"),
        "wrong_in_fields": lambda _, panel: panel["fieldConfig"]["defaults"]["custom"].update(showPoints="often"),
    }
    (tmp_path / "node_modules").symlink_to(schema / "node_modules")
    for name, change in changes.items():
        other = copy.deepcopy(dashboard)
        change(other, other["panels"][graph])
        (tmp_path / f"{name}.ts").write_text(checked(other))
    compiler = str(schema / "node_modules/typescript/bin/tsc")
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    line = ["node", compiler, *flags, "--pretty", "false", *(f"{name}.ts" for name in changes)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    wrong = {line.partition(".ts(")[0] for line in done.stdout.splitlines() if ".ts(" in line}
    assert wrong == changes.keys() - {"as_it_is"}, done
