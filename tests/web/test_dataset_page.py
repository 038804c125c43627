"""The pages of datasets give what the index says, pictures that were decoded, and nothing that may not be shown."""

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import numpy as np
import pytest
from audio.clips import clip
from audio.datasets import SERVED
from builders.authority import TOKENS
from cli.test_top import Stranger, grpc_server
from disttrain.v1.data_service_pb2 import DatasetInfo, GetDatasetInfoResponse
from PIL import Image
from serving.harness import index, running
from shards import break_images, make_image, write_interleaved, write_pairs, write_tar
from video.clips import all_frames, video
from video.datasets import SERVED as SERVED_VIDEOS
from web.harness import TIMEOUT_S, get

from dataserver.assembly import load_tokenizer
from dataserver.dataset import Dataset, build_index, count_tokens, lint
from dataserver.jobs import Catalog, dataset_card
from dataserver.reporting.card_sections import card_sections
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.security import Channels, Credentials
from dataserver.serving.config import load_config
from dataserver.web.background import Background
from dataserver.web.datasets import DatasetPages, LocalData
from dataserver.web.rights import ListedDatasets
from dataserver.web.samples import FOUND, MAX_SEARCHING, _fault, dataset_routes, thumbnail
from dataserver.web.server import WebServer

BAD = (3, 0)


@contextmanager
def pages(datasets: dict[str, Path], listed: Any = None) -> Iterator[str]:
    settings = load_config(None, {"datasets": datasets})
    work = Background()
    local = LocalData(Catalog.open(settings), settings.datasets, settings.index_dirs)
    server = WebServer("127.0.0.1", 0, dataset_routes(DatasetPages(local, work, listed)))
    try:
        yield server.address
    finally:
        work.close()
        server.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("web")
    pairs = write_pairs(root / "pairs", 40, 16, seed=1)
    with_bad = index(pairs)
    break_images(with_bad, BAD)
    return {"pairs": with_bad, "docs": index(write_interleaved(root / "docs", 6, 6, seed=2))}


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    with pages(folders) as found:
        yield found


def ask(address: str, path: str, status: int = 200, **fields: Any) -> Any:
    found = get(address, f"/api/{path}?{urlencode(fields)}")
    assert found.status == status, found.body
    return found.json()


def worked(address: str, path: str, **fields: Any) -> Any:
    end = time.monotonic() + TIMEOUT_S
    while "found" not in (answer := ask(address, path, **fields)):
        assert "error" not in answer, answer
        assert time.monotonic() < end
        time.sleep(0.05)
    return answer["found"]


def test_a_card_is_that_of_describe(address: str, folders: dict[str, Path]) -> None:
    catalog = Catalog.open(load_config(None, {"datasets": folders}))
    card = dataset_card(catalog.datasets["pairs"], catalog.tokenizers["bytes"], [], lambda *_: None)
    expected = [section.title for section in card_sections(card, {})]
    found = worked(address, "dataset/card", dataset="pairs")
    assert [section["title"] for section in found] == expected
    assert ["samples", "40 (one image: 40)"] in [[row["label"], row["note"]] for row in found[0]["rows"]]


def search(address: str, **fields: Any) -> list[Any]:
    found, following = [], {}
    for _ in range(100):
        answer = ask(address, "dataset/samples", **fields, **following)
        assert len(answer["samples"]) <= FOUND
        found += answer["samples"]
        if answer["next"] is None:
            return found
        following = answer["next"]
    raise AssertionError("a search without an end")


def test_samples_are_found_by_key_filter_and_size(address: str, folders: dict[str, Path]) -> None:
    everything = search(address, dataset="pairs")
    assert len(everything) == 40
    assert len({(sample["shard"], sample["row"]) for sample in everything}) == 40
    (one,) = search(address, dataset="pairs", key=everything[20]["key"])
    assert one == everything[20]
    assert {s["shard"] for s in search(address, dataset="pairs", key="00001000")} == {1}
    wide = search(address, dataset="pairs", filter="width >= 100")
    assert [s["key"] for s in wide] == [s["key"] for s in everything if s["sizes"][0][0] >= 100]
    large = search(address, dataset="pairs", least=100, most=150)
    assert [s["key"] for s in large] == [s["key"] for s in everything if 100 <= max(s["sizes"][0]) <= 150]
    assert 0 < len(large) < 40
    assert search(address, dataset="pairs", key="no such key") == []


