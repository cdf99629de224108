import asyncio

from actors.inference_admission import Admission


async def enter(admission: Admission, name: str, log: list[str], leave: asyncio.Event, *, priority=0, tokens=10):
    async with admission.slot(priority, tokens):
        log.append(name)
        await leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests that entered an Admission, in order, and the way to end each."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.log: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, **what: int) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(enter(self.admission, name, self.log, self.ends[name], **what))
        await settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()


async def test_older_groups_come_first_and_equals_in_order_of_arrival():
    crowd = Crowd(Admission(1, 1000))
    await crowd.come("running")
    await crowd.come("young", priority=9)
    await crowd.come("old", priority=1)
    await crowd.come("old too", priority=1)
    assert crowd.admission.num_waiting == 3
    for name in ("running", "old", "old too", "young"):
        await crowd.end(name)
    assert crowd.log == ["running", "old", "old too", "young"]
    assert (crowd.admission.num_running, crowd.admission.num_waiting) == (0, 0)


async def test_a_prompt_waits_until_the_cache_has_room_for_it():
    crowd = Crowd(Admission(8, 1000))
    await crowd.come("a", tokens=500)
    crowd.admission.observe(0.5, 0)
    crowd.admission.observe(0.5, 0)
    await crowd.come("b", tokens=450)
    assert crowd.log == ["a", "b"], "500 + 450 fit under 950"
    await crowd.come("c", tokens=100)
    assert crowd.log == ["a", "b"], "b's 450 are counted before the engine reports them"
    crowd.admission.observe(0.8, 0)
    crowd.admission.observe(0.8, 0)
    assert crowd.admission.num_running == 3, "800 + 100 fit: b shares most of its prompt with a"


async def test_an_idle_engine_admits_what_is_larger_than_its_cache():
    crowd = Crowd(Admission(8, 1000))
    await crowd.come("huge", tokens=5000)
    assert crowd.log == ["huge"]


async def test_preemptions_lower_the_limit_and_calm_raises_it():
    crowd = Crowd(Admission(4, 1000))
    for name in "abcd":
        await crowd.come(name)
    crowd.admission.observe(1.0, 2)
    assert (crowd.admission.limit, crowd.admission.num_preemptions) == (2, 2)
    await crowd.come("e")
    await crowd.end("a")
    crowd.admission.observe(0.9, 0)
    assert crowd.log == list("abcd"), "3 run, and 2 may"
    for _ in range(2):
        crowd.admission.observe(0.5, 0)
    await settle()
    assert crowd.log == list("abcde")


async def test_whoever_gives_up_waiting_takes_no_slot():
    crowd = Crowd(Admission(1, 1000))
    for name in "abc":
        await crowd.come(name)
    crowd.tasks["b"].cancel()
    await settle()
    assert crowd.admission.num_waiting == 1
    await crowd.end("a")
    assert crowd.log == ["a", "c"] and crowd.admission.num_running == 1
    crowd.tasks["c"].cancel()
    await settle()
    assert crowd.admission.num_running == 0
