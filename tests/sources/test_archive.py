import bz2
import gzip
import io
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from lmi.errors import ModelUnusable, SecurityRefused
from lmi.sources.archive import BUFFER_BYTES, unpack


def packed(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            member.mode = 0o4777
            member.uid = 12345
            tar.addfile(member, io.BytesIO(b"x"))

    return path


def test_bytes_are_counted_and_room_is_asked_for_each_member(tmp_path: Path) -> None:
    counted: list[int] = []
    rooms_asked: list[int] = []
    archive = packed(tmp_path / "a.tar.gz", ["a", "b/c"])
    unpack(archive, tmp_path / "out", count=counted.append, check_room=rooms_asked.append)
    assert sum(counted) == archive.stat().st_size
    assert rooms_asked == [1, 1]
    assert (tmp_path / "out/b/c").read_bytes() == b"x"


def test_a_member_brings_no_owner_and_no_special_bits(tmp_path: Path) -> None:
    unpack(packed(tmp_path / "a.tar.gz", ["a"]), tmp_path / "out")
    stat = (tmp_path / "out/a").stat()
    assert stat.st_mode & 0o7022 == 0
    assert stat.st_uid != 12345


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityRefused, match="a.tar.gz: the archive has more than 3 members"):
        unpack(packed(tmp_path / "a.tar.gz", list("abcd")), tmp_path / "out", max_members=3)

    assert not (tmp_path / "out").exists(), "they are counted before one is written"


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["fields", "name"]
)
def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("a")
        member.type = kind
        member.size = 2 << 20
        tar.addfile(member, io.BytesIO(bytes(2 << 20)))

    with pytest.raises(
        ModelUnusable, match="the archive is broken: it has a header of 2097152 bytes"
    ):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_headers_that_follow_one_another_for_ever_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for _ in range(2000):
            tar.addfile(link("a", "", tarfile.GNUTYPE_LONGNAME))

    with pytest.raises(ModelUnusable, match="the archive is broken"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_a_link_inside_the_archive_is_unpacked(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("weights/a")
        tar.addfile(member, io.BytesIO(b""))
        link = tarfile.TarInfo("a")
        link.type = tarfile.SYMTYPE
        link.linkname = "weights/a"
        tar.addfile(link)

    unpack(tmp_path / "a.tar", tmp_path / "out")
    assert (tmp_path / "out/a").resolve() == (tmp_path / "out/weights/a").resolve()


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"not a tar" * 1000)
    with pytest.raises(ModelUnusable, match=r"s3://b/a.tar: the archive is broken"):
        unpack(tmp_path / "a.tar", tmp_path / "out", name="s3://b/a.tar")


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("/etc/lmi-was-here"),
        tarfile.TarInfo("../lmi-was-here"),
        tarfile.TarInfo("a/../../lmi-was-here"),
        tarfile.TarInfo("a\nb.json"),
        tarfile.TarInfo("a\\..\\b.json"),
        link("weights", "/etc/passwd"),
        link("weights", "../../outside"),
        link("weights", "/etc/passwd", tarfile.LNKTYPE),
        link("weights", "../outside", tarfile.LNKTYPE),
        link("device", "", tarfile.CHRTYPE),
        link("disk", "", tarfile.BLKTYPE),
        link("pipe", "", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member.name}-{member.linkname}",
)
def test_a_hostile_member_is_refused_by_its_name(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("config.json"))
        tar.addfile(member)

    with pytest.raises(SecurityRefused) as raised:
        unpack(tmp_path / "a.tar", tmp_path / "out")

    member_name = member.name if member.name.isprintable() else ascii(member.name)
    assert str(tmp_path / "a.tar") in str(raised.value) and member_name in str(raised.value)
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["config.json"]
    assert not Path("/etc/lmi-was-here").exists()


def test_a_member_cannot_be_written_through_a_link_before_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(link("inside", "."))
        tar.addfile(link("inside/up", ".."))
        tar.addfile(tarfile.TarInfo("inside/up/lmi-was-here"))

    with pytest.raises(SecurityRefused):
        unpack(tmp_path / "a.tar", tmp_path / "out")

    assert not list(tmp_path.rglob("lmi-was-here"))


def plain(data: bytes) -> bytes:
    return data


