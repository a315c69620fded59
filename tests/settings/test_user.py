"""The user that unprivileged processes run as."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.models.settings import resolve_model
from lmi.settings.config import ServerConfig
from lmi.settings.user import User
from lmi.shared.machine import unusable_gpu_files
from lmi.supervisor.kinds import check_files

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="lmi-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("text", "uid", "gid"),
    [("nobody", 65534, 65534), ("65534", 65534, 65534), ("4321", 4321, 4321), ("4321:7", 4321, 7)],
)
def test_a_user_is_a_name_a_number_or_numbers_of_user_and_group(
    text: str, uid: int, gid: int
) -> None:
    user = User.of(text)
    assert (str(user), user.uid, user.gid, user.groups[0]) == (text, uid, gid, gid)


@pytest.mark.parametrize(
    "text", ["root", "0", "1:0", "0:1", "-1", "a_user_that_nobody_has", "1:users", "4294967295", ""]
)
def test_root_and_what_the_system_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        User.of(text)


@only_root
def test_while_root_acts_as_a_user_it_may_what_the_user_may_and_is_itself_again(
    place: Path,
) -> None:
    secret = place / "secret"
    secret.touch(mode=0o600)
    before = os.getresuid(), os.getresgid(), os.getgroups()
    with User.of("nobody").acting():
        with pytest.raises(PermissionError):
            secret.read_bytes()

        with pytest.raises(PermissionError):
            (place / "new").touch()

    assert (os.getresuid(), os.getresgid(), os.getgroups()) == before and secret.read_bytes() == b""


def model_of(place: Path) -> Path:
    folder = place / "store" / "model"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text("option.rolling_batch=echo\n")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")

    (folder / "notes").touch(mode=0o600)
    return folder


@only_root
def test_a_file_of_a_model_that_the_user_cannot_read_is_named_before_anything_starts(
    place: Path,
) -> None:
    folder = model_of(place)
    user = User.of("nobody")
    check_files(user, folder)
    (folder / "model.safetensors").chmod(0o600)
    with pytest.raises(
        BadConfiguration,
        match=f"option.user=nobody: that user cannot read {folder}/model.safetensors",
    ):
        check_files(user, folder)

    server = ServerConfig(model_store=str(folder.parent), user=user)
    with (
        user.acting(),
        pytest.raises(ModelUnusable, match="model.safetensors: option.user=nobody cannot read it"),
    ):
        resolve_model("m", str(folder), server, {})

    folder.chmod(0o700)
    with pytest.raises(BadConfiguration, match=f"cannot read {folder}$"):
        check_files(user, folder)


@only_root
def test_the_files_of_gpus_that_a_user_may_not_open_are_known(place: Path) -> None:
    for name, mode in (
        ("nvidiactl", 0o666),
        ("nvidia-uvm", 0o666),
        ("nvidia0", 0o660),
        ("nvidia-caps", 0o600),
    ):
        (place / name).touch()
        (place / name).chmod(mode)

    assert unusable_gpu_files(place) == []

    with User.of("nobody").acting():
        assert unusable_gpu_files(place) == [place / "nvidia0"]

    (place / "nvidia0").chmod(0o666)
    with User.of("nobody").acting():
        assert unusable_gpu_files(place) == []
