"""EpisodeConfig: what is built from it, and what it refuses."""

from pathlib import Path

import pytest

from envs.build import EpisodeConfig, HarnessName, build_episode
from envs.harbor import load_task
from envs.remote_sampler import Teacher
from envs.terminus2.prompts import ReplyFormat
from envs.terminus2.summary import SummaryConfig
from tests.envs.task_dirs import make_task_dir


@pytest.mark.parametrize(
    ("harness", "name", "needs_policy"),
    [
        (HarnessName.TERMINUS_2, "terminus-2", True),
        (HarnessName.BASH_TOOLS, "bash-tools", True),
        (HarnessName.ANSWER, "answer", True),
        (HarnessName.ORACLE, "terminus-2", False),
        (HarnessName.ORACLE_SCRIPT, "oracle-script", False),
        (HarnessName.NOP, "nop", False),
    ],
)
def test_each_harness_is_built_by_its_name(harness: HarnessName, name: str, needs_policy: bool, tmp_path: Path) -> None:
    config = EpisodeConfig(harness=harness, keep_dir=tmp_path)
    assert harness.needs_policy == needs_policy
    if needs_policy:
        with pytest.raises(ValueError, match="needs a served policy"):
            build_episode(config, model=None, sampler=None)
        return
    episode = build_episode(config, model=None, sampler=None)
    assert (episode.harness.name, episode.keep_dir) == (name, tmp_path)
    assert episode.converse(load_task(make_task_dir(tmp_path)), "k").turns == []


def test_the_reply_format_reaches_the_prompts() -> None:
    config = EpisodeConfig(harness=HarnessName.ORACLE, reply_format=ReplyFormat.XML)
    assert config.terminal_prompts.reply_format is ReplyFormat.XML


def test_what_cannot_be_played_is_refused_when_the_config_is_made() -> None:
    with pytest.raises(ValueError, match="must be an absolute path"):
        EpisodeConfig(keep_dir=Path("kept"))
    with pytest.raises(ValueError, match="at most half of context_tokens"):
        EpisodeConfig(summarize=True, context_tokens=2048)
    teacher = Teacher(base_url="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ValueError, match="summarize needs a served policy"):
        build_episode(EpisodeConfig(summarize=True, context_tokens=32768), model=None, sampler=teacher)
    EpisodeConfig(summarize=True, context_tokens=2048, summary=SummaryConfig(below_tokens=512, unwind_tokens=256))
