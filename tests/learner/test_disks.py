"""Ranks with disks of their own: any single disk may be lost, any file damaged, and ranks may change machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from april.learner.checkpoint_copies import (
    Disks,
    FileTransfer,
    RankInventory,
    find_checkpoint,
    missing_files,
    order_transfers,
    plan_transfers,
)
from tests.support.learner.comparison import equal
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, uneven_batch

SUMS = {"a": "1", "b": "2", "c": "3", "d": "4"}
disks_of_ranks = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(
    lambda disks: [sorted(set(disks)).index(disk) for disk in disks]
)


@st.composite
def holdings(draw):
    """(inventory of each rank, its disk): under one of two checksum lists, or None."""
    of_rank = draw(disks_of_ranks)
    lists = [draw(st.sampled_from([SUMS, SUMS | {"d": "5"}, {}])) for _ in set(of_rank)]
    names = st.sets(st.sampled_from(sorted(SUMS)))
    held = [draw(st.none() | st.builds(RankInventory, st.just(lists[disk]), names)) for disk in of_rank]
    return held, of_rank


@given(holdings())
def test_a_checkpoint_is_found_if_the_disks_hold_every_file_of_one_checksum_list(given_):
    held, of_rank = given_
    found = find_checkpoint(7, held, of_rank)
    wholes = [sums for sums in (SUMS, SUMS | {"d": "5"}) if not missing_files(sums, held)]
    if found is None:
        assert wholes == []
        return
    assert found.step == 7 and found.sums in wholes
    for name, disks in found.disks.items():
        there = {of_rank[rank] for rank, one in enumerate(held) if one and one.sums == found.sums and name in one.whole}
        assert set(disks) == there and there <= set(found.listed)


@given(st.data(), st.integers(1, 5))
def test_after_the_transfers_each_disk_has_what_it_needs_and_two_have_each_file(data, count):
    some_disks = st.sets(st.integers(0, count - 1), min_size=1)
    disks = {name: sorted(data.draw(some_disks)) for name in SUMS}
    needed = [data.draw(st.sets(st.sampled_from(sorted(SUMS)))) for _ in range(count)]
    moves = plan_transfers(disks, needed)
    after = {name: list(holders) for name, holders in disks.items()}
    for move in moves:
        assert move.source in disks[move.name] and move.target not in after[move.name], "nothing comes twice"
        after[move.name].append(move.target)
    for name, holders in after.items():
        assert {disk for disk in range(count) if name in needed[disk]} <= set(holders)
        assert len(holders) >= min(2, count)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] != pair[1])))
def test_ordering_keeps_every_transfer_and_a_ring_takes_at_most_three_rounds(pairs):
    moves = [FileTransfer(str(place), source, target) for place, (source, target) in enumerate(pairs)]
    assert sorted(order_transfers(moves), key=lambda move: int(move.name)) == moves
    ring = order_transfers([FileTransfer("", rank, (rank + 1) % 7) for rank in range(7)])
    free = [0] * 7
    for move in ring:
        free[move.source] = free[move.target] = 1 + max(free[move.source], free[move.target])
    assert max(free) <= 3


def test_written_files_are_copied_to_the_next_disk_if_there_is_one():
    disks = object.__new__(Disks)
    disks.leaders, disks.disk_of_rank = [0, 2], [0, 0, 1]
    assert disks.neighbour_copies([["a"], ["b"], ["c"]]) == [
        FileTransfer("a", 0, 2),
        FileTransfer("b", 1, 2),
        FileTransfer("c", 2, 0),
    ]
    disks.leaders, disks.disk_of_rank = [0], [0, 0, 0]
    assert disks.neighbour_copies([["a"], ["b"], ["c"]]) == []


def test_a_file_that_cannot_be_copied_ends_the_call_on_every_rank_with_the_same_sentence(tmp_path):
    first, second = run_ranks(2, [], tmp_path, ("tests.support.learner.copying_rank",))
    assert first == second and not first["whole"] and not first["after"], "ranks that fail are ready for the next call"
    for name, rank in {"missing": 0, "no_room": 0}.items():
        assert first[name].startswith(f"rank {rank} cannot copy {tmp_path / f'disk_{rank}' / name}"), first[name]
        assert first[name].endswith("free or mend its disk")
    assert (tmp_path / "disk_1/whole").read_bytes() == b"whole" and (tmp_path / "disk_0/after").is_file()


@pytest.mark.full
def test_ranks_resume_bitwise_after_lost_disks_a_damaged_file_and_a_change_of_machines(policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run")
    batches = [uneven_batch(step, policy_folder) for step in range(3)]
    again = {"batches": batches[2:], "restore": True}
    path = "disk_{}/run/checkpoints/step_{:06d}"
    jobs = [
        job(config, batches, save_after=[1, 2], disks=[0, 1, 2]),
        job(config, **again, disks=[3, 0, 1], without=["disk_2"], flip_in=[f"{path.format(1, 2)}/__0_0.distcp"]),
        job(config, **again, disks=[1, 4, 3], without=["disk_0"], save_after=[3]),
        job(config, **again, disks=[1, 4, 3], without=[path.format(disk, 3) for disk in (1, 4)]),
        job(config, batches[:2], disks=[5, 5, 6], save_after=[2]),
        job(config, **again, disks=[6, 7, 7], without=["disk_5"]),
    ]
    unharmed, *results = run_ranks(3, jobs, tmp_path / "ranks")
    for place, result in enumerate(results):
        if jobs[1 + place].get("restore"):
            assert result["restored"] == 2 and result["metrics"][0]["loss"] == unharmed["metrics"][2]["loss"]
            assert equal(result["weights"], unharmed["weights"])
    assert f"{tmp_path / path.format(1, 2)}/__0_0.distcp is damaged" in (tmp_path / "ranks/output").read_text()
    left = tmp_path / path.format(3, 3)
    assert left.with_suffix(".damaged").is_dir(), "files of one disk that were written last are no checkpoint"
    held = {path.name for path in (tmp_path / path.format(6, 2)).glob("__*")}
    assert held == {f"__{rank}_0.distcp" for rank in range(3)}, "the only disk of two that is left has all"
