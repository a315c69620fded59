"""A small library instead of the native kernels, so that its builds take a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include <atomic>
#include <thread>
extern "C" __attribute__((visibility("default"))) int num_threads(int wanted) {
    std::atomic<int> count{1};
    if (wanted > 1) std::thread([&] { count++; }).join();
    return count.load();
}
"""


def write_source(folder: Path, text: str = SOURCE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "lmi_kernels.cpp"
    source.write_text(text)
    return source


def build_native(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "build-native", *arguments]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=100
    )
