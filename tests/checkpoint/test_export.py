"""What an export takes for the tokenizer of its job."""

import base64
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataserver.assembly import load_tokenizer
from trainclient.checkpoint.export import ExportConfig, _require_its_tokenizer, export
from trainclient.checkpoint.state import CheckpointError, Manifest, TrainerState, write_manifest
from trainclient.models.hf import PretrainedError
from trainclient.models.hf.exporting import companions_of


def stream_of(name: str, digest: str) -> Any:
    return SimpleNamespace(tokenizer=SimpleNamespace(name=name, digest=digest))


def test_a_model_of_sentencepiece_is_the_jobs_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"\nmodel")
    _require_its_tokenizer(tmp_path, stream_of("llama", hashlib.sha256(b"\nmodel").hexdigest()))
    assert companions_of(None, tmp_path) == {"tokenizer.model": file}
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model has the SHA-256 .* and the tokenizer llama of the job"
    ):
        _require_its_tokenizer(tmp_path, stream_of("llama", "0" * 64))
    (tmp_path / "tokenizer.json").write_text("{}")
    _require_its_tokenizer(tmp_path, stream_of("llama", hashlib.sha256(b"\nmodel").hexdigest()))


@pytest.mark.parametrize("name", ["own.tiktoken", "tokenizer.model"])
def test_ranks_of_tiktoken_are_the_jobs_with_their_pattern(name: str, tmp_path: Path) -> None:
    """Whatever the file is called: Llama's is a `tokenizer.model`."""
    pytest.importorskip("tiktoken", reason="the extra tiktoken reads such files")
    file, pattern = tmp_path / name, tmp_path / f"{name}.pattern"
    file.write_text("".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256)))
    pattern.write_text(r"\w+|\W")
    digest = load_tokenizer("own", file).digest
    _require_its_tokenizer(tmp_path, stream_of("own", digest))
    assert companions_of(None, tmp_path) == {file.name: file, pattern.name: pattern}
    pattern.write_text(r"\w|\W")
    with pytest.raises(CheckpointError, match=rf"{name} has the SHA-256"):
        _require_its_tokenizer(tmp_path, stream_of("own", digest))


def test_a_built_in_tokenizer_has_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="the tokenizer bytes of the job is built in and has no files; leave --to"
    ):
        _require_its_tokenizer(tmp_path, stream_of("bytes", "0" * 64))
    with pytest.raises(PretrainedError, match=r"has no tokenizer\.json, tokenizer\.model or NAME\.tiktoken; give"):
        companions_of(None, tmp_path)


def test_adapters_have_no_tokenizer(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(TrainerState({"version": 1, "stream_id": "", "step": 1, "stream": "{}"}, {}), {}))
    config = ExportConfig(tmp_path, tmp_path / "out", "llm", tokenizer=tmp_path, adapter=True)
    with pytest.raises(CheckpointError, match="--adapter writes no tokenizer; leave --tokenizer out, or --adapter"):
        export(config)
