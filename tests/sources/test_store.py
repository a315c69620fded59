"""What is kept and what is fetched again, whenever a process dies."""

from pathlib import Path

import pytest

from lmi.sources.bucket import StoredObject
from lmi.sources.s3_store import Store

A = StoredObject("p/a", 1, "e1", "a")
B = StoredObject("p/b", 2, "e2", "sub/b")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, "http://s3", "s3://bucket/p")


def fetch(store: Store, *objects: StoredObject) -> None:
    for stored_object in objects:
        (store.blobs / stored_object.id).write_bytes(bytes(stored_object.size))


def fill(store: Store, *objects: StoredObject) -> None:
    fetch(store, *store.missing(objects))
    store.name(objects)
    store.finish(objects)


def test_nothing_counts_as_whole_before_the_last_step(store: Store) -> None:
    fetch(store, *store.missing([A, B]))
    store.name([A, B])
    assert not store.model.exists()
    assert not store.is_current([A, B])
    store.finish([A, B])
    assert store.is_current([A, B])


def test_an_object_that_is_whole_is_not_fetched_again(store: Store) -> None:
    store.missing([A, B])
    fetch(store, A)
    assert store.missing([A, B]) == [B]
    assert store.num_whole() == 1


def test_an_object_that_is_not_checked_or_changed_or_is_torn_is_fetched_again(store: Store) -> None:
    store.missing([A, B])
    fetch(store, A)
    (store.blobs / f"{B.id}.new").write_bytes(bytes(2))
    (store.blobs / f"{B.id}.new.Ab12Cd34").write_bytes(b"part of a file")

    assert store.num_whole() == 1
    assert store.missing([A, B]) == [B]
    assert [path.name for path in store.blobs.iterdir()] == [A.id]

    newer = StoredObject("p/a", 1, "e9", "a")
    assert store.missing([newer, B]) == [newer, B]

    fetch(store, newer)
    (store.blobs / newer.id).write_bytes(b"")

    assert store.missing([newer, B]) == [newer, B]


def test_a_new_version_shares_what_did_not_change(store: Store) -> None:
    fill(store, A, B)
    newer = StoredObject("p/b", 3, "e3", "sub/b")
    inode = (store.model / "a").stat().st_ino

    assert store.missing([A, newer]) == [newer]
    assert store.is_current([A, B]), "the old one is whole until the new one is"

    fetch(store, newer)
    store.name([A, newer])
    store.finish([A, newer])

    assert store.is_current([A, newer])
    assert (store.model / "a").stat().st_ino == inode
    assert (store.model / "sub/b").stat().st_size == 3


def test_a_process_that_dies_between_the_two_versions_leaves_the_new_one_to_the_next(
    store: Store,
) -> None:
    fill(store, A)
    fetch(store, *store.missing([B]))
    store.name([B])
    # The first part of the last step
    store.model.rename(store.old)

    assert not store.is_current([A]) and not store.is_current([B])
    assert store.missing([B]) == []

    store.name([B])
    store.new.rename(store.model)  # the second one
    assert not store.is_current([B]), "the objects of the old version are still there"

    fill(store, B)
    assert store.is_current([B])
    assert [path.name for path in store.blobs.iterdir()] == [B.id]


def test_a_file_that_is_missing_or_cut_in_a_whole_folder_is_fetched_again(store: Store) -> None:
    fill(store, A, B)
    (store.model / "sub/b").write_bytes(b"")
    assert not store.is_current([A, B])
    assert store.missing([A, B]) == [B]


def test_an_archive_that_was_unpacked_needs_no_bytes(store: Store) -> None:
    fetch(store, *store.missing([A]))
    store.new.mkdir()
    (store.blobs / A.id).write_bytes(b"")
    store.finish([A])
    assert store.is_current([A], is_unpacked=True) and not store.is_current([B], is_unpacked=True)


def test_sources_with_another_url_or_endpoint_have_another_place(tmp_path: Path) -> None:
    places = [Store(tmp_path, *where).model for where in (("e", "u"), ("e", "v"), ("f", "u"))]
    assert len(set(places)) == 3
