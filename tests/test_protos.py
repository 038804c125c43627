"""What is generated from the protos is that of the protos as they are."""

from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[1] / "protos"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def test_stubs_and_the_saved_api_are_those_of_the_protos(tmp_path: Path) -> None:
    files = sorted(PROTOS.glob("disttrain/v1/*.proto"))
    names = [str(path.relative_to(PROTOS)) for path in files]
    outputs = [f"--python_out={tmp_path}", "--include_imports", f"--descriptor_set_out={tmp_path / 'api.binpb'}"]
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{WELL_KNOWN}", *outputs, *names]) == 0
    assert (PROTOS / "api.binpb").read_bytes() == (tmp_path / "api.binpb").read_bytes(), "run scripts/generate_stubs"
    assert names
    for path in files:
        stub = path.relative_to(PROTOS).with_name(f"{path.stem}_pb2.py")
        assert _descriptor(PROTOS / stub) == _descriptor(tmp_path / stub), "run scripts/generate_stubs"


def _descriptor(stub: Path) -> str:
    """The line of a stub that holds its proto; others depend on the version of the compiler."""
    (line,) = (line for line in stub.read_text().splitlines() if "AddSerializedFile" in line)
    return line
