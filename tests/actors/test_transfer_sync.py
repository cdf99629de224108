"""Publishing by a transfer: everybody meets, receives at once and proves it; who was away meets at the next version."""

import pytest

from actors.errors import ActorDied
from actors.inference_config import Transport, UpdateMode
from actors.inference_errors import NoServerLeft, VersionProofError, WeightSyncTimeout
from actors.sync_config import SyncConfig
from actors.transfer_sync import TransferSync
from tests.fakes.transfer import FakeFleet, FakeReceiver, FakeSender
from trajectories.schema import PolicyVersion

V0, V1, V2, V3 = (PolicyVersion(lineage=0, n=n) for n in range(4))
NORM = "model.layers.1.norm.weight"


def sync_of(fleet: FakeFleet, source: FakeSender, on_served=None, **config) -> TransferSync:
    sync = SyncConfig(transport=Transport.NCCL, probe_tokens=8, **config)
    return TransferSync(source=source, target=fleet, config=sync, on_served=on_served)


async def test_all_servers_meet_the_learner_once_and_take_each_version():
    fleet, source = FakeFleet(FakeReceiver("a"), FakeReceiver("b")), FakeSender()
    heard: list[list[PolicyVersion | None]] = []
    sync = sync_of(fleet, source, lambda: heard.append([server.heard for server in fleet.servers]), canary=False)
    metrics = await sync.publish(V0)
    source.step()
    await sync.publish(V1)
    assert [server.received for server in fleet.servers] == [[V0, V1], [V0, V1]] and len(source.met) == 1
    assert all(server.is_open for server in fleet.servers) and heard == [[V0, V0], [V1, V1]]
    assert (metrics["sync/servers"], metrics["sync/probe_gap"], sync.num_syncs) == (2, 0, 2)


async def test_the_canary_moves_every_group_once_restores_the_weights_and_lets_requests_in():
    fleet, source = FakeFleet(FakeReceiver("a"), FakeReceiver("b")), FakeSender()
    sync = sync_of(fleet, source)
    await sync.publish(V0)
    groups = 3  # embed_tokens, layers.*.norm, lm_head: each is seen at the first scale
    assert fleet.servers[0].received == [V0] * (1 + groups + 1)
    for server in fleet.servers:
        assert server.is_open and all((server.weights[name] == w).all() for name, w in source.weights.items())
    assert set(fleet.servers[0].modes) == {UpdateMode.ABORT}, "nothing goes on with weights that are not proven"
    fleet.servers[0].num_running = 3
    source.step()
    assert (await sync.publish(V1))["sync/in_flight"] == 3 and sync.num_syncs_in_flight == 1
    assert fleet.servers[0].modes[-1] is UpdateMode.KEEP
    assert fleet.servers[0].received[-1] == V1 and len(fleet.servers[0].received) == 1 + groups + 1 + 1


async def test_the_canary_names_the_server_and_the_group_that_stays_silent():
    fleet, source = FakeFleet(FakeReceiver("a"), FakeReceiver("b", deaf=["lm_head.weight"])), FakeSender()
    with pytest.raises(VersionProofError, match=r"canary of b: new values of lm_head\.weight do not reach"):
        await sync_of(fleet, source).publish(V0)
    assert [server.is_open for server in fleet.servers] == [False, False] and "lm_head" in fleet.servers[1].quarantined


async def test_one_tensor_kept_old_is_caught_by_the_probe():
    fleet, source = FakeFleet(FakeReceiver("a", deaf=[NORM])), FakeSender()
    sync = sync_of(fleet, source, canary=False)
    await sync.publish(V0)
    source.step()
    with pytest.raises(VersionProofError, match=r"a does not serve version 0\.1"):
        await sync.publish(V1)


async def test_a_server_that_came_back_gets_no_weights_before_the_next_version_for_which_all_meet_anew():
    fleet, source = FakeFleet(FakeReceiver("a"), FakeReceiver("b")), FakeSender()
    a, b = fleet.servers
    sync = sync_of(fleet, source, canary=False)
    await sync.publish(V0)
    b.fails = ActorDied("b: its process died")
    source.step()
    assert (await sync.publish(V1))["sync/servers"] == 1
    assert (a.num_left, [server.name for server in source.met[-1]]) == (1, ["a"])
    b.fails, b.pid, b.weights = None, 2, {}
    assert fleet.heal is not None
    await fleet.heal(b)
    assert b.received == [V0] and b.weights == {}
    source.step()
    assert (await sync.publish(V2))["sync/servers"] == 2
    assert (a.num_left, b.num_left, b.received) == (2, 0, [V0, V2])


async def test_a_server_that_dies_once_it_has_its_weights_costs_the_others_nothing():
    fleet, source = FakeFleet(FakeReceiver("a"), FakeReceiver("b")), FakeSender()
    a, b = fleet.servers
    served: list[PolicyVersion] = []
    sync = sync_of(fleet, source, lambda: served.append(a.received[-1]), canary=False)
    await sync.publish(V0)
    b.fails_at_probe = b.fails = ActorDied("b: its process died")
    source.step()
    assert (await sync.publish(V1))["sync/servers"] == 1 and served == [V0, V1]
    a.fails_at_probe = ActorDied("a: its process died")
    source.step()
    with pytest.raises(NoServerLeft, match="all are down"):
        await sync.publish(V2)


async def test_new_learner_ranks_meet_the_servers_anew():
    fleet, source = FakeFleet(FakeReceiver("a")), FakeSender()
    sync = sync_of(fleet, source, canary=False)
    await sync.publish(V0)
    source.num_restarts = 1
    await sync.publish(PolicyVersion(lineage=1, n=0))
    assert len(source.met) == 2 and fleet.servers[0].num_left == 1


async def test_when_all_are_down_publish_says_so():
    server = FakeReceiver("a")
    server.fails = ActorDied("a: its process died")
    with pytest.raises(NoServerLeft, match="all are down"):
        await sync_of(FakeFleet(server), FakeSender()).publish(V0)


async def test_a_transfer_that_hangs_is_named():
    source = FakeSender()
    source.delay_s = 5
    with pytest.raises(WeightSyncTimeout, match=r"sending version 0\.0 to all servers took over 0\.05 s"):
        await sync_of(FakeFleet(FakeReceiver("a")), source, load_timeout_s=0.05).publish(V0)
