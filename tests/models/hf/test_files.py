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
from trainclient.models.hf.damaged_files import not_safetensors
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
    ],
)
def test_weights_that_are_none(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "cannot be read as safetensors" in refusal(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1234567\n" % (b"0" * 64)
DOWNLOADS = [
    (b"", "it is empty; download it again"),
    (POINTER, "it is a pointer of git-lfs, which stands for 1234567 bytes; run `git lfs pull` in its repository"),
    (b"\n<!DOCTYPE html>\n<html><body>Sign in</body></html>", "it is a page ('<!DOCTYPE html>'), as downloads that"),
    (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", "it is compressed by gzip; unpack it"),
]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *DOWNLOADS,
        (b"Entry not found", "it begins with 'Entry not found', not with a header; download it again"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00", "it is a zip archive, as torch.save makes of pickles, which are never"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "it is a pickle, which is never read; take safetensors"),
        (struct.pack("<Q", 900) + b'{"a"', "it is cut: 12 bytes, and its header alone has 900; download it again"),
    ],
)
def test_downloads_that_are_no_weights(folder: Path, content: bytes, message: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    said = refusal(folder)
    assert said.startswith(f"{path} cannot be read as safetensors: {message}")
    assert "\n" not in said


@pytest.mark.parametrize(("content", "message"), DOWNLOADS)
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
def test_downloads_that_are_no_json(folder: Path, name: str, content: bytes, message: str) -> None:
    if name == "preprocessor_config.json":
        folder = save(make_tower("siglip"), folder.parent / "tower")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / name).write_bytes(content)
    assert refusal(folder).startswith(f"{folder / name} holds no JSON: {message}")


def test_weights_that_are_cut_or_longer(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    cut = f"it is cut: {len(whole) - 100} bytes, and its header describes {len(whole)}; download it again"
    assert refusal(folder) == f"{path} cannot be read as safetensors: {cut}"
    path.write_bytes(whole + b"0")
    assert f"it has {len(whole) + 1} bytes, and its header describes {len(whole)}" in refusal(folder)


def test_headers_of_any_length_are_read(folder: Path, tmp_path: Path) -> None:
    """Lengths that begin as a page, a pickle, or gzip."""
    found = load_file(folder / "model.safetensors")
    for length in (0x3C, 0x280, 0x480, 0x8B1F, 0x088B1F, 0x3C20):
        content = found["model.norm.weight"].numpy().tobytes()
        entry = {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}
        text = json.dumps(entry, separators=(",", ":")).encode()
        if length < len(text):
            text = b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
            content = bytes(4)
        path = tmp_path / "one.safetensors"
        path.write_bytes(struct.pack("<Q", length) + text.ljust(length) + content)
        assert not_safetensors(path) == ""
        load_file(path)


def test_links_that_lead_nowhere(folder: Path) -> None:
    """As a cache is whose blobs were removed."""
    for name in ("config.json", "model.safetensors"):
        path, blob = folder / name, folder / f"blob-{name}"
        path.rename(blob)
        path.symlink_to("nowhere")
        assert f"{path} is a link to nowhere, where no file is" in refusal(folder)
        path.unlink()
        blob.rename(path)


def test_names_that_stand_twice(folder: Path) -> None:
    header, content = header_of((folder / "model.safetensors").read_bytes())
    again = json.dumps({"lm_head.weight": header["lm_head.weight"]})
    text = f"{json.dumps(header)[:-1]},{again[1:]}".encode()
    (folder / "twice.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    (folder / "twice.safetensors").rename(folder / "model.safetensors")
    assert "cannot be read as safetensors: it gives 'lm_head.weight' twice" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = '{"weight_map": {"lm_head.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    assert "index.json holds no JSON: it gives 'lm_head.weight' twice" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(folder: Path, dtype: torch.dtype, value: float) -> None:
    path = folder / "model.safetensors"
    state = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    state["model.layers.1.mlp.up_proj.weight"][3, 5:7] = value
    save_file(state, path)
    assert refusal(folder) == (
        f"{path} holds model.layers.1.mlp.up_proj.weight with 2 of 1792 values that are not finite, such as {value} at "
        "[3, 5]; take weights that are whole"
    )
    assert load_pretrained(folder, names={"embed.weight"}).state, "what another process holds is its to find"


def test_types_are_known_before_weights_are_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    save_file(state | {"model.norm.weight": state["model.norm.weight"].to(torch.float8_e5m2)}, path)
    with pytest.raises(PretrainedError, match=r"holds model\.norm\.weight as F8_E5M2; one of"):
        load_pretrained(folder, names=())


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
        (
            {str(n): f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)},
            "names 3 files, and 3 are not there, such as model-00001-of-00003.safetensors; download them",
        ),
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
