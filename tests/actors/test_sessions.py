"""Which actor a sample goes to."""

from __future__ import annotations

import pytest

from actors.sessions import Router
from protocols.messages import Member, Policy


class Cluster:
    """In the place of an actor: knows some healthy members."""

    role, index = "rollout_manager", 0

    def __init__(self, *members: Member) -> None:
        self.members = members

    def with_role(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    async def until(self, condition) -> None:
        assert condition()


def generator(index: int, held: int | None = None) -> Member:
    return Member(
        identity=f"generator/{index}#x", role="generator", index=index, address=f"tcp://node:{index}", state="healthy",
        held=None if held is None else Policy(lineage=0, version=held, folder=f"v{held}"),
    )  # fmt: skip


@pytest.mark.parametrize(("min_version", "chosen"), [(2, 0), (3, 0), (4, 1)])
async def test_a_generator_that_holds_a_version_gets_nothing_that_needs_a_newer_one(min_version, chosen):
    router = Router(Cluster(generator(0, held=3), generator(1)))
    with router.using(generator(1), 8):  # the other one is the busier
        assert (await router.choose("generator", min_version=min_version)).index == chosen


async def test_where_all_generators_are_held_one_of_them_will_have_to_do():
    router = Router(Cluster(generator(0, held=3)))
    assert (await router.choose("generator", min_version=4)).index == 0
