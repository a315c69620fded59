"""Bytes and seconds as people read them."""


def readable(num_bytes: float) -> str:
    """Return a number of bytes for people, in powers of 1000 as disks are sold."""
    if abs(num_bytes) < 1000:
        return f"{num_bytes:.0f} B"

    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.1f} {unit}"

    return f"{num_bytes / 1000:.1f} TB"


def readable_s(seconds: float) -> str:
    """Return a time for people, in the largest unit that it has two of."""
    for unit, length_s in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"

    return f"{seconds:.0f} s"
