"""The user that unprivileged processes run as."""

from __future__ import annotations

import pytest

from lmi.settings.listeners import User


@pytest.mark.parametrize(
    ("text", "uid", "gid"),
    [("nobody", 65534, 65534), ("65534", 65534, 65534), ("4321", 4321, 4321), ("4321:7", 4321, 7)],
)
def test_a_user_is_a_name_a_number_or_numbers_of_user_and_group(text: str, uid: int, gid: int) -> None:
    user = User.of(text)
    assert (str(user), user.uid, user.gid, user.groups[0]) == (text, uid, gid, gid)


@pytest.mark.parametrize(
    "text", ["root", "0", "1:0", "0:1", "-1", "a_user_that_nobody_has", "1:users", "4294967295", ""]
)
def test_root_and_what_the_system_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        User.of(text)
