"""Files as the kernel shows them to a process: /proc, and mounts of control groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GB = 1 << 30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@dataclass
class Kernel:
    """What the kernel shows to a process: /proc, and mounts of control groups."""

    proc: Path
    mounts: Path

    def own_groups(self, text: str) -> None:
        write(self.proc / "self/cgroup", text)

    def mount(self, name: str, kind: str, options: str = "rw", top: str = "/") -> Path:
        """Mount control groups, of which `top` and those below it are shown, and return where."""
        place = self.mounts / name
        mount_point = str(place).replace(" ", "\\040")
        file = self.proc / "self/mountinfo"
        lines = (
            file.read_text()
            if file.exists()
            else "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        )

        write(
            file,
            f"{lines}35 31 0:32 {top} {mount_point} rw,nosuid shared:9 - {kind} {kind} {options}",
        )
        return place


def kernel_in(folder: Path, available_bytes: int = 8 * GB) -> Kernel:
    """Return what a machine of 16 GB shows, of which so much is available."""
    proc = folder / "proc"
    available_kb = available_bytes >> 10
    write(
        proc / "meminfo",
        f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {available_kb} kB",
    )
    return Kernel(proc, folder / "control groups")
