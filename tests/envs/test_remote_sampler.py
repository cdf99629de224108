"""A teacher behind an endpoint: what is said, what is counted, and what its failures become."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from envs import remote_sampler, request_limiter
from envs.episode import Episode
from envs.errors import BudgetExceeded, ContextLimit, SamplerError, TeacherRefused, TurnLimit
from envs.group import run_group
from envs.harbor import load_task
from envs.harness import Conversation
from envs.remote_sampler import Endpoint, RemoteConversation, Teacher
from envs.request_limiter import Limiter, retry_after_s
from envs.sampler import SamplingParams
from envs.sandbox import Sandbox
from envs.task import Task
from tests.envs.task_dirs import make_task_dir
from tests.fakes.directory_sandbox import DirectoryProvider
from tests.fakes.endpoint import Fails, FakeEndpoint, Hangs, Says
from tests.fakes.harness import FunctionHarness
from trajectories.schema import Usage

SAMPLING = SamplingParams(temperature=0.5, max_tokens=50)
ONE_REPLY = Usage(prompt_tokens=100, completion_tokens=10, cost_usd=0.0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_sampler, "_FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(request_limiter, "_DEFAULT_PAUSE_S", 0.01)


@asynccontextmanager
async def asking(fake: FakeEndpoint, **teacher: Any) -> AsyncGenerator[Endpoint]:
    async with fake.served() as base_url:
        endpoint = Endpoint(Teacher(base_url=base_url, model="m", **teacher))
        yield endpoint
        await endpoint.close()


def conversation(endpoint: Endpoint, max_turns: int = 9) -> RemoteConversation:
    return RemoteConversation(endpoint, SAMPLING, max_turns=max_turns)


async def ask(endpoint: Endpoint, num: int = 1) -> Sequence[str]:
    return await asyncio.gather(*(conversation(endpoint).ask("hi") for _ in range(num)))


async def test_a_conversation_is_text_with_usage_and_without_tokens() -> None:
    fake = FakeEndpoint()
    async with asking(fake, prompt_usd_per_million=2.0, completion_usd_per_million=5.0) as endpoint:
        told = conversation(endpoint, max_turns=2)
        assert [await told.ask("one"), await told.ask("two")] == ["reply 1", "reply 2"]
        with pytest.raises(TurnLimit):
            await told.ask("three")
    cost = (100 * 2.0 + 10 * 5.0) / 1e6
    assert [(turn.reply, turn.observation, turn.tokens, turn.usage) for turn in told.turns] == [
        (reply, observation, None, Usage(prompt_tokens=100, completion_tokens=10, cost_usd=cost))
        for reply, observation in (("reply 1", "two"), ("reply 2", ""))
    ]
    assert told.prompt == "one"
    assert fake.bodies[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "reply 1"},
        {"role": "user", "content": "two"},
    ]
    assert (fake.bodies[1]["temperature"], fake.bodies[1]["max_tokens"]) == (0.5, 50)


async def test_what_may_pass_is_tried_again() -> None:
    fake = FakeEndpoint([Fails(status=500), Fails(status=503), Fails(status=429, headers={"Retry-After": "0.01"})])
    async with asking(fake) as endpoint:
        assert await ask(endpoint) == ["reply 1"]
    assert len(fake.bodies) == 4


@pytest.mark.parametrize(
    "says",
    [
        Says(body="<html>busy</html>", media_type="text/html"),
        Says(body=""),
        Says(body='{"id": "x", "cho'),
        Says(body='{"error": {"message": "upstream is down", "code": 502}}'),
        Says(body='{"choices": []}'),
        Says(body='{"choices": ["x"]}'),
        Says(body='{"choices": [{"finish_reason": "stop"}]}'),
        Says(body='{"choices": 7}'),
        Says(body='{"choices": [{"finish_reason": "stop", "message": "hello"}]}'),
        Says(body='{"choices": [{"finish_reason": "stop", "message": {"content": [{"text": "a"}]}}]}'),
        Says(body='{"choices": [{"finish_reason": "stop", "message": {"content": "a"}}], "usage": {}}'),
        Says(body='{"choices": [{"finish_reason": "stop", "message": {"content": "a"}}], "usage": "much"}'),
        Says(body=b'{"choices": "\xe2\x82'),
        Says(body="[" * 100_000),
        Says(body="[1]"),
        Says(body="7"),
        Says(body="null"),
    ],
)
async def test_an_answer_that_is_no_completion_is_tried_again(says: Says) -> None:
    fake = FakeEndpoint([says])
    async with asking(fake, max_tokens=10_000) as endpoint:
        assert await ask(endpoint) == ["reply 1"]
        assert endpoint.budget.spent == ONE_REPLY
    fake = FakeEndpoint([says, says])
    async with asking(fake, max_attempts=2) as endpoint:
        with pytest.raises(SamplerError, match="the answer is no"):
            await ask(endpoint)


async def test_an_answer_without_a_reply_is_paid_for_all_the_same() -> None:
    fake = FakeEndpoint([Says(body='{"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}')])
    async with asking(fake, max_tokens=10_000) as endpoint:
        assert await ask(endpoint) == ["reply 1"]
        assert endpoint.budget.spent == ONE_REPLY + ONE_REPLY


@pytest.mark.parametrize("message", ["null", "{}", '{"content": null}'])
async def test_a_reply_that_was_filtered_is_not_asked_for_again(message: str) -> None:
    fake = FakeEndpoint([Says(body=f'{{"choices": [{{"finish_reason": "content_filter", "message": {message}}}]}}')])
    async with asking(fake) as endpoint:
        with pytest.raises(SamplerError, match="no reply in words: content_filter"):
            await ask(endpoint)
    assert len(fake.bodies) == 1


async def test_a_request_that_hangs_is_given_up_and_tried_again() -> None:
    fake = FakeEndpoint([Hangs(seconds=1.0)])
    async with asking(fake, request_timeout_s=0.2) as endpoint:
        assert (await ask(endpoint))[0].startswith("reply")
    assert len(fake.bodies) == 2


async def test_too_many_failures_are_a_sampler_error() -> None:
    fake = FakeEndpoint([Fails(status=500)] * 9)
    async with asking(fake, max_attempts=3) as endpoint:
        with pytest.raises(SamplerError, match="InternalServerError"):
            await ask(endpoint)
    assert len(fake.bodies) == 3


async def test_an_endpoint_that_always_throttles_meets_the_deadline() -> None:
    fake = FakeEndpoint(capacity=0)
    async with asking(fake, reply_deadline_s=0.5) as endpoint:
        with pytest.raises(SamplerError, match=r"no reply within 0\.5 s"):
            await ask(endpoint)
    assert fake.num_answered == 0


async def test_nobody_there_is_a_sampler_error() -> None:
    endpoint = Endpoint(Teacher(base_url="http://127.0.0.1:9/v1", model="m", max_attempts=2))
    with pytest.raises(SamplerError, match="Connection"):
        await ask(endpoint)
    await endpoint.close()


@pytest.mark.parametrize(
    ("fails", "error", "words"),
    [
        (Fails(status=401), TeacherRefused, "api_key_env"),
        (Fails(status=404, code="model_not_found"), TeacherRefused, "refuses model m"),
        (Fails(status=400, message="unknown field top_p"), TeacherRefused, "unknown field"),
        (Fails(status=400, code="context_length_exceeded"), ContextLimit, "told to fail"),
        (Fails(status=429, code="insufficient_quota"), BudgetExceeded, "used up"),
    ],
)
async def test_what_will_not_pass_is_not_tried_again(fails: Fails, error: type[Exception], words: str) -> None:
    fake = FakeEndpoint([fails])
    async with asking(fake) as endpoint:
        with pytest.raises(error, match=words):
            await ask(endpoint)
    assert len(fake.bodies) == 1


async def test_concurrency_settles_at_what_the_endpoint_bears() -> None:
    fake = FakeEndpoint(capacity=3, delay_s=0.02)
    async with asking(fake, max_concurrency=32) as endpoint:
        replies = await ask(endpoint, 60)
    assert len(set(replies)) == 60
    assert fake.most_at_once == 3
    assert fake.num_throttled > 0
    assert endpoint.limiter.limit < 8


async def test_concurrency_rises_to_the_ceiling_and_no_further() -> None:
    fake = FakeEndpoint(delay_s=0.005)
    async with asking(fake, max_concurrency=12) as endpoint:
        await ask(endpoint, 80)
    assert fake.most_at_once <= 12
    assert endpoint.limiter.limit == 12


def test_a_round_of_successes_adds_one_and_a_round_of_429s_halves_once() -> None:
    limiter = Limiter(100)
    for _ in range(8):
        limiter.succeed()
    assert limiter.limit == pytest.approx(8.96, abs=0.05)
    began = 1.0
    for _ in range(5):
        limiter.throttle(began, 0.0)  # all of them under way when the first came back
    assert limiter.limit == pytest.approx(4.48, abs=0.03)
    limiter.throttle(1e18, 0.0)
    assert limiter.limit == pytest.approx(2.24, abs=0.02)


async def test_no_request_begins_in_a_pause_that_grew_while_it_waited() -> None:
    limiter = Limiter(8)
    began_at: list[float] = []

    async def throttled(after_s: float, pause_s: float) -> None:
        async with limiter.slot() as began:
            await asyncio.sleep(after_s)
            limiter.throttle(began, pause_s)

    async def third() -> None:
        await asyncio.sleep(0.02)
        async with limiter.slot() as began:
            began_at.append(began)

    start = time.monotonic()
    await asyncio.gather(throttled(0.01, 0.05), throttled(0.03, 0.2), third())
    assert began_at[0] - start >= 0.23


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), (None, 0.01), ("soon", 0.01)])
def test_retry_after_is_read(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    assert retry_after_s(formatdate(0, usegmt=True)) == 0.0
    assert retry_after_s(formatdate(4e9, usegmt=True)) > 1e8


async def test_a_spent_budget_of_tokens_ends_it() -> None:
    fake = FakeEndpoint()
    async with asking(fake, max_tokens=330) as endpoint:
        await ask(endpoint, 3)
        with pytest.raises(BudgetExceeded, match=r"max_tokens is spent \(330 of 330 here\)"):
            await ask(endpoint)
    assert fake.num_answered == 3


async def test_a_spent_budget_ends_a_group_as_itself(tmp_path: Path) -> None:
    """Not as an ExceptionGroup, which no recipe could tell from a bug, and not as an Outcome, which would be stored."""

    async def talk(task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        while True:
            await conversation.ask("go on")

    async with asking(FakeEndpoint(), max_tokens=550) as endpoint:
        episode = Episode(
            provider=DirectoryProvider(tmp_path / "boxes"),
            harness=FunctionHarness(talk),
            converse=lambda task, key: conversation(endpoint, max_turns=99),
        )
        task = load_task(make_task_dir(tmp_path))
        with pytest.raises(BudgetExceeded, match="max_tokens is spent"):
            await run_group(task, size=3, episode=episode, group_id="g", deadline_s=30)


async def test_a_spent_budget_of_money_ends_it() -> None:
    prices = {"prompt_usd_per_million": 1.0, "completion_usd_per_million": 10.0}
    async with asking(FakeEndpoint(), max_cost_usd=0.0003, **prices) as endpoint:
        await ask(endpoint)  # 100 x 1 + 10 x 10 = 200 millionths
        await ask(endpoint)
        with pytest.raises(BudgetExceeded, match=r"0\.0004 of 0\.0003"):
            await ask(endpoint)


async def test_a_budget_without_usage_is_refused() -> None:
    async with asking(FakeEndpoint(has_usage=False), max_tokens=1000) as endpoint:
        with pytest.raises(TeacherRefused, match="reports no usage"):
            await ask(endpoint)


async def test_the_key_is_read_from_its_variable_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "k-123")
    fake = FakeEndpoint([Fails(status=401)])
    async with asking(fake, api_key_env="TEACHERS_KEY") as endpoint:
        with pytest.raises(TeacherRefused) as caught:
            await ask(endpoint)
        assert "k-123" not in str(caught.value)
        await ask(endpoint)
    assert fake.keys == ["k-123", "k-123"]
    assert "k-123" not in repr(Teacher(base_url="http://x/v1", model="m", api_key_env="TEACHERS_KEY"))


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHERS_KEY", raising=False)
    with pytest.raises(ValueError, match="TEACHERS_KEY"):
        Endpoint(Teacher(base_url="http://x/v1", model="m", api_key_env="TEACHERS_KEY"))


def test_workers_share_what_is_left() -> None:
    budgets: dict[str, Any] = {"max_tokens": 1000, "max_cost_usd": 3.0, "prompt_usd_per_million": 1.0}
    teacher = Teacher(base_url="http://x/v1", model="m", max_concurrency=5, **budgets)
    share = teacher.share(4, Usage(prompt_tokens=150, completion_tokens=50, cost_usd=1.0))
    assert (share.max_tokens, share.max_cost_usd, share.max_concurrency) == (200, 0.5, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_url": "http://x"}, "go together"),
        ({"base_url": "http://x", "model": "m", "max_cost_usd": 1.0}, "prompt_usd_per_million"),
        ({"max_attempts": 0}, "above 0"),
    ],
)
def test_a_teacher_that_makes_no_sense_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Teacher(**fields)


def test_usage_adds_up() -> None:
    assert Usage(prompt_tokens=200, completion_tokens=20, cost_usd=0.0) == ONE_REPLY + ONE_REPLY
    assert ONE_REPLY.num_tokens == 110
