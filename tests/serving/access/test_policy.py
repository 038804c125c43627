"""The policy: what may stand in it, and whom it finds."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.authority import write
from hypothesis import given
from hypothesis import strategies as st

from dataserver.security import SecurityError
from dataserver.serving.access import Identity, Policy, Right, load_policy

DATASETS = ("pairs", "docs")


def load(
    folder: Path, *identities: Any, tokens: tuple[str, ...] | None = ("a", "b"), certificates: bool = True
) -> Policy:
    text = yaml.safe_dump({"identities": list(identities)})
    return load_policy(write(folder / "policy.yaml", text.encode()), DATASETS, tokens, certificates)


def test_the_first_identity_that_fits_counts(tmp_path: Path) -> None:
    policy = load(
        tmp_path,
        {"name": "both", "token": "a", "certificate": "spiffe://x/y"},
        {"name": "token", "token": "a"},
        {"name": "host", "certificate": "trainer.example.org"},
        {"name": "uri", "certificate": "spiffe://x/y", "datasets": ["*"], "rights": ["admin"]},
    )
    for token, names, found in (
        ("a", ["spiffe://x/y"], "both"),
        ("a", [], "token"),
        ("a", ["trainer.example.org"], "token"),
        ("b", ["trainer.example.org"], "host"),
        (None, ["other", "trainer.example.org"], "host"),
        ("b", ["spiffe://x/y"], "uri"),
    ):
        identity = policy.find(token, names)
        assert identity is not None
        assert identity.name == found
    for token, names in ((None, []), ("b", []), ("b", ["spiffe://x/y/z", "example.org", "*"])):
        assert policy.find(token, names) is None


def test_policies_that_mean_the_same_have_one_form(tmp_path: Path) -> None:
    one, other = {"name": "x", "token": "a", "datasets": ["pairs", "docs"]}, {"name": "y", "token": "b"}
    form = load(tmp_path, one, other).canonical()
    same = {"datasets": ["docs", "pairs"], "rights": ["read"], "token": "a", "name": "x"}
    assert load(tmp_path, same, other).canonical() == form
    for different in ([other, one], [one], [{**one, "datasets": ["docs"]}, other], [one, {**other, "streams": 4}]):
        assert load(tmp_path, *different).canonical() != form


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"name": "x"}, "a certificate or a token is required"),
        ({"token": "a"}, "name"),
        ({"name": "x", "token": "a", "datasets": ["pair"]}, r"identities\.0\.datasets\.0: the server has no dataset"),
        ({"name": "x", "token": "a", "datasets": ["../pairs"]}, "datasets"),
        ({"name": "x", "token": "a", "rights": ["write"]}, "rights"),
        ({"name": "x", "token": "a", "right": ["read"]}, "right"),
        ({"name": "x", "token": "a", "streams": 0}, "streams"),
        ({"name": "x", "certificate": "CN=trainer"}, "a DNS name or a URI such as"),
        ({"name": "x", "certificate": "*.example.org"}, "a DNS name or a URI such as"),
    ],
)
def test_what_may_not_stand_there(identity: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=message):
        load(tmp_path, identity)


def test_what_belongs_together(tmp_path: Path) -> None:
    for identities, message in (
        (
            [{"name": "x", "token": "a"}, {"name": "x", "token": "b"}],
            "identities.0 and identities.1 have the same name",
        ),
        (
            [{"name": "x", "token": "a"}, {"name": "y", "token": "a"}],
            "identities.0 and identities.1 have the same pair of certificate and token",
        ),
        ([], "identities"),
    ):
        with pytest.raises(SecurityError, match=message):
            load(tmp_path, *identities)
    with pytest.raises(SecurityError, match="the server asks for no tokens; add --token-file"):
        load(tmp_path, {"name": "x", "token": "a"}, tokens=None)
    with pytest.raises(SecurityError, match="the server asks for no certificates; add --client-ca"):
        load(tmp_path, {"name": "x", "certificate": "a.b"}, certificates=False)


def test_a_token_that_was_revoked_first_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else a server that restarts between the two changes would not come back."""
    load(tmp_path, {"name": "x", "token": "c"}, {"name": "y", "token": "a"})
    assert "identities.0.token: --token-file has no token of that name, so this identity cannot call" in caplog.text
    load(tmp_path, {"name": "x", "token": SECRET}, {"name": "y", "token": "a"})
    assert SECRET not in caplog.text


