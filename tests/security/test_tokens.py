"""Tokens: files of them, and what a call carries."""

import hmac
from pathlib import Path

import pytest
from builders.authority import TOKENS, shown, token_file, write
from hypothesis import given
from hypothesis import strategies as st

from dataserver.security import SecurityError, bearer, load_token, load_tokens, token_in


def test_several_tokens_and_two_of_one_name(tmp_path: Path) -> None:
    file = token_file(tmp_path, "alice", "peers", "ops")
    newer = TOKENS["alice"].replace("0", "1")
    file.write_bytes(b"# tokens of the fleet\n\n" + file.read_bytes() + f"alice {newer}\n".encode())
    found = load_tokens(file)
    assert found.names == {"alice", "peers", "ops"}
    assert found.shown == TOKENS["peers"]
    assert [found.name_of(token) for token in (TOKENS["alice"], newer, TOKENS["ops"])] == ["alice", "alice", "ops"]
    assert found.name_of(TOKENS["bob"]) is None
    assert found.name_of("") is None
    assert found.name_of("\udc80") is None
    assert not [token for token in TOKENS.values() if token in repr(found.entries)], "only hashes are held"


def test_every_token_is_compared_whichever_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no answer comes earlier for a token that is there, or that begins like one."""
    found, compared = load_tokens(token_file(tmp_path, "alice", "bob", "ops")), []
    digests_equal = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *two: compared.append(two) or digests_equal(*two))
    for token in (TOKENS["alice"], TOKENS["ops"], TOKENS["ops"][:-1], ""):
        compared.clear()
        found.name_of(token)
        assert len(compared) == 3
        assert {len(value) for pair in compared for value in pair} == {32}, "digests, and no tokens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 tokens; 1 to 1024 are required"),
        ("alice", "line 1: NAME TOKEN is required"),
        (f"{TOKENS['alice']}", "line 1: NAME TOKEN is required"),
        ("alice short", "line 1: its second word has another form; 32 to 1024"),
        (f"{TOKENS['alice']} alice", "line 1: its second word has another form"),
        (f"{TOKENS['alice']} {TOKENS['bob']}\n" * 2, "line 2: its token stands there twice"),
        (f"a/b {TOKENS['bob']}", "line 1: NAME TOKEN is required"),
        (f"a {TOKENS['bob']}\nb {TOKENS['bob']}", "line 2: its token stands there twice"),
        (f"ä {TOKENS['bob']}", "is not ASCII"),
        ("\n".join(f"n{i} {i:032}" for i in range(1025)), "holds 1025 tokens"),
    ],
)
def test_a_file_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=message) as caught:
        load_tokens(write(tmp_path / "tokens", text.encode()))
    assert not [token for token in TOKENS.values() if token in str(caught.value)]


def test_a_client_has_one_token_alone(tmp_path: Path) -> None:
    assert load_token(shown(tmp_path, "alice")) == TOKENS["alice"]
    for text in ("", TOKENS["alice"] + "\n" + TOKENS["bob"], f"alice {TOKENS['alice']}", "short"):
        with pytest.raises(SecurityError, match="one token alone") as caught:
            load_token(write(tmp_path / "wrong", text.encode()))
        assert TOKENS["alice"] not in str(caught.value)


@given(st.lists(st.text(), max_size=3))
def test_what_a_call_carries_is_one_token_or_none(values: list[str]) -> None:
    found = token_in(values)
    assert found is None or [f"Bearer {found}"] == values


def test_a_call_carries_a_token() -> None:
    assert token_in([bearer(TOKENS["alice"])[1]]) == TOKENS["alice"]
    assert token_in([bearer(TOKENS["alice"])[1]] * 2) is None
    assert token_in([TOKENS["alice"]]) is None
