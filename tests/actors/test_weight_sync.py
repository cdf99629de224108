import asyncio
import os
from pathlib import Path

import pytest

from actors import weight_sync
from actors.errors import ActorDied
from actors.inference_config import DType, Transport
from actors.inference_errors import VersionProofError, WeightSyncError, WeightSyncTimeout
from actors.sync_config import SyncConfig
from actors.weight_sync import WeightSync
from tests.fakes.synced_server import FakeServer, FakeSource, FakeTarget
from trajectories.schema import PolicyVersion

V0, V1, V2, V3 = (PolicyVersion(lineage=0, n=n) for n in range(4))


def sync_of(target: FakeTarget, tmp_path: Path, source: FakeSource | None = None, **config) -> WeightSync:
    return WeightSync(
        source=source or FakeSource(), target=target, config=SyncConfig(directory=tmp_path, probe_tokens=8, **config)
    )


async def test_publish_loads_every_server_and_reports_the_sum_of_what_was_in_flight(tmp_path):
    target = FakeTarget(FakeServer("a"), FakeServer("b"))
    metrics = await sync_of(target, tmp_path, canary=False).publish(V0)
    assert [server.loaded for server in target.servers] == [[V0], [V0]]
    assert metrics["sync/in_flight"] == 6 and metrics["sync/in_flight/a"] == 3
    assert metrics["sync/pause_s"] == 0.25 and metrics["sync/load_s"] == 0.125 and metrics["sync/probe_gap"] == 0


async def test_the_canary_runs_once_per_server_and_leaves_the_published_weights(tmp_path):
    target, source = FakeTarget(FakeServer("a")), FakeSource()
    sync = sync_of(target, tmp_path, source)
    await sync.publish(V0)
    assert target.servers[0].loaded == [V0, V0], "the update and the canary's restore"
    assert target.servers[0].is_open
    assert all((target.servers[0].weights[name] == tensor).all() for name, tensor in source.weights.items())
    await sync.publish(V1)
    assert target.servers[0].loaded == [V0, V0, V1]


async def test_the_canary_names_the_group_that_never_reaches_the_log_probabilities(tmp_path):
    server = FakeServer("a", deaf=["lm_head.weight"])
    server.reads_back = False
    with pytest.raises(VersionProofError, match=r"canary of a: new values of lm_head\.weight do not reach"):
        await sync_of(FakeTarget(server), tmp_path).publish(V0)
    assert "lm_head" in server.quarantined and not server.is_open


async def test_one_tensor_kept_old_is_caught_by_the_probe_alone(tmp_path):
    server, source = FakeServer("a", deaf=["model.layers.1.norm.weight"]), FakeSource()
    server.reads_back = False
    sync = sync_of(FakeTarget(server), tmp_path, source, canary=False)
    await sync.publish(V0)
    source.step()
    with pytest.raises(VersionProofError, match=r"a does not serve version 0\.1"):
        await sync.publish(V1)
    assert "0.1" in server.quarantined


async def test_one_tensor_kept_old_is_caught_by_the_load_and_named(tmp_path):
    server, source = FakeServer("a", deaf=["model.layers.1.norm.weight"]), FakeSource()
    sync = sync_of(FakeTarget(server), tmp_path, source, canary=False)
    await sync.publish(V0)
    source.step()
    with pytest.raises(VersionProofError, match=r"model\.layers\.1\.norm\.weight"):
        await sync.publish(V1)


async def test_in_bfloat16_a_grown_gap_is_an_alarm_and_no_error(tmp_path):
    server, source = FakeServer("a", deaf=["model.layers.1.norm.weight"]), FakeSource()
    server.reads_back = False
    sync = sync_of(FakeTarget(server, dtype=DType.BFLOAT16), tmp_path, source, canary=False)
    assert (await sync.publish(V0))["sync/probe_alarm"] == 0
    source.step()
    assert (await sync.publish(V1))["sync/probe_alarm"] == 1
    assert source.asked_dtypes == [DType.BFLOAT16] * 2, "no byte travels that the servers would round away"


async def test_a_staging_that_hangs_is_named_by_its_phase(tmp_path):
    source = FakeSource()
    source.delay_s = 5
    with pytest.raises(WeightSyncTimeout, match=r"staging version 0\.0 took over 0\.05 s"):
        await sync_of(FakeTarget(FakeServer("a")), tmp_path, source, stage_timeout_s=0.05).publish(V0)


async def test_a_server_that_hangs_in_its_load_is_named(tmp_path):
    target = FakeTarget(FakeServer("fast"), FakeServer("slow", delay_s=5))
    with pytest.raises(WeightSyncTimeout, match=r"loading version 0\.0 on slow took over 0\.2 s"):
        await sync_of(target, tmp_path, load_timeout_s=0.2, canary=False).publish(V0)


async def test_a_dead_server_is_passed_over_and_healed_with_the_latest_version(tmp_path):
    target, source = FakeTarget(FakeServer("a"), FakeServer("b")), FakeSource()
    sync = sync_of(target, tmp_path, source, canary=False)
    await sync.publish(V0)
    target.servers[1].fails = ActorDied("b: its process died")
    source.step()
    assert (await sync.publish(V1))["sync/servers"] == 1
    target.servers[1].fails = None
    assert target.heal is not None
    await target.heal(target.servers[1])
    assert target.servers[1].loaded == [V0, V1]