def test_a_sample_has_its_texts_columns_and_images(address: str, folders: dict[str, Path]) -> None:
    found = ask(address, "dataset/sample", dataset="pairs", shard=1, row=4)
    columns = {column["name"]: column["value"] for column in found["columns"]}
    shard = Dataset.open(folders["pairs"]).shards[1]
    assert found["texts"] == list(shard.parts(4).texts)
    assert found["key"] == shard.keys()[4]
    assert columns["punsafe"] == str(shard.column("punsafe")[4].as_py())
    (image,) = found["images"]
    assert (str(image["width"]), str(image["height"])) == (columns["width"], columns["height"])
    assert (image["format"], image["fault"]) == ("jpeg", None)
    assert image["hex"].startswith("ff d8 ff")
    document = ask(address, "dataset/sample", dataset="docs", shard=0, row=0)
    assert len(document["images"]) == document["kinds"].count(1)
    assert len(document["texts"]) == document["kinds"].count(0)


def test_a_picture_is_the_image_decoded_and_encoded_again(address: str, folders: dict[str, Path]) -> None:
    query = urlencode({"dataset": "pairs", "shard": 0, "row": 0, "image": 0, "side": 64})
    found = get(address, f"/api/dataset/picture?{query}")
    assert found.headers["content-type"] == "image/jpeg"
    catalog = Catalog.open(load_config(None, {"datasets": folders}))
    dataset = catalog.datasets["pairs"]
    ref = dataset.shards[0].image(0, 0)
    with Image.open(io.BytesIO(found.body)) as picture, Image.open(io.BytesIO(dataset.read(ref))) as stored:
        assert max(picture.size) == min(64, max(stored.size))
        expected = np.asarray(stored.convert("RGB").resize(picture.size, Image.Resampling.BILINEAR), np.int64)
        assert np.abs(np.asarray(picture, np.int64) - expected).mean() < 8


def test_a_broken_image_has_its_bytes_and_its_fault_and_no_picture(address: str) -> None:
    shard, row = divmod(BAD[0], 16)
    found = ask(address, "dataset/sample", dataset="pairs", shard=shard, row=row)
    (image,) = found["images"]
    assert image["fault"]
    assert not image["served"]
    assert len(image["hex"].split()) <= 64
    query = {"dataset": "pairs", "shard": shard, "row": row, "image": 0}
    assert "error" in ask(address, "dataset/picture", 404, **query)


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("card", {"dataset": "../pairs"}, 404),
        ("card", {}, 404),
        ("samples", {"dataset": "pairs", "filter": "__import__('os')"}, 400),
        ("samples", {"dataset": "pairs", "filter": "no_column > 1"}, 400),
        ("samples", {"dataset": "pairs", "filter": "(" * 5000}, 400),
        ("samples", {"dataset": "pairs", "shard": "-1"}, 400),
        ("samples", {"dataset": "pairs", "least": "1e9"}, 400),
        ("samples", {"dataset": "pairs", "row": "9" * 30}, 400),
        ("sample", {"dataset": "pairs", "shard": 3, "row": 0}, 404),
        ("sample", {"dataset": "pairs", "shard": 0, "row": 16}, 404),
        ("picture", {"dataset": "pairs", "shard": 0, "row": 0, "image": 1}, 404),
        ("picture", {"dataset": "pairs", "shard": 0, "row": 0, "image": 0, "side": 100000}, 400),
        ("findings", {"dataset": "pairs", "kind": "<b>"}, 400),
        ("findings", {"dataset": "pairs", "first": "99999999"}, 400),
    ],
)
def test_hostile_fields_are_refused_in_words(address: str, path: str, fields: dict[str, Any], status: int) -> None:
    found = ask(address, f"dataset/{path}", status, **fields)
    assert list(found) == ["error"]


