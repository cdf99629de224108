"""EpisodeConfig and what is built from it: the provider, harness and conversations of a rollout worker.

Invariant: a config is checked when it is made and builds without a network or a GPU. Composed by recipes; built by
actors/rollout_worker.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import tyro

from envs.answer import AnswerForm, AnswerHarness
from envs.bash_tools import BashTools, BashToolsConfig
from envs.conversation import SampledConversation, ScriptedConversation
from envs.episode import Episode
from envs.harness import Conversation, Harness
from envs.local.provider import LocalConfig, LocalProvider
from envs.nop import NopHarness
from envs.oracle import SolutionScript, oracle_conversation, script_conversation
from envs.renderer import load_renderer
from envs.sampler import Sampler, SamplingParams
from envs.task import Task
from envs.terminus2.harness import Malformed, Terminus2
from envs.terminus2.prompts import COMPACT, FULL, Prompts, ReplyFormat, in_format
from envs.terminus2.summary import SummaryConfig
from envs.timeouts import TimeoutRule


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
    NOP = "nop"
    """Nobody: the Verifier judges an untouched Sandbox."""

    @property
    def needs_policy(self) -> bool:
        """Whether a policy must be served."""
        return self in (HarnessName.TERMINUS_2, HarnessName.BASH_TOOLS, HarnessName.ANSWER)


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
    sandbox: LocalConfig = field(default_factory=LocalConfig)

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

    @property
    def terminal_prompts(self) -> Prompts:
        """What terminus-2 says."""
        return in_format(self.prompts.prompts, self.reply_format)


def build_episode(config: EpisodeConfig, *, model: Path | None, sampler: Sampler | None) -> Episode:
    """The Episode of a worker. `model` is the policy's directory (for its tokenizer); oracle and nop need neither."""
    return Episode(
        provider=LocalProvider(config.sandbox),
        harness=_harness(config),
        converse=_converse(config, model, sampler),
        agent_timeout_s=config.agent_timeout_s,
        max_agent_timeout_s=config.max_agent_timeout_s,
        timeout_rule=config.timeout_rule,
        timeout_multiplier=config.timeout_multiplier,
        max_verifier_timeout_s=config.max_verifier_timeout_s,
        keep_dir=config.keep_dir,
        provenance={"player": str(config.harness), "model": str(model or config.harness)},
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
    config: EpisodeConfig, model: Path | None, sampler: Sampler | None
) -> Callable[[Task, str], Conversation]:
    if config.harness is HarnessName.NOP:
        return lambda task, key: ScriptedConversation(())
    if config.harness is HarnessName.ORACLE_SCRIPT:
        return lambda task, key: script_conversation(task)
    if config.harness is HarnessName.ORACLE:
        return lambda task, key: oracle_conversation(task, config.terminal_prompts)
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
