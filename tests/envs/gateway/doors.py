"""A gateway in this process, clients that nobody here wrote, and replies that a test writes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envs.gateway.app import make_app
from envs.gateway.prompts import ChatPrompts
from envs.gateway.session import Session, SessionConfig, Sessions
from envs.renderer import ChatRenderer
from envs.sampler import Sampler, SamplingParams
from tests.envs.tokens import CHATML_TEMPLATE, special_id, text_ids, tiny_renderer
from tests.fakes.sampler import FakeSampler
from trajectories.samples import trajectory_samples
from trajectories.schema import Outcome, Trajectory

END = special_id("<|im_end|>")
MODEL = "policy"


@dataclass
class Gateway:
    """The application and its one session."""

    sampler: FakeSampler
    session: Session
    app: Any

    @property
    def trajectory(self) -> Trajectory:
        return as_trajectory(self.session)

    def samples_are_what_the_engine_saw(self) -> bool:
        """Every call's prompt and reply stand in some Sample, trained exactly once."""
        samples = trajectory_samples(self.trajectory)
        contexts = [tuple(sample.ids.tolist()) for sample in samples]
        prompts = [prompt for prompt, _, _ in self.sampler.calls]
        num_sampled = sum(len(turn.tokens.sampled_ids) for turn in self.session.turns if turn.tokens)
        assert sum(int(sample.mask.sum()) for sample in samples) == num_sampled
        return all(any(context[: len(prompt)] == prompt for context in contexts) for prompt in prompts)


def as_trajectory(session: Session) -> Trajectory:
    return Trajectory(
        id="t",
        task_id="task",
        group_id="g",
        member=0,
        prompt=session.prompt,
        turns=tuple(session.turns),
        outcome=Outcome.COMPLETED,
        reward=1.0,
    )


def replies(*texts: str) -> Callable[[Sequence[int]], Sequence[int]]:
    """These replies one after the other, each with its end token."""
    remaining: Iterator[str] = iter(texts)
    return lambda prompt_ids: [*text_ids(next(remaining)), END]


def make_gateway(
    *texts: str, sampler: Sampler | None = None, renderer: ChatRenderer | None = None, **config: Any
) -> Gateway:
    """A gateway whose policy says `texts`."""
    fake = sampler or FakeSampler(replies(*texts), tokens_per_version=8)
    prompts = ChatPrompts(renderer or tiny_renderer(CHATML_TEMPLATE))
    sessions = Sessions()
    settings = {"sampling": SamplingParams(max_tokens=512), "context_tokens": 8192} | config
    session = sessions.add(Session(prompts, fake, SessionConfig(**settings), key="t"))
    assert isinstance(fake, FakeSampler)
    return Gateway(sampler=fake, session=session, app=make_app(sessions, prompts, model=MODEL))


def openai_client(gateway: Gateway, token: str | None = None) -> Any:
    """The `openai` package's client, its requests answered in this process."""
    return client_of_app(gateway.app, token or gateway.session.token)


def client_of_app(app: Any, token: str) -> Any:
    """The same for an application that is not a Gateway's."""
    import httpx2
    import openai

    return openai.AsyncOpenAI(
        base_url="http://door/v1",
        api_key=token,
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app)),
    )


def anthropic_client(gateway: Gateway, token: str | None = None) -> Any:
    """The `anthropic` package's client, likewise."""
    import anthropic
    import httpx2

    return anthropic.AsyncAnthropic(
        base_url="http://door",
        api_key=token or gateway.session.token,
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app)),
    )
