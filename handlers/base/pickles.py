"""Pickled weights, which can run code when they are read."""

from pathlib import Path

from lmi.errors import SecurityRefused

PATTERNS = ("*.bin", "*.pt", "*.pth")


def pickled_files(folder: Path) -> list[Path]:
    """Return the files of a folder that may be pickled weights."""
    return sorted(file for pattern in PATTERNS for file in folder.glob(pattern))


def refusal(file: Path) -> SecurityRefused:
    """Return the error for a pickled file that may not be read."""
    return SecurityRefused(
        f"{file}: pickled weights can run code when they are read, so they are refused; convert "
        f"them to safetensors, or set option.allow_pickle=true if you trust them"
    )