SECRET = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"identities: {SECRET}", ": identities: "),
        (f"identities: {{{SECRET}: 1}}", ": identities: "),
        (f"{SECRET}: 1", ": a key is unknown"),
        (f"identities: [{{name: a, token: {SECRET}+}}]", ": identities.0.token: "),
        (f"identities: [{{name: a, token: [{SECRET}]}}]", ": identities.0.token: "),
        (f"identities: [{{name: a, tokens: {SECRET}}}]", ": identities.0: a key is unknown; is token meant?"),
        (f"identities: [{{name: a, token: a, {SECRET}: }}]", ": identities.0: a key is unknown"),
        (f"identities: [{{name: a, token: a, rights: [{SECRET}]}}]", ": identities.0.rights.0: "),
        (f"identities: [{{name: a, token: a, streams: {SECRET}}}]", ": identities.0.streams: "),
        (f"identities: [{{name: a, certificate: {SECRET}/}}]", ": identities.0.certificate: "),
        (f"identities: [{{name: a, token: a, datasets: [pairs, {SECRET}]}}]", ", identities.0.datasets.1: "),
        (f"identities: [{{name: {SECRET}, token: a, datasets: [x]}}]", ", identities.0.datasets.0: "),
        (f"identities: [{{name: {SECRET}, token: a}}, {{name: {SECRET}, token: b}}]", "identities.1 have the same"),
        (f"identities: [{{name: a, token: {SECRET}}}, {{name: b, token: {SECRET}}}]", "identities.1 have the same"),
        (f"identities:\n- name: a\n  token: {SECRET}: x", ", line 3, "),
        (f"identities:\n- name: a\n  token: *{SECRET}", ", line 3, "),
        (f"identities:\n- name: a\n  token: !{SECRET} a", ", line 3, "),
        (f"{SECRET}: 1\n{SECRET}: 1", ", line 2, "),
        (f"identities: '{SECRET}\n", ", line 2, "),
        (f"identities: {SECRET}\x00", " cannot be used: "),
    ],
)
def test_nothing_of_the_file_is_quoted(text: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has the right `metrics` is told what is wrong with it, and a secret may stand in a wrong field."""
    with pytest.raises(SecurityError) as caught:
        load_policy(write(tmp_path / "policy.yaml", text.encode()), DATASETS, ("a", "b"), certificates=True)
    said = str(caught.value)
    assert where in said
    for hidden in (SECRET[:8], *DATASETS):
        assert hidden not in said.replace(str(tmp_path), "") + caplog.text


@pytest.mark.parametrize("text", ["", "- a\n", "identities: 3", "a: [", "identities: {a: 1}", "x: 1\nx: 2"])
def test_a_file_that_is_no_policy(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        SecurityError, match=r"the policy .*policy\.yaml(, line [12],)? (is not valid|cannot be used): "
    ):
        load_policy(write(tmp_path / "policy.yaml", text.encode()), DATASETS, (), certificates=True)


def test_a_policy_that_others_may_write_is_refused(tmp_path: Path) -> None:
    load(tmp_path, {"name": "x", "token": "a"})
    (tmp_path / "policy.yaml").chmod(0o666)
    with pytest.raises(SecurityError, match="others may write the policy"):
        load_policy(tmp_path / "policy.yaml", DATASETS, ("a",), certificates=True)


@given(st.sets(st.sampled_from(Right)), st.sampled_from(Right))
def test_an_admin_may_do_all_and_nobody_else_more_than_is_listed(rights: set[Right], wanted: Right) -> None:
    identity = Identity(name="x", token="a", rights=frozenset(rights))
    assert identity.has(wanted) == (wanted in rights or Right.ADMIN in rights)


@given(st.sets(st.sampled_from(["pairs", "docs", "*"])), st.sampled_from(["pairs", "docs", "none", "", "*"]))
def test_datasets_are_those_listed(listed: set[str], name: str) -> None:
    identity = Identity(name="x", token="a", datasets=frozenset(listed))
    assert identity.may_read(name) == ("*" in listed or name in listed)
