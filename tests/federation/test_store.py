from pathlib import Path

import pytest

from fedskew.federation.store import Damaged, Store


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
    assert sorted(p.name for p in (tmp_path / "clients").iterdir()) == ["4.0.safetensors", "4.1.safetensors"]


def test_prune_keeps_what_a_checkpoint_may_need(tmp_path: Path) -> None:
    """Versions of rounds 0, 2, 4; a checkpoint after round 3 needs round 2's, so only round 0's may go."""
    store = Store(tmp_path / "clients")
    for round in (0, 2, 4):
        store.stage(7, round, b"v%d" % round)
        store.commit([7])
    store.flush(until=4)
    store.prune(before=3)
    assert sorted(p.name for p in (tmp_path / "clients").iterdir()) == ["7.2.safetensors", "7.4.safetensors"]
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
    (tmp_path / "clients" / "2.0.safetensors").write_bytes(b"state of 3")
    with pytest.raises(Damaged, match="client 2"):
        Store(tmp_path / "clients").restore(entries)


def test_without_a_folder_only_the_newest_version_is_held() -> None:
    store = Store()
    for round in range(5):
        store.stage(0, round, bytes(100))
        store.commit([0])
    assert store.size == 100
