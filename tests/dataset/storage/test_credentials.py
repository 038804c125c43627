"""What stores say of credentials that are over: once, by name, and with what to do; and of other trouble."""

from pathlib import Path

import pytest
from benchmarks.range_server import State
from stores import SECRET

from dataserver.dataset.storage.bucket_client import BucketClient
from dataserver.dataset.storage.client_interface import UnavailableError
from dataserver.dataset.storage.hub_client import HubClient
from dataserver.dataset.storage.registry import storage_of

Stores = tuple[State, str]


@pytest.fixture(autouse=True)
def shards(stores: Stores) -> None:
    for number in range(2):
        stores[0].put(f"/bucket/laion/0000{number}.tar", bytes(100))


def test_credentials_that_have_expired_are_said_at_once(stores: Stores) -> None:
    """S3 answers 400, with a word on it only where an answer has a body."""
    state, url = stores[0], Path("s3://bucket/laion")
    file = storage_of(str(url)).ranges(url / "00000.tar")
    state.expired, state.asked[:] = "Credential=key-of-tests/", []
    actions = (
        lambda: file.read([(0, 10)]),
        lambda: storage_of(str(url)).etag(str(url / "00001.tar")),
        lambda: [*storage_of(str(url)).walk(url)],
    )
    for action in actions:
        with pytest.raises(PermissionError, match="check the credentials, and renew them if they have") as caught:
            action()
        assert SECRET not in str(caught.value)
    assert len(state.asked) <= len(actions) + 1, "a read also begins to load its block"


def test_a_token_that_has_expired_is_named(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", stores[1])
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    client = HubClient("datasets/ORG/NAME")
    client._commit = "c0ffee"
    stores[0].put("/datasets/ORG/NAME/resolve/c0ffee/00000.tar", b"x")
    stores[0].always = "401"
    with pytest.raises(PermissionError, match="check its token, and renew it if it has expired") as caught:
        client.head("00000.tar")
    assert "hunter2" not in str(caught.value)


def test_the_same_trouble_has_the_same_words(stores: Stores) -> None:
    """Clients tell trouble again where it is another one: it has no duration in it."""
    client, said = BucketClient("s3", "bucket"), set()
    info = client.head("laion/00000.tar")
    for _ in range(3):
        stores[0].faults = ["503"]
        with pytest.raises(UnavailableError) as caught:
            client.get(info, 0, 10)
        said.add(str(caught.value))
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("scheme", "variable", "value", "allowed"),
    [
        ("az", "AZURE_STORAGE_USE_EMULATOR", "True", True),
        ("az", "AZURE_STORAGE_USE_EMULATOR", "0", False),
        ("s3", "AZURE_STORAGE_USE_EMULATOR", "true", False),
        ("s3", "AWS_ENDPOINT_URL", "https://store:9000", False),
        ("gs", "GOOGLE_BASE_URL", "http://store:9000", True),
    ],
)
def test_credentials_go_unencrypted_only_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str, value: str, allowed: bool
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, value)
    options = BucketClient(scheme, "account/bucket" if scheme == "az" else "bucket")._store.client_options
    assert options is not None
    assert str(options["allow_http"]).lower() == str(allowed).lower()
