"""The failures that a rollout may meet; each one names the Outcome it becomes.

Invariant: only these become data. Anything else raised inside an episode is a bug and propagates.

EpisodeError
+-- SandboxError        the sandbox could not be made, reached or kept by its provider -> sandbox_error
|   +-- SandboxRefused  this machine cannot isolate; the message names the failed step, errno and remedy
+-- SandboxDied         the sandbox died from inside: its policy killed it            -> agent_error
+-- MalformedReply      a reply cannot be parsed and the harness does not ask again   -> agent_error
+-- AgentFailed         a third-party agent ended with an error                      -> agent_error
+-- HarnessTimeout      the agent's time is over                                      -> agent_timeout
+-- TurnLimit           the Turn limit is reached                                     -> turn_limit
+-- ContextLimit        the next prompt does not fit the context                      -> context_limit
+-- SamplerError        no Completion came                                            -> sampler_error
+-- VerifierError       no valid reward came                                          -> verifier_error
+-- GroupDeadline       the time of its group is over                                 -> cancelled
BudgetExceeded          a teacher's budget is spent; ends the run with what is done kept
AgentCommandError       a third-party agent never came to ask for a reply; ends the run
TeacherRefused          a teacher will never answer: wrong key, model or field; ends the run
TaskError               a Task is malformed, or asks for what no episode plays; raised before any work starts
"""

from trajectories.schema import Outcome


class EpisodeError(Exception):
    """Base of the failures that end a rollout and become its Outcome."""

    outcome: Outcome


class SandboxError(EpisodeError):
    """The sandbox could not be made, reached or kept by its provider."""

    outcome = Outcome.SANDBOX_ERROR


class SandboxRefused(SandboxError):
    """This machine cannot run the sandbox as asked; nothing was started."""


class SandboxDied(EpisodeError):
    """The sandbox died from inside: its policy killed it."""

    outcome = Outcome.AGENT_ERROR


class MalformedReply(EpisodeError):
    """A reply cannot be parsed, and the harness is configured not to ask again."""

    outcome = Outcome.AGENT_ERROR


class AgentFailed(EpisodeError):
    """A third-party agent ended with an error after it had begun."""

    outcome = Outcome.AGENT_ERROR


class HarnessTimeout(EpisodeError):
    """The agent's time is over."""

    outcome = Outcome.AGENT_TIMEOUT


class TurnLimit(EpisodeError):
    """The Turn limit is reached."""

    outcome = Outcome.TURN_LIMIT


class ContextLimit(EpisodeError):
    """The next prompt does not fit the context."""

    outcome = Outcome.CONTEXT_LIMIT


class SamplerError(EpisodeError):
    """No Completion came."""

    outcome = Outcome.SAMPLER_ERROR


class VerifierError(EpisodeError):
    """No valid reward came."""

    outcome = Outcome.VERIFIER_ERROR


class GroupDeadline(EpisodeError):
    """The time of its Group is over."""

    outcome = Outcome.CANCELLED


class BudgetExceeded(RuntimeError):
    """What a teacher may cost is spent: the run ends with what is done kept, and the rest is not played."""


class AgentCommandError(ValueError):
    """An agent's program ended badly before its first request: its command or its installation is wrong."""


class TeacherRefused(ValueError):
    """A teacher's endpoint will never answer such a request: a wrong key, model or field."""


class TaskError(ValueError):
    """A Task is malformed or not played here: one line with the path or id, what is wrong and the remedy."""