def test_findings_are_those_of_lint_and_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_pairs(tmp_path / "d", 12, 12, seed=3)
    odd_members(folder, 250)
    index(folder)
    monkeypatch.setattr("dataserver.web.datasets.MAX_FINDINGS", 210)
    with pages({"d": folder}) as address:
        found = worked(address, "dataset/findings", dataset="d")
        last = worked(address, "dataset/findings", dataset="d", first=200)
        kind = found["findings"][0]["kind"]
        of_kind = worked(address, "dataset/findings", dataset="d", kind=kind)
    counts = lint(folder).counts
    assert {count["kind"]: count["count"] for count in found["counts"]} == counts
    assert sum(counts.values()) >= 250
    assert (len(found["findings"]), found["listed"]) == (100, 210)
    assert found["unlisted"] == sum(counts.values()) - 210
    assert len(last["findings"]) == 10
    assert {f["kind"] for f in of_kind["findings"]} == {kind}
    assert all(f["shard"] == "00000.tar" for f in found["findings"])


def odd_members(folder: Path, count: int) -> None:
    """Samples without a text, whose names are hostile."""
    import tarfile

    with tarfile.open(folder / "00000.tar", "a") as tar:
        for n in range(count):
            info = tarfile.TarInfo(f"x{n:05d}<img src=x onerror=alert(1)>.jpg")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    (folder / "00000.parquet").unlink(missing_ok=True)


def test_a_dataset_that_no_server_lists_for_these_credentials_does_not_exist(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"alice {TOKENS['alice']}\nops {TOKENS['ops']}\n")
    (tmp_path / "alice").write_text(TOKENS["alice"])
    (tmp_path / "policy.yaml").write_text("identities:\n  - {name: alice, token: alice, datasets: [docs]}\n")
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    credentials = Credentials(token_file=tmp_path / "alice")
    options = {"token_file": tmp_path / "tokens", "policy": tmp_path / "policy.yaml"}
    with running(folders, credentials=credentials, **options) as server:
        listed = ListedDatasets(NamedServers((server.address, "127.0.0.1:1"), Channels(credentials))).fingerprints
        with pages(folders, listed) as address:
            found = ask(address, "datasets")
            assert [dataset["name"] for dataset in found["datasets"]] == ["docs"]
            assert found["withheld"] == 1
            for path in ("card", "findings", "samples", "sample", "picture"):
                hidden = ask(address, f"dataset/{path}", 404, dataset="pairs", shard=0, row=0)
                never = ask(address, f"dataset/{path}", 404, dataset="other", shard=0, row=0)
                assert hidden["error"] == never["error"].replace("other", "pairs")
            assert ask(address, "dataset/samples", dataset="docs")["samples"]


def test_where_no_server_answers_no_dataset_is_shown(folders: dict[str, Path]) -> None:
    listed = ListedDatasets(NamedServers(("127.0.0.1:1",), Channels())).fingerprints
    with pages(folders, listed) as address:
        assert ask(address, "datasets") == {"datasets": [], "withheld": 2}


class Lister(Stranger):
    """Lists datasets; says so to who waits when it is asked, and answers when it is let."""

    def __init__(self, *names: str) -> None:
        super().__init__(b"")
        self.names, self.asked, self.may_answer = names, threading.Event(), threading.Event()
        self.may_answer.set()

    def service(self, _details: Any) -> Any:
        def answer(_request: bytes, _context: Any) -> bytes:
            self.asked.set()
            self.may_answer.wait(60)
            return GetDatasetInfoResponse(datasets=[DatasetInfo(name=name) for name in self.names]).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


def test_rights_that_are_withdrawn_expire_and_nobody_waits_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Lister("d")
    with grpc_server(server) as address:
        listed = ListedDatasets(NamedServers((address,), Channels()))
        assert list(listed.fingerprints()) == ["d"]
        server.names = ()
        assert list(listed.fingerprints()) == ["d"], "it is not asked at every request"
        monkeypatch.setattr("dataserver.web.rights.AGAIN_S", 0.0)
        server.asked.clear()
        server.may_answer.clear()
        asking = threading.Thread(target=listed.fingerprints)
        asking.start()
        assert server.asked.wait(60)
        begun = time.monotonic()
        assert list(listed.fingerprints()) == ["d"]
        assert time.monotonic() - begun < 30, "one thread asks, and the others go on"
        server.may_answer.set()
        asking.join(60)
        assert list(listed.fingerprints()) == []
        listed.close()


