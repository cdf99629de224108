"""The Verifier: which reward files count, and what everything else is."""

from pathlib import Path

import pytest

from envs.errors import SandboxDied, VerifierError
from envs.harbor import load_task
from envs.verifier import EVIDENCE_CHARS, Verdict, verify
from tests.envs.task_dirs import make_task_dir
from tests.fakes.directory_sandbox import DirectorySandbox


async def judge(tmp_path: Path, test_sh: str, *, toml: str = "", timeout_s: float = 20) -> Verdict:
    task = load_task(make_task_dir(tmp_path, test_sh=test_sh, toml=toml))
    return await verify(task, DirectorySandbox(tmp_path / "box"), timeout_s=timeout_s)


async def test_the_reward_and_the_printed_evidence_come_back(tmp_path: Path) -> None:
    verdict = await judge(tmp_path, "echo out\necho err >&2\necho 0.5 >/logs/verifier/reward.txt\nexit 3\n")
    assert verdict == Verdict(reward=0.5, evidence="out\nerr\n", rewards={"reward": 0.5})


async def test_one_verification_costs_three_calls_and_kills_first(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path))
    sandbox = DirectorySandbox(tmp_path / "box")
    await verify(task, sandbox, timeout_s=20)
    assert sandbox.calls == ["kill_all", "upload_dir", "exec"]


async def test_reward_json_comes_before_reward_txt(tmp_path: Path) -> None:
    test_sh = 'echo 0 >/logs/verifier/reward.txt\necho \'{"other": 2, "reward": 1}\' >/logs/verifier/reward.json\n'
    assert (await judge(tmp_path, test_sh)).reward == 1.0


async def test_the_only_value_of_reward_json_is_the_reward_whatever_its_key(tmp_path: Path) -> None:
    assert (await judge(tmp_path, "echo '{\"accuracy\": 0.25}' >/logs/verifier/reward.json\n")).reward == 0.25


async def test_tests_run_in_the_working_directory_with_their_environment(tmp_path: Path) -> None:
    test_sh = 'pwd; [ "$SEED" = 7 ] && echo 1 >/logs/verifier/reward.txt\n'
    verdict = await judge(tmp_path, test_sh, toml='[verifier.env]\nSEED = "7"\n')
    assert (verdict.reward, verdict.evidence) == (1.0, f"{tmp_path}/box/app\n")


async def test_evidence_is_the_end_of_a_long_output(tmp_path: Path) -> None:
    verdict = await judge(tmp_path, "printf 'é%.0s' {1..5000}; echo end; echo 1 >/logs/verifier/reward.txt\n")
    assert len(verdict.evidence) == EVIDENCE_CHARS
    assert verdict.evidence == "é" * (EVIDENCE_CHARS - 4) + "end\n"


@pytest.mark.parametrize(
    ("test_sh", "reason"),
    [
        ("echo nothing here\n", "no reward file; they printed: nothing here"),
        ("mkdir -p /logs/verifier/reward.txt\n", "no reward file"),
        (": >/logs/verifier/reward.txt\n", "reward.txt holds no number: ''"),
        ("echo passed >/logs/verifier/reward.txt\n", "reward.txt holds no number: 'passed'"),
        ("echo 1 0 >/logs/verifier/reward.txt\n", "reward.txt holds no number: '1 0'"),
        ("echo nan >/logs/verifier/reward.txt\n", "reward.txt is not finite: reward is nan"),
        ("echo inf >/logs/verifier/reward.txt\n", "reward.txt is not finite: reward is inf"),
        (": >/logs/verifier/reward.json\n", "reward.json is not JSON"),
        ("echo '{\"reward\": ' >/logs/verifier/reward.json\n", "reward.json is not JSON"),
        ("echo 1 >/logs/verifier/reward.json\n", "reward.json is not an object"),
        ("echo '{\"reward\": NaN}' >/logs/verifier/reward.json\n", "reward.json is not finite: reward is nan"),
        ('echo \'{"reward": "1"}\' >/logs/verifier/reward.json\n', "reward.json holds no number: '1'"),
        ("echo '{\"reward\": true}' >/logs/verifier/reward.json\n", "reward.json holds no number: True"),
        ('echo \'{"a": 1, "b": 0}\' >/logs/verifier/reward.json\n', "no key 'reward' among ['a', 'b']"),
        ('echo \'{"reward": 1, "b": NaN}\' >/logs/verifier/reward.json\n', "reward.json is not finite: b is nan"),
        ('echo \'{"reward": 1, "b": []}\' >/logs/verifier/reward.json\n', "reward.json holds no number: []"),
        ("printf '{\"reward\": 1%0400d}' 0 >/logs/verifier/reward.json\n", "is not finite: reward is inf"),
        ("printf '[%.0s' {1..60000} >/logs/verifier/reward.json\n", "reward.json is not JSON"),
        ("echo {} >/logs/verifier/reward.json\n", "no key 'reward' among []"),
    ],
)
async def test_a_reward_that_is_missing_or_malformed_is_an_error_that_says_why(
    tmp_path: Path, test_sh: str, reason: str
) -> None:
    with pytest.raises(VerifierError) as caught:
        await judge(tmp_path, test_sh)
    assert reason in str(caught.value)


async def test_every_number_of_reward_json_is_told(tmp_path: Path) -> None:
    verdict = await judge(tmp_path, 'echo \'{"style": 0.25, "reward": 1}\' >/logs/verifier/reward.json\n')
    assert (verdict.reward, verdict.rewards) == (1.0, {"style": 0.25, "reward": 1.0})


async def test_tests_of_a_step_lie_over_those_of_the_task(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path, test_sh="cat ${0%/*}/shared >/logs/verifier/reward.txt\n"))
    (task.path / "tests" / "shared").write_text("0")
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "shared").write_text("1")
    tests = (task.path / "tests", tmp_path / "over")
    verdict = await verify(task, DirectorySandbox(tmp_path / "box"), timeout_s=20, tests=tests)
    assert verdict.reward == 1.0


async def test_tests_that_do_not_end_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"did not end within 0\.3 s"):
        await judge(tmp_path, "echo 1 >/logs/verifier/reward.txt\nsleep 20\n", timeout_s=0.3)


async def test_what_the_agent_left_in_the_verifiers_places_does_not_count(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path, test_sh="ls ${0%/*}\n"))
    sandbox = DirectorySandbox(tmp_path / "box")
    await sandbox.write_file("/logs/verifier/reward.json", b'{"reward": 1}')
    await sandbox.write_file("/logs/verifier/reward.txt", b"1")
    await sandbox.write_file("/tests/conftest.py", b"")
    with pytest.raises(VerifierError, match=r"no reward file; they printed: test\.sh$"):
        await verify(task, sandbox, timeout_s=20)


async def test_an_agent_that_removed_its_working_directory_is_judged_all_the_same(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path, test_sh="echo 0 >/logs/verifier/reward.txt\n"))
    sandbox = DirectorySandbox(tmp_path / "box")
    await sandbox.exec("rm -rf /app", timeout_s=5)
    assert (await verify(task, sandbox, timeout_s=20)).reward == 0.0


async def test_a_box_in_which_tests_cannot_be_placed_counts_against_the_agent(tmp_path: Path) -> None:
    task = load_task(make_task_dir(tmp_path))
    sandbox = DirectorySandbox(tmp_path / "box")
    await sandbox.write_file("/logs", b"a file where a directory belongs")
    with pytest.raises(SandboxDied, match="could not be put in place"):
        await verify(task, sandbox, timeout_s=20)
