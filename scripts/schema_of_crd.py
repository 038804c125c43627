"""A JSON schema of a Kubernetes custom resource, from its CustomResourceDefinition: what tests check manifests with.

    python scripts/schema_of_crd.py jobsets.yaml > tests/deploy/schemas/JobSet.json

Unknown fields are refused, which a cluster would drop. Pod templates are left open: tests check them as part of a Job.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

OPEN: dict[str, Any] = {"type": "object"}
COPIED = ("type", "enum", "pattern", "required", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength")


def main(file: Path) -> None:
    """Print the schema of the version that is stored."""
    definition = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
    (version,) = (version for version in definition["versions"] if version["storage"])
    found = schema(version["schema"]["openAPIV3Schema"])
    found["properties"]["apiVersion"] = {"const": f"{definition['group']}/{version['name']}"}
    found["properties"]["kind"] = {"const": definition["names"]["kind"]}
    found["properties"]["metadata"] = OPEN
    found["properties"].pop("status", None)
    found["required"] = ["apiVersion", "kind", "metadata", "spec"]
    print(json.dumps(found, separators=(",", ":"), sort_keys=True))


def schema(node: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a node of an OpenAPI schema, without descriptions and defaults."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    properties = node.get("properties", {})
    if "containers" in properties or node.get("x-kubernetes-preserve-unknown-fields"):
        return OPEN
    found = {key: node[key] for key in COPIED if key in node}
    if properties:
        found["properties"] = {name: schema(below) for name, below in properties.items()}
        found["additionalProperties"] = False
    elif isinstance(node.get("additionalProperties"), dict):
        found["additionalProperties"] = schema(node["additionalProperties"])
    if "items" in node:
        found["items"] = schema(node["items"])
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
