import ast
import inspect
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataserver.addresses import split_address
from dataserver.planning.job.fields.text import MAX_TEXT_BYTES
from dataserver.serving.binding import bind_grpc
from dataserver.serving.config import ConfigError, ServerConfig, load_config, user_cache

DATASETS = {"datasets": {"d": "/data"}}


def test_a_file_is_overridden_by_flags_entry_by_entry(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("datasets: {a: shards/a, b: /abs/b}\nmax_streams: 3\nlisten: 127.0.0.1:1234\n")
    config = load_config(file, {"datasets": {"b": Path("other")}, "max_streams": 5})
    assert config.datasets == {"a": tmp_path / "shards/a", "b": Path("other")}
    assert config.max_streams == 5
    assert config.listen == "127.0.0.1:1234"


def test_every_key_can_stand_in_the_file(tmp_path: Path) -> None:
    config = load_config(None, {**DATASETS, "tokenizers": {"t": "/t.json"}, "peers": ["a:1"], "insecure": True})
    file = tmp_path / "server.yaml"
    file.write_text(config.model_dump_json())
    assert load_config(file, {}) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no dataset is configured"),
        ({**DATASETS, "prefetch": 3}, "key 'prefetch' is unknown.*prefetch_bytes"),
        ({**DATASETS, "max_streams": 0}, "'max_streams'.*greater than or equal to 1"),
        ({**DATASETS, "max_streams": "many"}, "'max_streams'"),
        ({**DATASETS, "quarantines": {"x": "/q"}}, r"quarantines names \['x'\]"),
        ({**DATASETS, "tokenizers": {"bytes": "/t"}}, "built in"),
        (
            {"datasets": {"h o!": "/d"}},
            "^configuration key 'datasets' holds the name 'h o!': a name is required: 1 to 128 ASCII",
        ),
        ({"datasets": {"../d": "/data"}}, "datasets"),
        ({"datasets": {"d": 3}}, "key 'datasets.d' is 3: the path of a file or folder is required"),
        ({**DATASETS, "listen": "127.0.0.1"}, "HOST:PORT"),
        ({**DATASETS, "listen": "127.0.0.1:99999"}, "HOST:PORT"),
        ({**DATASETS, "listen": "127.0.0.1:-1"}, "HOST:PORT"),
        ({**DATASETS, "metrics_listen": "127.0.0.1:1:2"}, "metrics_listen is '127.0.0.1:1:2'; HOST:PORT"),
        ({**DATASETS, "peers": ["http://cpu1:1"]}, "an entry of peers is 'http://cpu1:1'; HOST:PORT"),
        (
            {**DATASETS, "peers": ["a:1", "b:9-8"]},
            "'peers' is .*: 'b:9-8' is no range of addresses; HOST:FIRST-LAST",
        ),
        (
            {**DATASETS, "peers": []},
            r"^configuration key 'peers' is \[\]: it has no address; HOST:PORT of at least one",
        ),
        ({**DATASETS, "peers": ["a:1-1025"]}, "the list of addresses has more than 1024"),
        ({**DATASETS, "workers": 2}, "key 'workers' is unknown"),
        ({**DATASETS, "listen": "0.0.0.0:50051"}, "--insecure"),
        ({**DATASETS, "listen": "[::]:50051"}, "--insecure"),
        ({**DATASETS, "listen": "myhost.example:50051"}, "--insecure"),
    ],
)
def test_a_wrong_configuration_names_the_key(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, data)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.8.8:50051", "localhost:1", "[::1]:50051"])
def test_loopback_needs_no_permission(listen: str) -> None:
    assert load_config(None, {**DATASETS, "listen": listen}).listen == listen


def test_insecure_permits_any_address() -> None:
    assert load_config(None, {**DATASETS, "listen": "0.0.0.0:50051", "insecure": True}).insecure


@pytest.mark.parametrize(
    "content", ["- a\n", "a: [", "{1: 2}", "text", "a: !!timestamp 2001-99-99", "listen: a:1\nlisten: b:2"]
)
def test_a_file_that_is_no_configuration(content: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"server\.yaml"):
        load_config(file, {})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read"):
        load_config(tmp_path / "no.yaml", {})


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("host:0") == ("host", 0)


def test_every_key_is_documented() -> None:
    (definition,) = ast.parse(inspect.getsource(ServerConfig)).body
    assert isinstance(definition, ast.ClassDef)
    documented = {
        field.target.id
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr)
    }
    assert documented == set(ServerConfig.model_fields)


def test_a_file_of_the_largest_size_is_read_and_a_longer_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    text = "datasets: {d: /data}\n#"
    file.write_text(text + " " * (MAX_TEXT_BYTES - len(text)))
    assert load_config(file, {}).datasets == {"d": Path("/data")}
    file.write_text(text + " " * (MAX_TEXT_BYTES + 1 - len(text)))
    with pytest.raises(ConfigError, match="it has 1048577 bytes; at most 1048576 are allowed"):
        load_config(file, {})


def test_peers_have_ports(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="an entry of peers is 'host:0'; the port that the peer listens on is required"
    ):
        load_config(None, {**DATASETS, "peers": ["other:1", "host:0"]})
    listed = load_config(None, {**DATASETS, "peers": ["other:1", "[::1]:5-6", "h-1-2:7-7"]}).peers
    assert listed == ("other:1", "[::1]:5", "[::1]:6", "h-1-2:7")
    file = tmp_path / "server.yaml"
    file.write_text("")
    assert load_config(file, DATASETS) == load_config(None, DATASETS)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert user_cache() == Path("/h/.cache/disttrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/disttrain")

    def homeless(_: Path) -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert user_cache() is None
    assert load_config(None, DATASETS).cache_dir is None


def test_what_grpc_says_of_an_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> int:
        raise RuntimeError(f"no {address}")

    server: Any = SimpleNamespace(add_insecure_port=refuse)
    monkeypatch.setattr("dataserver.serving.binding.probe", lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        bind_grpc(server, ("::1", 7), "--listen")
    assert str(caught.value) == "cannot listen on [::1]:7: no [::1]:7; choose another address with --listen"
