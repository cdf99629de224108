"""EpisodeConfig and what is built from it: the provider, harness and conversations of a rollout worker.

Invariant: a config is checked when it is made and builds without a network or a GPU. Composed by recipes; built by
actors/rollout_worker.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from envs.agent_command import AgentCommand, AgentCommandConfig
from envs.answer import AnswerForm, AnswerHarness
from envs.bash_tools import BashTools, BashToolsConfig
from envs.conversation import SampledConversation, ScriptedConversation
from envs.creation import CreationGate
from envs.episode import Episode
from envs.gateway.door import BOX_DIRECTORY, Door, DoorProvider
from envs.gateway.prompts import ChatPrompts
from envs.gateway.session import Session, SessionConfig, Sessions
from envs.harness import Conversation, Harness
from envs.local.staging import stage
from envs.nop import NopHarness
from envs.oracle import SolutionScript, oracle_conversation, script_conversation
from envs.providers import ProviderName, SandboxConfig, build_provider
from envs.remote_sampler import Endpoint, RemoteConversation, Teacher
from envs.renderer import load_renderer
from envs.sampler import Sampler, SamplingParams
from envs.sandbox import SandboxProvider
from envs.task import Task
from envs.terminus2.harness import Malformed, Terminus2
from envs.terminus2.prompts import COMPACT, FULL, Prompts, ReplyFormat, in_format
from envs.terminus2.summary import SummaryConfig
from envs.timeouts import TimeoutRule

ProviderBuilder = Callable[[SandboxConfig], SandboxProvider]
Parts = tuple[SandboxProvider, Harness, Callable[[Task, str], Conversation]]
"""What an Episode plays with."""


class HarnessName(StrEnum):
    """What plays a Task."""

    TERMINUS_2 = "terminus-2"
    """A served policy drives a terminal."""
    BASH_TOOLS = "bash-tools"
    """A served policy calls a bash tool, and submit; the image needs no tmux."""
    ANSWER = "answer"
    """A served policy replies once, and its reply becomes a file."""
    ORACLE = "oracle"
    """The reference solution, played through the same terminal in the same reply format."""
    ORACLE_SCRIPT = "oracle-script"
    """The reference solution, run whole: for solutions that cannot be typed, and images without tmux."""
    AGENT_COMMAND = "agent-command"
    """A third-party agent inside the sandbox, on a served policy; `agent.command` says which."""
    NOP = "nop"
    """Nobody: the Verifier judges an untouched Sandbox."""

    @property
    def needs_policy(self) -> bool:
        """Whether a policy must be served."""
        needing = (HarnessName.TERMINUS_2, HarnessName.BASH_TOOLS, HarnessName.ANSWER, HarnessName.AGENT_COMMAND)
        return self in needing


class PromptStyle(StrEnum):
    """How terminus-2 speaks to the policy."""

    COMPACT = "compact"
    """The bare instruction and screen, for a tiny policy: a whole rollout stays under 300 tokens."""
    FULL = "full"
    """Role, reply format and rules, for real models."""

    @property
    def prompts(self) -> Prompts:
        """The texts."""
        return COMPACT if self is PromptStyle.COMPACT else FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeConfig:
    """How Tasks are played."""

    harness: Annotated[HarnessName, tyro.conf.arg(aliases=["--harness"])] = HarnessName.TERMINUS_2
    prompts: PromptStyle = PromptStyle.COMPACT
    reply_format: ReplyFormat = ReplyFormat.JSON
    """How terminus-2's replies are written, the oracle's too."""
    malformed: Malformed = Malformed.REASK
    """What a reply that cannot be parsed leads to."""
    summarize: bool = False
    """Whether terminus-2 sums up a context that is nearly full and goes on; else the rollout ends there."""
    summary: SummaryConfig = field(default_factory=SummaryConfig)
    bash_tools: BashToolsConfig = field(default_factory=BashToolsConfig)
    answer: AnswerForm = AnswerForm.TEXT
    """What of a reply harness answer writes to the Task's answer file."""
    max_turns: int = 6
    """Replies of one rollout."""
    context_tokens: int = 2048
    """Prompt and reply together, in tokens; the rollout ends with context_limit when the next prompt does not fit."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    agent_timeout_s: float | None = None
    """Replaces each Task's own agent limit; None keeps it."""
    max_agent_timeout_s: float = 1800.0
    """Caps the agent limit, before the multiplier; a Task without a limit gets this one."""
    max_verifier_timeout_s: float = 120.0
    timeout_rule: TimeoutRule = TimeoutRule.HARBOR
    """harbor: min(task, cap) x multiplier. paper: min(2 h, task x multiplier) for the agent, without the cap."""
    timeout_multiplier: float = 1.0
    group_deadline_s: float = 600.0
    """A Group is closed with its survivors after this; the others are cancelled, and excluded."""
    keep_dir: Path | None = None
    """Artifacts and what the tests wrote stay in keep_dir/TRAJECTORY, an absolute path that every worker can write."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentCommandConfig = field(default_factory=AgentCommandConfig)
    """What harness agent-command runs."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be >= 1, got {self.max_turns}")
        if self.context_tokens < 2:
            raise ValueError(f"context_tokens must be >= 2, got {self.context_tokens}")
        if self.summarize and 2 * max(self.summary.below_tokens, self.summary.unwind_tokens) > self.context_tokens:
            raise ValueError(
                "summary.below_tokens and summary.unwind_tokens must be at most half of context_tokens, "
                f"got {self.summary} and {self.context_tokens}"
            )
        if self.keep_dir is not None and not self.keep_dir.is_absolute():
            raise ValueError(f"keep_dir must be an absolute path, as workers run elsewhere, got {self.keep_dir}")
        for name in (
            "agent_timeout_s",
            "max_agent_timeout_s",
            "max_verifier_timeout_s",
            "timeout_multiplier",
            "group_deadline_s",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if (self.harness is HarnessName.AGENT_COMMAND) != bool(self.agent.command):
            raise ValueError(
                f"harness agent-command and agent.command go together, got {self.harness} and {self.agent.command!r}"
            )
        if self.harness is HarnessName.AGENT_COMMAND and self.sandbox.provider is not ProviderName.LOCAL:
            raise ValueError(
                f"harness agent-command needs sandbox.provider local, whose boxes see the gateway's door; "
                f"got {self.sandbox.provider}"
            )

    @property
    def terminal_prompts(self) -> Prompts:
        """What terminus-2 says."""
        return in_format(self.prompts.prompts, self.reply_format)


def build_episode(
    config: EpisodeConfig,
    *,
    model: Path | None,
    sampler: Sampler | Teacher | None,
    run: str = "unnamed",
    gate: CreationGate | None = None,
) -> Episode:
    """The Episode of a worker. `model` is the policy's directory (for its tokenizer); oracle and nop need neither.

    A Teacher in the place of the sampler is asked over HTTP, by text, and needs no model directory. `run` names the
    Leases of its Sandboxes; `gate` is shared with the other workers of the run, None without limits.
    """
    parts = _agent_parts if config.harness is HarnessName.AGENT_COMMAND else _parts
    provider, harness, converse = parts(config, model, sampler, partial(build_provider, run=run, gate=gate))
    return Episode(
        provider=provider,
        harness=harness,
        converse=converse,
        agent_timeout_s=config.agent_timeout_s,
        max_agent_timeout_s=config.max_agent_timeout_s,
        timeout_rule=config.timeout_rule,
        timeout_multiplier=config.timeout_multiplier,
        max_verifier_timeout_s=config.max_verifier_timeout_s,
        keep_dir=config.keep_dir,
        provenance={"player": str(config.harness), "model": _model_name(config, model, sampler)},
    )


def _model_name(config: EpisodeConfig, model: Path | None, sampler: Sampler | Teacher | None) -> str:
    return sampler.model if isinstance(sampler, Teacher) else str(model or config.harness)


def _parts(
    config: EpisodeConfig, model: Path | None, sampler: Sampler | Teacher | None, provide: ProviderBuilder
) -> Parts:
    return provide(config.sandbox), _harness(config), _converse(config, model, sampler)


def _agent_parts(
    config: EpisodeConfig, model: Path | None, sampler: Sampler | Teacher | None, provide: ProviderBuilder
) -> Parts:
    """A door of this worker's own, sandboxes that see it, and sessions behind it."""
    from envs.gateway.app import make_app  # a web framework, for those alone who open a door

    if model is None or sampler is None or isinstance(sampler, Teacher):
        raise ValueError(f"harness {config.harness} needs a served policy, whose exact tokens the gateway records")
    prompts, sessions = ChatPrompts(load_renderer(model)), Sessions()
    limits = SessionConfig(sampling=config.sampling, max_turns=config.max_turns, context_tokens=config.context_tokens)
    door = Door(make_app(sessions, prompts, model=config.agent.model))
    local = config.sandbox.local
    local = replace(local, mounts=(*local.mounts, f"{door.directory}:{BOX_DIRECTORY}"))
    return (
        DoorProvider(provide(replace(config.sandbox, local=local)), door),
        AgentCommand(config=config.agent, stage=lambda: stage(local.cache_dir)),
        lambda task, key: sessions.add(Session(prompts, sampler, limits, key=key)),
    )


def _harness(config: EpisodeConfig) -> Harness:
    if config.harness is HarnessName.NOP:
        return NopHarness()
    if config.harness is HarnessName.ORACLE_SCRIPT:
        return SolutionScript()
    if config.harness is HarnessName.BASH_TOOLS:
        return BashTools(config.bash_tools)
    if config.harness is HarnessName.ANSWER:
        return AnswerHarness(config.answer)
    summary = config.summary if config.summarize else None
    return Terminus2(config.terminal_prompts, malformed=config.malformed, summary=summary)


def _converse(
    config: EpisodeConfig, model: Path | None, sampler: Sampler | Teacher | None
) -> Callable[[Task, str], Conversation]:
    if config.harness is HarnessName.NOP:
        return lambda task, key: ScriptedConversation(())
    if config.harness is HarnessName.ORACLE_SCRIPT:
        return lambda task, key: script_conversation(task)
    if config.harness is HarnessName.ORACLE:
        return lambda task, key: oracle_conversation(task, config.terminal_prompts)
    if isinstance(sampler, Teacher):
        if config.summarize:
            raise ValueError("summarize needs a served policy: the context of a remote teacher is not counted here")
        endpoint = Endpoint(sampler)
        return lambda task, key: RemoteConversation(endpoint, config.sampling, max_turns=config.max_turns)
    if model is None or sampler is None:
        raise ValueError(f"harness {config.harness} needs a served policy")
    renderer = load_renderer(model)
    return lambda task, key: SampledConversation(
        renderer,
        sampler,
        config.sampling,
        max_turns=config.max_turns,
        context_tokens=config.context_tokens,
        key=key,
    )
