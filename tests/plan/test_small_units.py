"""The rule of ``bucket_bytes="auto"``: which units share their collectives by default."""

import pytest
import torch

import funcshard as fs

KIB = 1 << 10


def units(count, size=KIB, *, root=0):
    """Return a tree of units of ``size`` bytes."""
    tree = {"u": [{"w": torch.zeros(size // 4)} for _ in range(count)]}
    return {**tree, "root": torch.zeros(root)} if root else tree


def planned(count, size=KIB, *, root=0, **options):
    return fs.make_plan(units(count, size, root=root), 2, **{"units": ["u.*"], **options})


def sizes(plan):
    return [len(bucket) for bucket in plan.buckets]


def kept(plan):
    return {unit.name for unit in plan.unit_list if not unit.reshard_after_forward}


@pytest.mark.parametrize(
    ("count", "size", "found"),
    [
        (31, KIB, []),
        (32, KIB, [32]),
        (100, KIB, [100]),
        (32, 32 * KIB, [32]),
        (32, 32 * KIB + 8, []),
        (70, 32 * KIB, [32, 32, 6]),
        (126, 1024 * KIB, []),
    ],
    ids=str,
)
def test_many_adjacent_tiny_units_share_buckets_of_a_mebibyte(count, size, found) -> None:
    assert sizes(planned(count, size)) == found


def test_units_that_differ_or_are_large_part_the_runs() -> None:
    tree = units(64)
    tree["u"][31] = {"w": torch.zeros(1 << 20)}
    assert sizes(fs.make_plan(tree, 2, units=["u.*"])) == [32]
    frozen = units(64)
    for each in frozen["u"][:40]:
        each["w"].requires_grad_()
    assert [bucket[0] for bucket in fs.make_plan(frozen, 2, units=["u.*"]).buckets] == ["u.0"]


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({}, True),
        ({"reshard_after_forward": True}, False),
        ({"strategy": "shard_grad_op"}, True),
        ({"units": {"u.*": {"reshard_after_forward": True}}}, False),
        ({"bucket_bytes": 1 << 20}, False),
        ({"bucket_bytes": 0}, False),
    ],
    ids=str,
)
def test_tiny_units_stay_gathered_unless_an_option_frees_them(options, stays) -> None:
    plan = planned(40, root=3, **options)
    assert kept(plan) - {""} == ({*plan.units} - {""} if stays else set())
    assert bool(plan.buckets) == (options.get("bucket_bytes") != 0)


def test_units_of_more_than_one_bucket_are_freed() -> None:
    assert kept(planned(64, 16 * KIB)) == {f"u.{i}" for i in range(64)}
    assert kept(planned(65, 16 * KIB)) == set()


def test_the_rule_leaves_its_buckets_in_the_plan() -> None:
    plan = planned(40)
    again = fs.Plan.from_json(plan.to_json())
    assert (again, again.fingerprint()) == (plan, plan.fingerprint())
    assert [event.kind for event in fs.predict_events(plan)] == ["all_gather", "reduce_scatter"]
    assert "40 units in 1 bucket" in str(plan)
    assert "kept until backward" in str(plan)


@pytest.mark.parametrize("size", ["never", -1, 2.5])
def test_other_limits_are_refused(size) -> None:
    with pytest.raises((TypeError, ValueError), match="bucket_bytes must be a whole number of bytes, at least 0"):
        planned(2, bucket_bytes=size)
