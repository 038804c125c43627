"""Writes docs/reference: fields of a job, options of all commands and the gRPC API, from what defines them."""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

import dataserver.cli
import trainclient.cli

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "reference"
PROTOS: Final = ROOT / "protos"
_NOTICE: Final = "<!-- written by scripts/generate_stubs; edit what it is made from -->\n"
_BLOCKS: Final = re.compile(r"\n\s*\n")


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {"job.md": job_page(), "cli.md": cli_page(), "api.md": api_page()}


def job_page() -> str:
    """Every field of a job, from its JSON schema."""
    schema = json.loads((PROTOS / "disttrain/v1/job_spec.schema.json").read_text())
    definitions = schema["$defs"]
    parts = [
        "# Fields of a job\n",
        _NOTICE,
        "A job is YAML or JSON. The same in a form for programs: "
        "[job_spec.schema.json](../../protos/disttrain/v1/job_spec.schema.json).\n",
        schema["description"] + "\n",
        _fields(schema, definitions),
    ]
    objects = {name: part for name, part in definitions.items() if "properties" in part}
    for name in sorted(objects, key=lambda name: (name not in ("Stream", "Execution"), name != "Stream", name)):
        about = objects[name].get("description")
        parts += [f"## {name}\n", *([about + "\n"] if about else []), _fields(objects[name], definitions)]
    return "\n".join(parts)


def _fields(part: dict[str, Any], definitions: dict[str, Any]) -> str:
    required = set(part.get("required", ()))
    rows = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for name, field in part["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field['default'])}`" if "default" in field else ""
        default = "" if default == "`null`" else default
        rows.append(f"| `{name}` | {_value(field, definitions)} | {default} | {_cell(field.get('description', ''))} |")
    return "\n".join(rows) + "\n"


def _value(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What may stand in a field: its type or its choices, with limits."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        choices = definitions[name].get("enum")
        return ", ".join(f"`{choice}`" for choice in choices) if choices else f"[{name}](#{name.lower()})"
    if options := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(_value(option, definitions) for option in options if option.get("type") != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if parts := field.get("prefixItems"):
        return f"list of {len(parts)}, {_value(parts[0], definitions)}"
    if field.get("type") == "array":
        return f"list of {_value(field['items'], definitions)}"
    low, high = (field.get(key) for key in ("minimum", "maximum"))
    limits = f" {low} to {high}" if low is not None and high is not None else f" from {low}" if low is not None else ""
    return f"{field.get('type', 'any')}{limits}"


def cli_page() -> str:
    """Every command with its options, from their help."""
    parts = ["# Commands\n", _NOTICE, "`COMMAND --help` prints the same.\n"]
    for prog, main, names in (
        ("dataserver", dataserver.cli.main, list(dataserver.cli.COMMANDS)),
        ("trainclient", trainclient.cli.main, list(trainclient.cli.COMMANDS)),
    ):
        for name in names:
            shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # by which help is told that it may draw boxes
            with redirect_stdout(shown), suppress(SystemExit):
                main([name, "--help"])
            shown.seek(0)
            parts.append(f"## {prog} {name}\n\n{_command(shown.read())}")
    return "\n".join(parts)


def _command(text: str) -> str:
    """The help of a command as text and tables."""
    text, _, boxes = text.partition("╭")
    found = [" ".join(block.split()) + "\n" for block in _BLOCKS.split(text.strip())[1:]]
    for box in ("╭" + boxes).split("╭")[1:]:
        heading = re.sub(r"[─╮]+", "", box.partition("\n")[0]).strip()
        rows = list(_options(box))
        about = "".join(f"\n{line}\n" for line in rows.pop(0) if line) if rows and len(rows[0]) == 1 else ""
        if rows:
            table = "".join(
                f"| `{_cell(flag)}` | {_cell(meaning)} |\n" for flag, meaning in rows if flag != "-h, --help"
            )
            found.append(f"**{heading.capitalize()}**\n{about}\n| | |\n|---|---|\n{table}")
    return "\n".join(found)


def _options(box: str) -> Iterator[list[str]]:
    """The options of a box of help, each with its meaning; first what stands above them, if anything does."""
    entry: list[str] = []
    for line in (line[1:-1].rstrip() for line in box.splitlines() if line.startswith("│")):
        if not line.strip() or set(line.strip()) == {"─"}:
            continue
        flag, _, meaning = line.strip().partition("  ")
        begins = len(line) - len(line.lstrip()) == 1 and (flag.startswith("-") or not entry or flag.isupper())
        if begins and re.match(r"-|[A-Z.]+$", flag):
            if entry:
                yield entry
            entry = [flag, meaning.strip()]
        elif entry:
            entry[-1] = f"{entry[-1]} {line.strip()}".strip()
        else:
            entry = [line.strip()]
    if entry:
        yield entry


def api_page() -> str:
    """Every call and message of the gRPC API, from the comments of the protos."""
    parts = [
        "# gRPC API\n",
        _NOTICE,
        "The definitions: [protos/disttrain/v1](../../protos/disttrain/v1). "
        "Requests and answers to test a client with: [protos/golden](../../protos/golden). A short client to read: "
        "[JavaScript](../../trainclient/clients/node).\n",
    ]
    for file in _descriptors():
        comments = {tuple(place.path): place for place in file.source_code_info.location}
        parts.append(f"## {file.name.rpartition('/')[2]}\n")
        above = comments[(12,)]  # what stands before the first statement
        parts += [f"```\n{_prose(t)}```\n" for t in (*above.leading_detached_comments, above.leading_comments) if t]
        for number, service in enumerate(file.service):
            parts += [f"### {service.name}\n", _prose(comments[(6, number)].leading_comments)]
            for index, method in enumerate(service.method):
                names = [kind.rpartition(".")[2] for kind in (method.input_type, method.output_type)]
                stream = "stream " * method.server_streaming
                paragraphs = _BLOCKS.split(comments[(6, number, 2, index)].leading_comments.strip())
                about = "\n\n  ".join(" ".join(text.split()) for text in paragraphs)
                parts.append(f"- **{method.name}**({names[0]}) returns {stream}{names[1]}: {about}")
            parts.append("")
        for number, message in enumerate(file.message_type):
            parts += [f"### {message.name}\n", _prose(comments[(4, number)].leading_comments)]
            rows = [
                f"| `{field.name}` | {_type(field)} | {_cell(comments[(4, number, 2, index)].leading_comments)} |"
                for index, field in enumerate(message.field)
            ]
            parts += ["| field | type | meaning |", "|---|---|---|", *rows, ""] if rows else []
        for number, enum in enumerate(file.enum_type):
            rows = [
                f"| `{value.name}` | {_cell(comments[(5, number, 2, index)].leading_comments)} |"
                for index, value in enumerate(enum.value)
            ]
            about = _prose(comments[(5, number)].leading_comments)
            parts += [f"### {enum.name}\n", about, "| value | meaning |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def _descriptors() -> list[FileDescriptorProto]:
    """The protos with their comments."""
    files = sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / "disttrain/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "all"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS), "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={output}", *files], check=True)
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


def _type(field: FieldDescriptorProto) -> str:
    names = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = field.type_name.rpartition(".")[2] or names
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def _prose(comment: str) -> str:
    return "\n".join(line.removeprefix(" ") for line in comment.rstrip().splitlines()) + "\n"


def _cell(text: str) -> str:
    """A text as it may stand in a table."""
    return " ".join(text.split()).replace("|", r"\|")


def main() -> int:
    """Write the pages of the reference."""
    os.environ["COLUMNS"] = "120"  # wider, and boxes of help would stand side by side
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
