"""Files that decide who is trusted: who may have written or read them, and what happens when they change."""

import logging
import os
from pathlib import Path

import pytest

from dataserver.security import SecurityError, Watched, files, read_trusted


def written(path: Path, mode: int, data: bytes = b"x") -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o444, 0o755])
def test_what_others_may_read_is_no_secret_and_may_be_used(mode: int, tmp_path: Path) -> None:
    assert read_trusted(written(tmp_path / "ca.pem", mode), "file of authorities") == b"x"


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_what_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(
        SecurityError, match=rf"others may write the policy .*policy \(mode {mode:04o}\); run chmod go-w"
    ):
        read_trusted(written(tmp_path / "policy", mode), "policy")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o601, 0o660, 0o620, 0o610])
def test_a_secret_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=rf"private key .*\(mode {mode:04o}\); 0640 or less|0600 or less"):
        read_trusted(written(tmp_path / "key", mode), "private key", secret=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to others")
def test_a_secret_of_roots_may_be_read_by_a_group_and_one_of_ours_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts them; the group of a file of ours is anybody's."""
    file = written(tmp_path / "key", 0o440)
    assert read_trusted(file, "private key", secret=True) == b"x"
    os.chown(file, 1234, 1234)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(SecurityError, match="0600 or less is required"):
        read_trusted(file, "private key", secret=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to others")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "tokens", 0o600)
    os.chown(file, 1234, -1)
    with pytest.raises(SecurityError, match=r"tokens belongs to user 1234, and this process runs as 0: a file of"):
        read_trusted(file, "token file", secret=True)


def test_what_is_no_file_and_what_is_too_large_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecurityError, match="is no regular file"):
        read_trusted(tmp_path / "pipe", "policy")
    with pytest.raises(SecurityError, match="cannot be read: Is a directory"):
        read_trusted(tmp_path, "policy")
    with pytest.raises(SecurityError, match="cannot be read: No such file"):
        read_trusted(tmp_path / "none", "policy")
    assert len(read_trusted(written(tmp_path / "most", 0o600, bytes(files.MAX_FILE_BYTES)), "policy")) == 1 << 20
    with pytest.raises(SecurityError, match="more than 1048576 bytes"):
        read_trusted(written(tmp_path / "more", 0o600, bytes(files.MAX_FILE_BYTES + 1)), "policy")


def test_a_change_is_taken_over_and_what_cannot_be_used_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    file = written(tmp_path / "policy", 0o600, b"one")
    watched = Watched([file], lambda: read_trusted(file, "policy"))
    assert (watched.get(), watched.version) == (b"one", 0)
    written(tmp_path / "new", 0o600, b"two").replace(file)
    assert (watched.get(), watched.version) == (b"two", 1)
    with caplog.at_level(logging.WARNING):
        file.chmod(0o666)
        for _ in range(3):
            assert (watched.get(), watched.version) == (b"two", 1)
        assert watched.problem.startswith("others may write the policy")
        file.unlink()
        assert watched.get() == b"two"
    assert watched.problem.endswith("cannot be read: No such file or directory")
    assert [record.getMessage().partition(" /")[0] for record in caplog.records] == [
        "others may write the policy",
        "the policy",
    ]
    written(file, 0o600, b"six")
    assert (watched.get(), watched.version, watched.problem) == (b"six", 2, "")


def test_a_file_that_may_be_used_later_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a certificate that is not valid yet by this machine's clock."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    file, problems = written(tmp_path / "pem", 0o600, b"one"), [""]

    def load() -> bytes:
        if problems[-1]:
            raise SecurityError(problems[-1])
        return file.read_bytes()

    watched = Watched([file], load)
    problems.append("certificate is not yet valid")
    written(tmp_path / "new", 0o600, b"two").replace(file)
    with caplog.at_level(logging.WARNING):
        assert [watched.get() for _ in range(3)] == [b"one"] * 3
    assert len(caplog.records) == 1
    problems.append("")
    assert [(watched.get(), watched.version) for _ in range(2)] == [(b"two", 1)] * 2


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes replaces what it mounts: the same name, size and often time of the link."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    for name in ("a", "b"):
        os.utime(written(tmp_path / name, 0o600, name.encode()), ns=(0, 0))
    link = tmp_path / "link"
    link.symlink_to("a")
    watched = Watched([link], lambda: read_trusted(link, "policy"))
    link.unlink()
    link.symlink_to("b")
    assert watched.get() == b"b"