async def test_through_the_object_store_servers_get_the_shards_references(tmp_path):
    target = FakeTarget(FakeServer("a"))
    sync = sync_of(target, tmp_path, canary=False, transport=Transport.OBJECT_STORE)
    await sync.publish(V0)
    (manifest,) = target.servers[0].manifests
    assert list(manifest.objects) == ["weights-00000.safetensors"]


async def test_publish_fails_when_every_server_is_dead(tmp_path):
    target = FakeTarget(FakeServer("a"))
    target.servers[0].fails = ActorDied("a: its process died")
    with pytest.raises(WeightSyncError, match="no server took version"):
        await sync_of(target, tmp_path).publish(V0)


async def test_without_barrier_publish_does_not_wait_and_a_slow_server_skips_a_version(tmp_path):
    target, source = FakeTarget(FakeServer("a", delay_s=0.0), FakeServer("b")), FakeSource()
    sync = sync_of(target, tmp_path, source, canary=False, barrier=False)
    await sync.publish(V0)
    target.servers[0].delay_s = 0.2
    source.step()
    metrics = await sync.publish(V1)
    assert "sync/load_s" not in metrics and target.servers[0].loaded == [V0]
    source.step()
    await sync.publish(V2)
    assert [server.loaded for server in target.servers] == [[V0, V1], [V0]], "the rest of that roll was given up"
    source.step()
    await sync.publish(V3)
    assert [server.loaded for server in target.servers] == [[V0, V1], [V0, V2]], "the most stale server comes first"


async def test_without_barrier_a_failure_surfaces_at_the_next_publish(tmp_path):
    server, source = FakeServer("a", deaf=["lm_head.weight"]), FakeSource()
    sync = sync_of(FakeTarget(server), tmp_path, source, canary=False, barrier=False)
    await sync.publish(V0)
    source.step()
    await sync.publish(V1)
    source.step()
    with pytest.raises(VersionProofError, match="lm_head"):
        await sync.publish(V2)


async def test_servers_that_die_after_the_last_version_are_no_failure_of_the_run(tmp_path):
    server, source = FakeServer("a"), FakeSource()
    sync = sync_of(FakeTarget(server), tmp_path, source, canary=False, barrier=False)
    await sync.publish(V0)
    source.step()
    await sync.publish(V1)
    server.fails = ActorDied("a: its process died")
    await sync.close()
    assert list(tmp_path.iterdir()) == []


async def test_close_removes_the_stages(tmp_path):
    sync = sync_of(FakeTarget(FakeServer("a")), tmp_path)
    await sync.publish(V0)
    assert len(list(tmp_path.iterdir())) == 1
    await sync.close()
    assert list(tmp_path.iterdir()) == []


async def test_stages_that_killed_runs_left_in_memory_are_removed_and_those_of_the_living_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sync, "Path", lambda path: tmp_path if path == "/dev/shm" else Path(path))
    dead, alive = tmp_path / f"thresher-weights-{2**22 + 1}-x", tmp_path / f"thresher-weights-{os.getpid()}-x"
    dead.mkdir()
    alive.mkdir()
    WeightSync(source=FakeSource(), target=FakeTarget(FakeServer("a")))
    assert not dead.exists() and alive.exists()


async def test_a_restarted_servers_canary_and_a_roll_take_turns(tmp_path):
    server, source = FakeServer("a", delay_s=0.01), FakeSource()
    target = FakeTarget(server, FakeServer("b"))
    sync = sync_of(target, tmp_path, source, barrier=False)
    await sync.publish(V0)
    assert target.heal is not None
    source.step()
    await sync.publish(V1)
    server.restart()
    await target.heal(server)
    source.step()
    await sync.publish(V2)
    await sync.close()
    assert server.is_open and server.quarantined == ""


async def test_a_roll_that_comes_to_a_restarted_server_first_runs_its_canary(tmp_path):
    server, source = FakeServer("a"), FakeSource()
    target = FakeTarget(server, FakeServer("b"))
    sync = sync_of(target, tmp_path, source)
    await sync.publish(V0)
    assert server.loaded == [V0, V0], "the update and the canary's restore"
    source.delay_s = 0.2
    publishing = asyncio.create_task(sync.publish(V1))
    await asyncio.sleep(0.05)
    server.restart()
    assert target.heal is not None
    healing = asyncio.ensure_future(target.heal(server))
    await publishing
    assert server.loaded == [V0, V0, V1, V1]
    await healing
    assert server.loaded == [V0, V0, V1, V1], "healed by the roll, once"


async def test_a_restarted_server_that_stays_deaf_does_not_sample(tmp_path):
    server, source = FakeServer("a"), FakeSource()
    target = FakeTarget(server, FakeServer("b"))
    sync = sync_of(target, tmp_path, source)
    await sync.publish(V0)
    server.restart()
    server.deaf, server.reads_back = ("lm_head.weight",), False
    with pytest.raises(VersionProofError, match="canary of a"):
        await sync.publish(V1)
    assert not server.is_open and "lm_head" in server.quarantined


async def test_after_a_restore_every_server_has_the_weights_when_publish_returns(tmp_path):
    target, source = FakeTarget(FakeServer("a", delay_s=0.05), FakeServer("b")), FakeSource()
    sync = sync_of(target, tmp_path, source, canary=False, barrier=False)
    await sync.publish(V3)
    restored = PolicyVersion(lineage=1, n=1)
    source.step()
    await sync.publish(restored, barrier=True)
    assert [server.loaded[-1] for server in target.servers] == [restored, restored]
