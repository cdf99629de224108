"""The command that lists and sweeps sandboxes."""

import time
from pathlib import Path

import pytest

from envs.lease import Lease, LeasedSandbox, this_holder
from envs.local.provider import LocalConfig
from envs.providers import ProviderName, SandboxConfig
from recipes.sandboxes import Action, Config, describe, main


def config(action: Action, cache: Path, **fields: object) -> Config:
    sandbox = SandboxConfig(local=LocalConfig(cache_dir=cache))
    return Config(action=action, providers=(ProviderName.LOCAL,), sandbox=sandbox, **fields)  # pyright: ignore[reportArgumentType]


def write_lease(cache: Path, name: str, *, run: str, left_s: float) -> None:
    (cache / "leases").mkdir(exist_ok=True)
    expires = f"{time.time() + left_s:.0f}"
    holder = this_holder()
    (cache / "leases" / name).write_text(
        f'{{"thresher.run": "{run}", "thresher.owner": "g.0", "thresher.expires": "{expires}", '
        f'"thresher.holder": "{holder}", "thresher.slot": "thresher-none"}}'
    )


def test_a_sandbox_is_described_on_one_line() -> None:
    lease = Lease(run="rloo-1", owner="g3.1", expires_at=1_000_120, holder=this_holder())
    sandbox = LeasedSandbox(provider="podman", id="abc", lease=lease, state="running")
    assert describe(sandbox, 1_000_000) == "podman abc run=rloo-1 owner=g3.1 2 min left (running)"
    assert describe(sandbox, 1_000_120) == "podman abc run=rloo-1 owner=g3.1 abandoned (running)"


async def test_list_shows_all_and_sweep_takes_what_is_abandoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lease(tmp_path, "thresher-1-1-1", run="a", left_s=600)
    write_lease(tmp_path, "thresher-1-1-2", run="b", left_s=-1)
    assert await main(config(Action.LIST, tmp_path)) == {"local": 2}
    assert await main(config(Action.LIST, tmp_path, of_run="a")) == {"local": 1}
    assert await main(config(Action.SWEEP, tmp_path)) == {"local": 1}
    assert await main(config(Action.SWEEP, tmp_path, of_run="a")) == {"local": 1}
    assert await main(config(Action.LIST, tmp_path)) == {"local": 0}
    assert "removed: local 1" in capsys.readouterr().out


async def test_a_provider_that_is_not_here_is_passed_over_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("recipes.sandboxes.ProviderName", (ProviderName.PODMAN,))
    assert await main(Config(action=Action.LIST)) == {}
    assert "podman: passed over (podman ps: podman: No such file" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: podman: .*install podman"):
        await main(Config(action=Action.LIST, providers=(ProviderName.PODMAN,)))
