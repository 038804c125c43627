"""Files that are no checkpoints, or wish us harm."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from models.hf.tiny import BACKBONES, make_backbone, make_tower, save
from safetensors.torch import load_file, save_file

from trainclient.models.hf import PretrainedError, load_pretrained
from trainclient.models.hf.files import MAX_CONFIG_BYTES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_backbone("llama"), tmp_path_factory.mktemp("saved") / "c")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    made = tmp_path / "c"
    made.mkdir()
    for path in saved.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    return made


def refusal(folder: Path) -> str:
    with pytest.raises(PretrainedError) as refused:
        load_pretrained(folder)
    return str(refused.value)


def test_folders_without_a_checkpoint(tmp_path: Path, folder: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pytorch_model.bin: pickle, which can run code and is never read" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no JSON"),
        (b"[1]", "holds a list; an object is required"),
        (b"{" * 100_000, "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b"\xff\xfe{}", "holds no JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "is longer than 1048576 bytes"),
    ],
)
def test_configurations_that_are_none(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert message in refusal(folder)


def test_a_configuration_that_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "there is no file" in refusal(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        b"cut",
    ],
)
def test_weights_that_are_none(folder: Path, content: bytes) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100] if content == b"cut" else content)
    assert "cannot be read as safetensors" in refusal(folder)


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_a_header_with_a_tensor_that_is_not_there(folder: Path) -> None:
    header, content = header_of((folder / "model.safetensors").read_bytes())
    header["model.norm.weight"]["shape"] = [2**40]
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    assert "cannot be read as safetensors" in refusal(folder)


def test_tensors_of_other_types_and_shapes(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    for changed, message in (
        (state["model.norm.weight"].to(torch.int8), "holds model.norm.weight as I8; one of F64, F32, F16, BF16"),
        (state["model.norm.weight"].to(torch.float8_e4m3fn), "as F8_E4M3; one of"),
        (state["model.norm.weight"][:-1].clone(), r"holds shape [31] for model.norm.weight; shape [32] is required"),
        (state["model.norm.weight"][None].clone(), "holds shape [1, 32] for model.norm.weight"),
    ):
        save_file(state | {"model.norm.weight": changed}, path)
        assert message in refusal(folder)
    save_file({key: value for key, value in state.items() if key != "model.embed_tokens.weight"}, path)
    assert "holds no tensor model.embed_tokens.weight; the weights of a llama do" in refusal(folder)


def in_shards(folder: Path, placed: Any) -> Path:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "..",
        ".hidden.safetensors",
        "pytorch_model.bin",
        "model.safetensors\n",
        "a\\b.safetensors",
        "",
        5,
        None,
    ],
)
def test_an_index_cannot_leave_the_folder(folder: Path, file: Any) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, folder.parent / "outside.safetensors")
    message = refusal(in_shards(folder, {"model.norm.weight": file}))
    assert "the name of a safetensors file in the same folder is required" in message


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        (None, "has no weight_map"),
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"model.norm.weight": "model-00002-of-00002.safetensors"}, "cannot be read as safetensors"),
        (
            {"more": "model-00001-of-00001.safetensors"},
            "places more in model-00001-of-00001.safetensors, which does not",
        ),
        ({str(n): f"m{n}.safetensors" for n in range(1025)}, "names 1025 files; at most 1024"),
    ],
)
def test_an_index_that_places_nothing(folder: Path, placed: Any, message: str) -> None:
    assert message in refusal(in_shards(folder, placed))


ODD = [None, True, 0, -1, 3, 2**70, 1.5, float("nan"), float("inf"), "x", [1], [[1]], {}, {"rope_type": []}]
UNWRITTEN = ("layer_types", "rope_scaling", "head_dim", "vision_config", "in_chans", "mlp_ratio", "quantization_config")


@pytest.mark.parametrize("name", ["llama", "qwen2", "clip", "qwen2-vl"])
def test_any_value_of_a_field_is_understood_or_refused(name: str, tmp_path: Path) -> None:
    """Nothing else is raised; and nothing that is loaded differs in the shapes of its tensors."""
    folder = save(make_backbone(name) if name in BACKBONES else make_tower(name), tmp_path / "c")
    fields = json.loads((folder / "config.json").read_text())
    shapes = {key: tensor.shape for key, tensor in load_pretrained(folder).state.items()}
    for field in {*fields, *UNWRITTEN}:
        for value in ODD:
            (folder / "config.json").write_text(json.dumps(fields | {field: value}))
            try:
                found = load_pretrained(folder)
            except PretrainedError:
                continue
            assert {key: tensor.shape for key, tensor in found.state.items()} == shapes, (field, value)


def test_a_cache_of_links_is_read(folder: Path, tmp_path: Path) -> None:
    """As huggingface_hub keeps them: names that lead to blobs elsewhere."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert load_pretrained(snapshot).config.width == 32
