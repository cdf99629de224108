"""AnswerHarness: one question, one reply; the reply is the contents of a file.

Invariant: exactly one Turn, and one file written as the reply says. The file is the Task's `answer_file`, in [metadata]
of task.toml, or ANSWER_FILE. Called by envs/episode.py.
"""

import posixpath
import re
from dataclasses import dataclass
from enum import StrEnum

from envs.errors import TaskError
from envs.harness import Conversation
from envs.sandbox import Sandbox
from envs.task import Task

ANSWER_FILE = "/app/answer.txt"
"""Where the answer goes when the Task does not say."""

_FENCED = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^[ ]{0,3}\1[`~]*[ ]*$|\Z)", re.DOTALL | re.MULTILINE)


class AnswerForm(StrEnum):
    """What of a reply is the answer."""

    TEXT = "text"
    """All of it, but for the thinking before it and blanks around it."""
    CODE = "code"
    """The contents of its last fenced code block; the text of a reply that has none."""


@dataclass(frozen=True, slots=True)
class AnswerHarness:
    """The Harness."""

    form: AnswerForm = AnswerForm.TEXT

    @property
    def name(self) -> str:
        """Appears in provenance."""
        return "answer"

    async def run(self, task: Task, sandbox: Sandbox, conversation: Conversation) -> None:
        """Asks the instruction and writes the answer, of a reply that was cut as well; the Verifier judges it."""
        path = posixpath.join(sandbox.workdir, answer_file(task))
        reply = await conversation.ask(task.instruction)
        await sandbox.write_file(path, read_answer(reply, self.form).encode(errors="replace"))


def answer_file(task: Task) -> str:
    """Where a Task wants its answer. Raises TaskError when its metadata names no path."""
    path = task.metadata.get("answer_file", ANSWER_FILE)
    if not isinstance(path, str) or not path or path.endswith("/"):
        raise TaskError(f"task {task.id}: metadata.answer_file must be the path of a file, got {path!r}")
    return path


def read_answer(reply: str, form: AnswerForm) -> str:
    """The answer of a reply, ending with a new line: "Sure:\\n```py\\nx = 1\\n```" as code -> "x = 1\\n"."""
    _, _, words = reply.rpartition("</think>")
    blocks = [match[2] for match in _FENCED.finditer(words)] if form is AnswerForm.CODE else []
    answer = blocks[-1].rstrip("\n") if blocks else words.strip()
    return f"{answer}\n"
