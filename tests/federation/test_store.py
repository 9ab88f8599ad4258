import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedskew.core import files
from fedskew.core.files import sha256
from fedskew.federation.store import Damaged, Store, Version, memory_for_states


def test_what_is_staged_counts_only_when_committed() -> None:
    store = Store()
    store.stage(3, 0, b"first")
    assert store.get(3) == b""
    assert 3 not in store
    store.commit([3])
    store.stage(3, 1, b"second")
    assert store.get(3) == b"first"
    store.discard()
    store.commit([3])
    assert store.get(3) == b"first"


def test_only_accepted_clients_are_committed() -> None:
    store = Store()
    store.stage(1, 0, b"good")
    store.stage(2, 0, b"bad")
    store.commit([1])
    assert (store.get(1), store.get(2), 2 in store) == (b"good", b"", False)


def test_a_state_that_was_not_accepted_is_not_committed_later() -> None:
    store = Store()
    store.stage(1, 0, b"good")
    store.stage(2, 0, b"bad")
    store.commit([1])
    store.commit([1, 2])
    assert 2 not in store


def test_memory_is_bounded_and_the_rest_is_on_disk(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients", memory=1000)
    for round in range(2):
        for client in range(50):
            store.stage(client, round, bytes([client, round]) * 50)
            assert store.size <= 1000
        store.commit(range(50))
    assert [store.get(c) for c in range(50)] == [bytes([c, 1]) * 50 for c in range(50)]
    assert store.size <= 1000


def test_an_empty_state_has_no_file_but_says_the_client_has_trained(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients")
    store.stage(1, 0, b"")
    store.commit([1])
    store.flush(until=0)
    assert 1 in store
    assert store.get(1) == b""
    assert not list(tmp_path.glob("clients/*"))


def test_flush_lists_and_writes_each_version_once_up_to_the_round(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients")
    for round in range(2):
        store.stage(4, round, b"state %d" % round)
        store.commit([4])
    assert [entry[:2] for entry in store.flush(until=0)] == [(4, 0)]
    assert [entry[:2] for entry in store.flush(until=5)] == [(4, 1)]
    assert store.flush(until=9) == []
    assert [p.read_bytes() for p in (tmp_path / "clients").iterdir()] == [b"state 0state 1"]


def test_prune_keeps_what_a_checkpoint_may_need(tmp_path: Path) -> None:
    """Versions of rounds 0, 2, 4; a checkpoint after round 3 needs round 2's, so only round 0's may go."""
    store = Store(tmp_path / "clients")
    for round in (0, 2, 4):
        store.stage(7, round, b"v%d" % round)
        store.commit([7])
    store.flush(until=4)
    store.prune(before=3)
    assert sorted(store.written) == [(7, 2), (7, 4)]
    assert store.get(7) == b"v4"


def test_a_restored_store_goes_on_and_damage_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path / "clients")
    for client in (1, 2):
        store.stage(client, 0, b"state of %d" % client)
    store.commit([1, 2])
    entries = store.flush(until=0)
    again = Store(tmp_path / "clients")
    again.restore(entries)
    assert (again.get(1), again.get(2)) == (b"state of 1", b"state of 2")
    (tmp_path / "clients" / "000000.segment").write_bytes(b"state of 1state of 3")
    with pytest.raises(Damaged, match="client 2"):
        Store(tmp_path / "clients").restore(entries)
    (tmp_path / "clients" / "000000.segment").write_bytes(b"state of 1")
    with pytest.raises(Damaged, match="client 2"):
        Store(tmp_path / "clients").restore(entries)


def test_a_store_with_a_file_for_each_state_goes_on_with_segments(tmp_path: Path) -> None:
    """As written by versions before there were segments."""
    blob = b"state of 1"
    (tmp_path / "1.0.safetensors").write_bytes(blob)
    store = Store(tmp_path)
    store.restore([Version(1, 0, sha256(blob)), Version(2, 0, "")])
    assert (store.get(1), store.get(2)) == (blob, b"")
    for round in (1, 2):
        store.stage(1, round, b"next %d" % round)
        store.commit([1])
    store.flush(until=2)
    store.prune(before=1)
    assert store.get(1) == b"next 2"
    assert [p.name for p in tmp_path.iterdir()] == ["000000.segment"]
    (tmp_path / "1.0.safetensors").write_bytes(b"state of 2")
    with pytest.raises(Damaged, match="client 1"):
        Store(tmp_path).restore([Version(1, 0, sha256(blob))])


def checkpoints(store: Store, rounds: range, clients: range) -> Iterator[tuple[int, list[Version]]]:
    """Every client trains each round, and a checkpoint follows; yields (round, all versions listed so far)."""
    listed: list[Version] = []
    for round in rounds:
        for client in clients:
            if client > 0 or round == 0:  # the first client trains only once: its state has to be moved
                store.stage(client, round, bytes([client, round]) * 50)
        store.commit(clients)
        listed += store.flush(until=round)
        if round:
            store.prune(before=round - 1)
        yield round, list(listed)


def test_segments_stay_few_and_the_last_two_checkpoints_can_be_restored(tmp_path: Path) -> None:
    """100 bytes a state, segments of 1,000: of 12 rounds of 10 clients, 12,000 bytes, two rounds are needed."""
    store = Store(tmp_path)
    store.segments.full = 1000
    before: list[Version] = []
    for round, listed in checkpoints(store, range(12), range(10)):
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 5000
        for entries, last in ((listed, round), (before, round - 1)):
            if entries:
                other = Store(tmp_path)
                other.restore(entries)
                assert [other.get(c) for c in range(10)] == [bytes([c, last if c else 0]) * 50 for c in range(10)]
        before = listed


def test_a_killed_store_goes_on_and_what_it_left_is_removed(tmp_path: Path) -> None:
    """The states of a round that was not saved are in a segment that no checkpoint knows."""
    store = Store(tmp_path, memory=100)
    _, listed = list(checkpoints(store, range(2), range(5)))[-1]
    for client in range(5):
        store.stage(client, 2, b"lost" * 25)
    again = Store(tmp_path)
    again.restore(listed)
    assert [again.get(c) for c in range(1, 5)] == [bytes([c, 1]) * 50 for c in range(1, 5)]
    for _ in checkpoints(again, range(2, 8), range(1, 5)):
        pass
    assert not [p for p in tmp_path.iterdir() if b"lost" in p.read_bytes()]
    assert again.get(0) == bytes([0, 0]) * 50


def test_without_a_folder_states_spill_to_a_temporary_one_that_goes_with_the_store() -> None:
    store = Store(memory=1000)
    store.segments.full = 1000
    folder = store.folder
    for round in range(10):
        for client in range(50):
            store.stage(client, round, bytes([client, round]) * 50)
            assert store.size <= 1000
        store.commit(range(50))
        assert sum(p.stat().st_size for p in folder.iterdir()) <= 3 * 50 * 100
    assert [store.get(c) for c in range(50)] == [bytes([c, 9]) * 50 for c in range(50)]
    del store
    gc.collect()
    assert not folder.exists()


def test_without_a_folder_only_the_newest_version_is_held() -> None:
    store = Store()
    for round in range(5):
        store.stage(0, round, bytes(100))
        store.commit([0])
    assert store.size == 100


@pytest.mark.parametrize(
    ("limit", "share"),
    [("8589934592\n", 512 << 20), ("1073741824\n", 256 << 20), ("274877906944\n", None), ("max\n", None)],
)
def test_memory_for_states_is_a_sixteenth_of_a_containers_limit_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, share: int | None
) -> None:
    """A container of 8 GB: 512 MB. One of 1 GB: 256 MB. A limit above the machine's memory, or none: the machine's."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (16 << 30) // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__, raising=False)
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(files, "CONTAINER_LIMITS", (tmp_path / "memory.max", tmp_path / "missing"))
    assert memory_for_states() == (share or 1 << 30)
    assert Store().memory == memory_for_states()


def test_memory_for_states_is_bounded_on_a_large_machine_and_where_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "CONTAINER_LIMITS", ())
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20, raising=False)  # a terabyte
    assert memory_for_states() == 2 << 30
    monkeypatch.delattr(os, "sysconf")
    assert memory_for_states() == 256 << 20
