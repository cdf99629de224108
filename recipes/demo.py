"""Demo: the whole path on one machine, every part real. Two cores, no GPU, no account, no download from a hub.

1. harvest   the oracle plays procedural terminal tasks in isolated sandboxes
2. sft       a deliberately short fine-tuning, ended by a stop rule
3. rloo      asynchronous RLOO against the binary verifiers, weights moving while rollouts generate
4. control   instead of RLOO, the same fine-tuning goes on for as long as RLOO took
5. evaluate  base, SFT, RLOO and control on held-out tasks, sampled and greedy
6. teach     the trained policy is the teacher of a new harvest; its solved Trajectories are exported

Everything that is chosen by a threshold is chosen on tasks of the training split.

    python -m recipes.demo
    python -m recipes.demo --policy smollm2
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.cluster import ClusterConfig, start_cluster
from envs.build import HarnessName
from learners.config import LossConfig, LossKind
from recipes import evaluate, export, harvest, rloo, sft
from recipes.launch import launch
from recipes.policies import PolicyConfig, resolve_policy
from recipes.presets import PRESETS, Preset
from recipes.run import Run
from recipes.statistics import paired_gain
from trajectories.export import ConversationFormat


@dataclass(frozen=True, kw_only=True)
class Config:
    """Harvest, SFT, RLOO, control, evaluation and a harvest from the trained policy."""

    run: Path = Path("runs/demo")
    """Run directory; each stage has its own inside."""
    policy: str = "tiny"
    """tiny or smollm2."""
    seed: int = 0
    """Seeds the policy's first weights and every order of tasks and data."""
    num_heldout: int | None = None
    """Held-out Tasks of each evaluation; None takes the policy's preset."""
    rl_steps: int | None = None
    """Optimizer steps of RLOO; None takes the policy's preset."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if self.policy not in PRESETS:
            raise ValueError(f"policy must be one of {', '.join(PRESETS)}, got {self.policy!r}")
        if self.num_heldout is not None and self.num_heldout < 2:
            raise ValueError(f"num_heldout must be >= 2 for an interval, got {self.num_heldout}")


async def main(config: Config) -> dict[str, Any]:
    """Runs all stages and returns the summary that it wrote."""
    preset = PRESETS[config.policy]
    with Run.open(config.run, config) as run:
        base = resolve_policy(config.policy, seed=config.seed)
        async with start_cluster(config.cluster):
            stages = _Stages(config, preset, run)
            harvested = await stages.harvest()
            await stages.sft("sft", base, stop=preset.stop)
            rloo_done = await stages.rloo("rloo", stages.model("sft"))
            await stages.sft("control", stages.model("sft"), max_seconds=rloo_done["seconds"])
            policies = {"base": base} | {name: stages.model(name) for name in ("sft", "rloo", "control")}
            scores = await stages.evaluate(policies)
            taught = await stages.teach(stages.model("rloo"))
        summary = _summary(config, stages, harvested, rloo_done, scores, taught)
        run.summary(summary)
        print(_table(summary))
        return summary


class _Stages:
    """The stages of one demo: each runs a recipe in a run directory of its own, and is timed."""

    def __init__(self, config: Config, preset: Preset, run: Run) -> None:
        self._config = config
        self._preset = preset
        self._run = run
        self._root = run.directory
        self.num_heldout = config.num_heldout or preset.num_heldout
        self.seconds: dict[str, float] = {}
        """Wall time of each stage."""

    def model(self, stage: str) -> Path:
        """Where a stage saved its policy."""
        return self._root / stage / "model"

    async def harvest(self) -> dict[str, Any]:
        episode = dataclasses.replace(self._preset.episode, harness=HarnessName.ORACLE)
        tasks = f"shell:train[:{self._preset.num_demonstrations}]"
        config = harvest.Config(run=self._root / "harvest", tasks=tasks, episode=episode)
        return await self._timed("harvest", harvest.main, config)

    async def sft(
        self, stage: str, model: Path, *, stop: sft.StopRule | None = None, max_seconds: float | None = None
    ) -> dict[str, Any]:
        config = sft.Config(
            run=self._root / stage,
            data=(self._root / "harvest",),
            epochs=self._preset.sft_epochs if stop else None,
            max_seconds=max_seconds,
            batch_size=self._preset.sft_batch_size,
            stop=stop or sft.StopRule(),
            seed=self._config.seed,
            policy=PolicyConfig(model=str(model)),
            learner=self._preset.sft_learner,
            learners=self._preset.sft_ranks,
        )
        return await self._timed(stage, sft.main, config)

    async def rloo(self, stage: str, model: Path) -> dict[str, Any]:
        preset = self._preset
        config = rloo.Config(
            run=self._root / stage,
            tasks=f"shell:train[{preset.num_demonstrations}:]",
            steps=self._config.rl_steps or preset.rl_steps,
            groups_per_step=preset.groups_per_step,
            group_size=preset.group_size,
            max_staleness=preset.max_staleness,
            seed=self._config.seed,
            policy=PolicyConfig(model=str(model), pool=preset.pool),
            episode=preset.episode,
            learner=preset.rl_learner,
            loss=LossConfig(kind=LossKind.CLIPPED),
        )
        return await self._timed(stage, rloo.main, config)

    async def evaluate(self, policies: dict[str, Path]) -> dict[str, dict[str, Any]]:
        """Two at a time: while the engine of one starts, the other plays."""
        free = asyncio.Semaphore(2)

        async def play(name: str, model: Path) -> dict[str, Any]:
            config = evaluate.Config(
                run=self._root / f"evaluate-{name}",
                tasks=f"shell:heldout[:{self.num_heldout}]",
                greedy=True,
                policy=PolicyConfig(model=str(model), pool=self._preset.pool),
                episode=self._preset.episode,
            )
            async with free:
                print(f"== evaluate-{name}", flush=True)
                return await evaluate.main(config)

        async def play_all(policies: dict[str, Path]) -> dict[str, Any]:
            async with asyncio.TaskGroup() as group:
                playing = {name: group.create_task(play(name, model)) for name, model in policies.items()}
            return {name: played.result() for name, played in playing.items()}

        return await self._timed("evaluate", play_all, policies)

    async def teach(self, teacher: Path) -> dict[str, Any]:
        """A harvest from the trained policy; its solved Trajectories are exported in both forms."""
        first = self._preset.num_demonstrations
        config = harvest.Config(
            run=self._root / "teach",
            tasks=f"shell:train[{first}:{first + self._preset.num_taught}]",
            policy=PolicyConfig(model=str(teacher), pool=self._preset.pool),
            episode=self._preset.episode,
        )
        summary = await self._timed("teach", harvest.main, config)
        for style in ConversationFormat:
            out = self._root / "teach" / f"solved-{style}.jsonl"
            summary |= await export.main(export.Config(data=(config.run,), out=out, format=export.ExportFormat(style)))
        return summary

    async def _timed(self, stage: str, main: Callable[[Any], Awaitable[dict[str, Any]]], config: Any) -> dict[str, Any]:
        """The recipe's summary; a stage that an earlier start of this run has finished is not played again."""
        done: dict[str, Any] = self._run.load_state() or {}
        if stage not in done:
            print(f"== {stage}", flush=True)
            began = time.monotonic()
            summary = await main(config)
            done[stage] = {"summary": summary, "seconds": round(time.monotonic() - began, 1)}
            self._run.save_state(done)
        self.seconds[stage] = done[stage]["seconds"]
        return done[stage]["summary"]


