"""AnswerHarness: what of a reply is the answer, and where it is written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.answer import AnswerForm, AnswerHarness, read_answer
from envs.conversation import ScriptedConversation
from envs.errors import TaskError
from envs.harbor import load_task
from tests.envs.task_dirs import make_task_dir
from tests.fakes.directory_sandbox import DirectorySandbox

CODE = "Sure:\n```python\nx = 1\n\n```\nOr rather\n```\nx = 2\n```\nDone."


@pytest.mark.parametrize(
    ("reply", "form", "answer"),
    [
        (" 42\n\n", AnswerForm.TEXT, "42\n"),
        ("<think>7?\n</think>\n\n42", AnswerForm.TEXT, "42\n"),
        ("```\n42\n```", AnswerForm.TEXT, "```\n42\n```\n"),
        (CODE, AnswerForm.CODE, "x = 2\n"),
        ("```py\n  x = 1\n```", AnswerForm.CODE, "  x = 1\n"),
        ("````\n```\ninner\n```\n````", AnswerForm.CODE, "```\ninner\n```\n"),
        ("```py\nx = 1\ny =", AnswerForm.CODE, "x = 1\ny =\n"),
        ("x = 1", AnswerForm.CODE, "x = 1\n"),
        ("<think>```\nno\n```</think>x = 1", AnswerForm.CODE, "x = 1\n"),
    ],
)
def test_the_answer_of_a_reply(reply: str, form: AnswerForm, answer: str) -> None:
    assert read_answer(reply, form) == answer


@pytest.mark.parametrize(
    ("metadata", "path"),
    [({}, "/app/answer.txt"), ({"answer_file": "out/a.py"}, "/app/out/a.py"), ({"answer_file": "/logs/a"}, "/logs/a")],
)
async def test_one_reply_is_written_where_the_task_says(tmp_path: Path, metadata: dict[str, Any], path: str) -> None:
    task = replace(load_task(make_task_dir(tmp_path)), metadata=metadata)
    sandbox, conversation = DirectorySandbox(tmp_path / "box"), ScriptedConversation(["42", "43"])
    await AnswerHarness().run(task, sandbox, conversation)
    assert await sandbox.read_file(path) == b"42\n"
    assert (conversation.prompt, len(conversation.turns)) == ("Do it", 1)


@pytest.mark.parametrize("value", [3, "", "out/"])
async def test_an_answer_file_that_is_no_path_is_refused(tmp_path: Path, value: Any) -> None:
    task = replace(load_task(make_task_dir(tmp_path)), metadata={"answer_file": value})
    with pytest.raises(TaskError, match=r"metadata\.answer_file must be the path of a file"):
        await AnswerHarness().run(task, DirectorySandbox(tmp_path / "box"), ScriptedConversation(["42"]))
