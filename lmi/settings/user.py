"""The user that front ends, the gateway and user code run as where root starts the server."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class User:
    text: str  # as it was given
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, text: str) -> User:
        """Return the user that a NAME, UID or UID:GID means. Raises ValueError for root and for unknown names."""
        user, _, group = text.partition(":")
        try:
            known = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        except KeyError:
            known = None
        if known is None and not user.isdecimal():
            raise ValueError
        uid = int(user) if known is None else known.pw_uid
        gid = int(group) if group else uid if known is None else known.pw_gid
        if not (0 < uid < 2**32 - 1 and 0 < gid < 2**32 - 1):
            raise ValueError
        name, home = (str(uid), "") if known is None else (known.pw_name, known.pw_dir)
        groups = (gid,) if known is None or group else tuple(os.getgrouplist(name, gid))
        return cls(text, name, uid, gid, groups, home if os.path.isdir(home) else "/tmp")

    @property
    def environ(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def become(self) -> None:
        """Make this process one of the user. The kernel forgets the signal of its parent's death."""
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
