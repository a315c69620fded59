"""The user of `option.user`, as whom the processes of a server run that root has started."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

# The uid and the gid that mean no id.
NO_ID = 2**32 - 1


class User(Struct, frozen=True):
    """The user that all processes but the supervisor and the fetches run as, if root starts the
    server.
    """

    # The text that names the user.
    text: str
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, text: str) -> User:
        """Return the user that a NAME, UID or UID:GID means. Raises ValueError for root and for
        unknown names.
        """
        user, _, group = text.partition(":")
        account = _account(user)
        if account is not None:
            name = account.pw_name
            uid = account.pw_uid
            gid = account.pw_gid
            home = account.pw_dir
        else:
            # A number need not belong to an account.
            uid = int(user)
            gid = uid
            name = str(uid)
            home = ""

        if group:
            gid = int(group)

        if not (0 < uid < NO_ID and 0 < gid < NO_ID):
            raise ValueError

        groups: tuple[int, ...] = (gid,)
        if account is not None and not group:
            groups = tuple(os.getgrouplist(name, gid))

        if not os.path.isdir(home):
            home = "/tmp"

        return cls(text, name, uid, gid, groups, home)

    @property
    def environ(self) -> dict[str, str]:
        """The variables of a process that the user runs."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def become(self) -> None:
        """Make this process one of the user. The kernel then forgets which signal it gets at the
        death of its parent.
        """
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Open files as the user in the block, if this process belongs to root; else nothing
        changes. The process must have one thread.
        """
        if os.geteuid() != 0:
            yield
            return

        groups = os.getgroups()
        gid = os.getegid()
        os.setgroups(self.groups)
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(gid)
            os.setgroups(groups)


def _account(user: str) -> pwd.struct_passwd | None:
    """Return the account of a name or a uid, or None for a uid without one. Raises ValueError for a
    name without one.
    """
    is_uid = user.isdecimal()
    try:
        return pwd.getpwuid(int(user)) if is_uid else pwd.getpwnam(user)
    except KeyError:
        if is_uid:
            return None

        raise ValueError from None