def _summary(
    config: Config,
    stages: _Stages,
    harvested: dict[str, Any],
    rloo_done: dict[str, Any],
    scores: dict[str, dict[str, Any]],
    taught: dict[str, Any],
) -> dict[str, Any]:
    """The demo's figures. Each gain is over SFT, paired by Task."""
    summary: dict[str, Any] = {"policy": config.policy, "seed": config.seed, "num_heldout": stages.num_heldout}
    for name, score in scores.items():
        summary[f"solved_{name}"] = score["solved"]
        summary[f"solved_{name}_ci95"] = score["ci95"]
        summary[f"solved_{name}_greedy"] = score["greedy"]["solved"]
        summary[f"solved_{name}_greedy_ci95"] = score["greedy"]["ci95"]
    for prefix, name in (("", "rloo"), ("control_", "control")):
        gain, interval = paired_gain(scores["sft"]["rewards"], scores[name]["rewards"])
        summary |= {f"{prefix}gain": gain, f"{prefix}gain_ci95": interval}
    reported = (
        "rl_steps",
        "weight_syncs",
        "weight_syncs_in_flight",
        "max_staleness_seen",
        "logprob_gap_mean",
        "engine",
        "learner",
        "world_size",
        "sandbox",
    )
    return (
        summary
        | {key: rloo_done[key] for key in reported}
        | {
            "harvested": harvested["harvested"],
            "harvested_from_policy": taught["harvested"],
            "exported_from_policy": taught["written"],
            "seconds": stages.seconds | {"total": round(sum(stages.seconds.values()), 1)},
        }
    )


def _table(summary: dict[str, Any]) -> str:
    """What a person wants to see at the end."""
    rows = [f"{'policy':<10}{'solved':>8}{'95% interval':>20}{'greedy':>9}"]
    for name in ("base", "sft", "rloo", "control"):
        low, high = summary[f"solved_{name}_ci95"]
        rows.append(
            f"{name:<10}{summary[f'solved_{name}']:>8.3f}{f'{low:.3f} to {high:.3f}':>20}"
            f"{summary[f'solved_{name}_greedy']:>9.3f}"
        )
    low, high = summary["gain_ci95"]
    rows.append(f"gain of RLOO over SFT {summary['gain']:+.3f} (95% {low:+.3f} to {high:+.3f})")
    rows.append(f"{summary['num_heldout']} held-out tasks; {summary['seconds']['total']:.0f} s in all")
    return "\n".join(rows)


if __name__ == "__main__":
    launch(Config, main)