PACKERS = [plain, gzip.compress, bz2.compress, zstandard.ZstdCompressor().compress]
PACKED = pytest.mark.parametrize("pack", PACKERS, ids=["tar", "gzip", "bzip2", "zstd"])


def tar_of(*members: tarfile.TarInfo, num_bytes: int = 700) -> bytes:
    """A tar file with three files of bytes that cannot be packed, then the members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.json")
            member.size = num_bytes
            tar.addfile(member, io.BytesIO(random.Random(number).randbytes(num_bytes)))

        for member in members:
            tar.addfile(member)

    return buffer.getvalue()


@PACKED
def test_an_archive_of_each_form_is_unpacked(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    num_bytes = BUFFER_BYTES + 1
    (tmp_path / "a").write_bytes(pack(tar_of(num_bytes=num_bytes)))
    unpack(tmp_path / "a", tmp_path / "out")
    assert [(tmp_path / "out" / f"{number}.json").stat().st_size for number in range(3)] == [
        num_bytes
    ] * 3
    assert (tmp_path / "out/2.json").read_bytes() == random.Random(2).randbytes(num_bytes)


@PACKED
def test_an_archive_of_each_form_is_guarded(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    def has_room(num_bytes: int) -> None:
        assert num_bytes < 1 << 40, "no room"

    bomb = tarfile.TarInfo("bomb")
    bomb.size = 1 << 50
    guarded: list[tuple[bytes, type[Exception], int]] = [
        (tar_of(link("weights", "/etc/passwd")), SecurityRefused, 9),
        (tar_of(tarfile.TarInfo("../lmi-was-here")), SecurityRefused, 9),
        (tar_of(), SecurityRefused, 2),
        (tar_of()[:1536] + bomb.tobuf(), AssertionError, 9),
    ]
    for data, error, max_members in guarded:
        (tmp_path / "a").write_bytes(pack(data))
        with pytest.raises(error):
            unpack(tmp_path / "a", tmp_path / "out", check_room=has_room, max_members=max_members)

    assert not list(tmp_path.rglob("lmi-was-here"))


def test_an_archive_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    data = tar_of()
    for pack in PACKERS[1:]:
        (tmp_path / "a").write_bytes(pack(data[:1000]) + pack(data[1000:]))
        unpack(tmp_path / "a", tmp_path / "out")


@pytest.mark.parametrize(
    "start", [b"\x1f\x8b", b"BZh91AY&SY", b"\x28\xb5\x2f\xfd"], ids=["gzip", "bzip2", "zstd"]
)
def test_a_packed_file_with_other_bytes_in_it_is_broken(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "a").write_bytes(start + random.Random(0).randbytes(5000))
    with pytest.raises(ModelUnusable, match="the archive is broken"):
        unpack(tmp_path / "a", tmp_path / "out")


def test_a_zstd_archive_without_the_package_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.tar.zst").write_bytes(zstandard.compress(tar_of()))
    code = (
        "import sys, pathlib; sys.modules['zstandard'] = None; from lmi.sources.archive import "
        "unpack; "
        "unpack(*map(pathlib.Path, sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.tar.zst"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "a.tar.zst: the library zstandard is not installed, which unpacks zstd" in done.stderr


def test_a_python_that_cannot_refuse_a_hostile_member_unpacks_nothing(tmp_path: Path) -> None:
    archive = packed(tmp_path / "a.tar.gz", ["a"])
    # As in the Python 3.11.2 of Debian 12
    code = (
        "import pathlib, sys, tarfile; del tarfile.data_filter; "
        "from lmi.sources.archive import unpack; "
        "unpack(*map(pathlib.Path, sys.argv[1:]))"
    )

    command = [sys.executable, "-c", code, str(archive), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)

    assert "cannot unpack an archive safely, 3.11.4 and newer can" in done.stderr
    assert not (tmp_path / "out").exists()


@PACKED
def test_an_archive_that_was_cut_anywhere_is_broken(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    data = pack(tar_of())
    for size in range(0, 3 * (512 + 1024) if pack is plain else len(data), 97):
        (tmp_path / "cut.tar").write_bytes(data[:size])
        with pytest.raises(ModelUnusable, match="the archive is broken"):
            unpack(tmp_path / "cut.tar", tmp_path / f"out-{size}")