def test_clips_are_told_from_images(tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    heard = [("a.flac", clip(0.5, "flac", 22_050, 2)), ("a.jpg", make_image(np.random.default_rng(0), 40, 30))]
    write_tar(tmp_path / "0.tar", [*heard, ("a.txt", b"both"), ("b.wav", clip(0.1)), ("b.txt", b"a clip")])
    build_index(tmp_path, workers=1, rules=SERVED)
    with pages({"heard": tmp_path}) as address:
        both, alone = search(address, dataset="heard")
        assert (both["sizes"], both["clips"], both["first_image"]) == ([[40, 30]], 1, 0)
        assert (alone["sizes"], alone["clips"], alone["first_image"]) == ([], 1, None)
        assert search(address, dataset="heard", least=1000) == []  # samples of sound are no sides
        items = ask(address, "dataset/sample", dataset="heard", shard=0, row=0)["images"]
        assert [(item["is_audio"], item["format"], item["fault"]) for item in items] == [
            (False, "jpeg", None), (True, "flac", None),
        ]  # fmt: skip
        refused = ask(address, "dataset/picture", 404, dataset="heard", shard=0, row=1, image=0)
        assert "item 0 of the sample is a clip" in str(refused)


def test_a_video_has_its_first_frame_and_its_faults_are_told_without_decoding_all_of_it(tmp_path: Path) -> None:
    shown = video("h264", 25, seed=3)
    folder = tmp_path / "videos"
    write_tar(folder / "0.tar", [("0.mp4", shown), ("0.txt", b"a video")])
    build_index(folder, workers=1, rules=SERVED_VIDEOS)
    count_tokens(folder, load_tokenizer("bytes"))
    with pages({"videos": folder}) as address:
        found = ask(address, "dataset/samples", dataset="videos")["samples"]
        assert [(one["videos"], one["first_image"], one["sizes"]) for one in found] == [(1, 0, [])]
        (whole,) = ask(address, "dataset/sample", dataset="videos", shard=0, row=0)["images"]
        assert (whole["is_video"], whole["frames"], whole["served"], whole["fault"]) == (True, 25, True, None)
        answer = get(address, "/api/dataset/picture?dataset=videos&shard=0&row=0&image=0&side=64")
    assert (answer.status, answer.headers["content-type"]) == (200, "image/jpeg")
    pixels = np.asarray(Image.open(io.BytesIO(answer.body)).convert("RGB")).astype(int)
    first = all_frames(shown)[0][1].astype(int)
    assert pixels.shape == first.shape
    assert np.abs(pixels - first).mean() < 6, "JPEG loses some"
    ref, at = Dataset.open(folder).shards[0].image(0, 0), shown.index(b"mdat") + 4
    damaged = shown[:at] + bytes(len(shown) - at)
    for broken in (damaged, shown[: len(shown) // 2], b"", damaged[:100]):
        fault = _fault(broken, ref)
        assert fault is not None
        assert not fault.is_served
        assert thumbnail(broken, ref, 64) is None


def test_searches_take_turns(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserver.web.samples.DECODING_S", 0.2)
    entered, leave = threading.Semaphore(0), threading.Event()

    def slow(*_: Any) -> Any:
        entered.release()
        leave.wait(TIMEOUT_S)
        return {"samples": []}

    monkeypatch.setattr("dataserver.web.samples.SamplePages._found", slow)
    with pages(folders) as address:
        path = "/api/dataset/samples?dataset=pairs"
        searches = [threading.Thread(target=get, args=(address, path)) for _ in range(MAX_SEARCHING)]
        for search in searches:
            search.start()
            assert entered.acquire(timeout=TIMEOUT_S)
        busy = get(address, path)
        leave.set()
        for search in searches:
            search.join()
        assert (busy.status, "many searches" in busy.json()["error"]) == (503, True)
        assert get(address, path).status == 200
