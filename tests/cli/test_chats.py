"""What commands say of conversations: those that are long, and what a template renders."""

import json
from pathlib import Path

import pytest
from builders.chats import write_chat_folder
from builders.jobs import module
from serving.harness import job_data
from shards import write_tar

from dataserver.assembly import chat_digest, load_tokenizer, open_chat
from dataserver.cli.describe import describe
from dataserver.cli.index import index
from dataserver.cli.lint import lint
from dataserver.cli.sizes import LengthFlags, sizes
from dataserver.dataset import (
    Conversations,
    Dataset,
    IndexRules,
    MediaMembers,
    Quarantine,
    TokensMissingError,
    build_index,
    count_chats,
)
from dataserver.dataset.index.chat_tokens import chat_key
from dataserver.jobs import Catalog, DatasetMismatchError, fill_job
from dataserver.planning.job.fields import CutAt

SHORT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LONG = [*SHORT, {"role": "user", "content": "c" * 100}, {"role": "assistant", "content": "d"}]
WIDE = [{"role": "user", "content": "e" * 200}, {"role": "assistant", "content": "f"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_folder(tmp_path_factory.mktemp("qwen"), "qwen2-vl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("d")
    chats = {"short": SHORT, "long": LONG, "wide": WIDE}
    write_tar(folder / "0.tar", [(f"{n}.json", json.dumps({"messages": m}).encode()) for n, m in chats.items()])
    build_index(folder, workers=1, rules=IndexRules(conversations=Conversations.CHAT))
    chat = open_chat(load_tokenizer("qwen", tokenizer))
    count_chats(folder, chat)
    chat.close()
    return folder


def write_job(file: Path, **conversations: str) -> Path:
    fields = {
        "modules": [module("encoder"), module("backbone")],
        "datasets": [{"name": "d", "conversations": conversations}, {"name": "elsewhere", "filter": "n > 1"}],
        "tokenizer": {"name": "qwen"},
        "generation": {"ratio": "0"},
        "seq_len": 100,
    }
    file.write_text(json.dumps(job_data(**fields)))
    return file


def test_conversations_beyond_a_sequence_of_a_job_are_findings(
    folder: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"name": "d", "tokenizer": f"qwen={tokenizer}"}
    for conversations, expected in (
        ({}, {"long": "long_conversation", "wide": "long_conversation"}),
        ({"cut_at": "turn"}, {"long": "cut_conversation", "wide": "long_conversation"}),
    ):
        with pytest.raises(SystemExit):
            lint(folder, job=write_job(tmp_path / "job.json", **conversations), json=True, **given)
        found = json.loads(capsys.readouterr().out)
        assert {f["key"]: f["kind"] for f in found["findings"]} == expected
        assert {f["shard"] for f in found["findings"]} == {"0.tar"}
    details = {f["key"]: f["detail"] for f in found["findings"]}
    assert (
        "tokens, seq_len is 100: cut behind the last answer that fits; raise it to have them whole" in details["long"]
    )
    assert details["wide"].endswith("seq_len is 100: left out; no answer fits; raise it")
    describe(folder, job=tmp_path / "job.json", **given)
    said = capsys.readouterr().out
    assert "cut_conversation   1  served" in said
    assert "long_conversation  1  left out" in said
    with pytest.raises(SystemExit):
        lint(folder, job=tmp_path / "job.json", **given)
    assert "wide\tlong_conversation" in capsys.readouterr().out


def test_jobs_whose_modules_and_weights_need_other_datasets(
    folder: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each encoder reads one dataset, this one has no weight at first, and both have conversations."""
    job, given = write_job(tmp_path / "job.json"), {"tokenizer": f"qwen={tokenizer}"}
    data = json.loads(job.read_text())
    entry = {**data["stream"]["datasets"][0], "filter": "width is null"}
    later = [{"from_step": 0, "weight": "0"}, {"from_step": 5, "weight": "1"}]
    data["stream"]["datasets"] = [{**entry, "weight": later}, {**entry, "name": "elsewhere"}]
    encoders = [module("encoder", f"vit-{name}", datasets=[name]) for name in ("d", "elsewhere")]
    data["execution"]["modules"] = [*encoders, module("backbone")]
    job.write_text(json.dumps(data))
    with pytest.raises(SystemExit):
        lint(folder, job=job, name="d", **given)
    assert "wide\tlong_conversation" in capsys.readouterr().out
    describe(folder, job=job, name="d", **given)
    assert "long_conversation  2  left out" in capsys.readouterr().out
    describe(folder, job=job, **given)
    said = capsys.readouterr().out
    assert "width is null" in said
    assert "long_conversation" not in said
    with pytest.raises(ValueError, match=r"has conversations of \['d', 'elsewhere'\]; choose one by --name"):
        lint(folder, job=job, **given)


def test_only_the_set_of_a_job_is_listed(
    folder: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, given = write_job(tmp_path / "job.json"), {"name": "d", "tokenizer": f"qwen={tokenizer}"}
    data = json.loads(job.read_text())
    (entry, _) = data["stream"]["datasets"]
    listed = tmp_path / "list"
    quarantine = Quarantine.from_samples([("0.tar", "wide")])
    quarantine.save(listed)
    entry["quarantine"] = quarantine.digest
    job.write_text(json.dumps(data))
    with pytest.raises(DatasetMismatchError, match="pins quarantine list"):
        lint(folder, job=job, **given)
    with pytest.raises(SystemExit):
        lint(folder, job=job, quarantine=listed, **given)
    said = capsys.readouterr().out
    assert "long\tlong_conversation" in said
    assert "wide\t" not in said
    job.write_text(json.dumps({**data, "stream": {**data["stream"], "datasets": [{**entry, "fingerprint": "0" * 64}]}}))
    for command in (lint, describe):
        with pytest.raises(DatasetMismatchError, match="of the job has fingerprint 0000"):
            command(folder, job=job, quarantine=listed, **given)


def test_commands_count_what_a_template_renders(
    folder: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = open_chat(load_tokenizer("qwen", tokenizer))
    (shard,) = Dataset.open(folder).shards
    tokens, counts = shard.tokens.chat_counts(chat_key(chat.digest, chat.chat_digest))
    describe(folder, tokenizer=f"qwen={tokenizer}")
    said = capsys.readouterr().out
    assert f"tokens       {tokens.sum()}" in " ".join(said.split("\n")), said
    assert f"Text tokens: {tokens.min()} to {tokens.max()}" in said
    assert f"Learned tokens of a conversation: {counts.targets.min()} to {counts.targets.max()}" in said
    sizes(folder, tmp_path / "sizes.json", tokenizer=f"qwen={tokenizer}")
    found = json.loads((tmp_path / "sizes.json").read_text())["samples"]
    assert sum(one["count"] for one in found) == 3
    assert abs(max(one["text_tokens"] for one in found) - (int(tokens.max()) - 2)) < 16
    whole = sorted(one["text_tokens"] for one in found)
    for flags, left, cut in ((LengthFlags(100), 1, 0), (LengthFlags(100, CutAt.TURN), 2, 1)):
        sizes(folder, tmp_path / "sizes.json", tokenizer=f"qwen={tokenizer}", lengths=flags)
        found = json.loads((tmp_path / "sizes.json").read_text())["samples"]
        assert sum(one["count"] for one in found) == left
        assert {whole[0]} <= {one["text_tokens"] for one in found} <= {whole[0] - 1, whole[0]}, "no line break behind"
        said = capsys.readouterr().out
        cuts = "1 are cut behind an answer, " if cut else ""
        assert f"{left} samples of" in said
        assert f"; {3 - left + cut} conversations longer than 100 tokens: {cuts}{3 - left} are left out" in said
    for flags, words in (
        (LengthFlags(100, max_images=2), "holds conversations, which are neither split nor generated"),
        (LengthFlags(None, CutAt.TURN), "nothing says how long a sequence is"),
    ):
        with pytest.raises(ValueError, match=words):
            sizes(folder, tmp_path / "sizes.json", tokenizer=f"qwen={tokenizer}", lengths=flags)


def test_a_job_with_another_template_is_told_which_there_is(folder: Path, tokenizer: Path) -> None:
    chat = open_chat(load_tokenizer("qwen", tokenizer))
    (shard,) = Dataset.open(folder).shards
    reason = rf"chat template 0f of the tokenizer {chat.digest}; run: dataserver index .*FOLDER \(it was rendered by "
    with pytest.raises(
        TokensMissingError, match=reason + rf"{chat.chat_digest}: the template .* or an earlier release"
    ):
        shard.tokens.chat_counts(chat_key(chat.digest, "0f"))
    with pytest.raises(TokensMissingError, match=r"FOLDER$"):
        shard.tokens.chat_counts(chat_key("0f", chat.chat_digest))


def test_an_index_with_clips_has_the_template_that_its_jobs_have(tmp_path: Path) -> None:
    """The digest tells which clips the folder's processor refuses."""
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    write_tar(tmp_path / "0.tar", [("a.json", json.dumps({"messages": SHORT}).encode())])
    files = write_chat_folder(tmp_path / "q", "Qwen2VLProcessor")
    rules = IndexRules(conversations=Conversations.CHAT, audio=MediaMembers.SERVE)
    index((tmp_path,), rules, tokenizer=(f"qwen={files}",))
    dataset, tokenizer = Dataset.open(tmp_path), load_tokenizer("qwen", files)
    data = json.loads(write_job(tmp_path / "job.json").read_text())["stream"]
    entry = {"name": "d", "conversations": {}}
    job = {"stream": {**data, "datasets": [entry]}}
    (filled,) = fill_job(job, Catalog({"d": dataset}, {"qwen": tokenizer}))["stream"]["datasets"]
    template = filled["conversations"]["template"]
    assert template == chat_digest(tokenizer, ["audio"]) != chat_digest(tokenizer)
    assert len(dataset.shards[0].tokens.chat_counts(chat_key(tokenizer.digest, template))[0]) == 1
    describe(tmp_path, tokenizer=f"qwen={files}")
