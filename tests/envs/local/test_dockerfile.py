"""The Dockerfile subset, and what of a Task's files goes into a box."""

from pathlib import Path

import pytest

from envs.errors import SandboxRefused
from envs.local.dockerfile import Copy, MakeDir, Run, parse_dockerfile
from envs.local.layout import plan_layout, step_entries
from envs.local.provider import LocalProvider
from tests.envs.local.boxes import make_task


def write(root: Path, text: str, *files: str) -> Path:
    environment = root / "environment"
    for name in files:
        (environment / name).parent.mkdir(parents=True, exist_ok=True)
        (environment / name).write_text(name)
    environment.mkdir(parents=True, exist_ok=True)
    (environment / "Dockerfile").write_text(text)
    return environment / "Dockerfile"


def test_the_last_workdir_counts_and_each_is_relative_to_the_one_before(tmp_path: Path) -> None:
    found = parse_dockerfile(write(tmp_path, "FROM ubuntu:24.04\nWORKDIR /srv\nworkdir app/\n"), workdir="/app")
    assert found.workdir == "/srv/app"
    assert found.steps == (MakeDir(path="/srv"), MakeDir(path="/srv/app"))
    assert parse_dockerfile(write(tmp_path, "FROM a AS b\n"), workdir="/app").workdir == "/app"


def test_variables_are_read_quoted_old_style_and_expanded(tmp_path: Path) -> None:
    text = """# a comment
    FROM x
    ENV A=1
    ENV A=9 B="two words" C='$A' \\
        D=${A}2

    ENV OLD some   text
    ENV E=${NONE:-default}/${A:+set} F=\\$A G=a\\ b
    WORKDIR /w$A
    """
    found = parse_dockerfile(write(tmp_path, text), workdir="/app")
    assert found.env == {
        "A": "9", "B": "two words", "C": "$A", "D": "12",
        "OLD": "some   text", "E": "default/set", "F": "$A", "G": "a b",
    }  # fmt: skip
    assert found.workdir == "/w9"


def test_files_are_copied_as_docker_would(tmp_path: Path) -> None:
    copies = ["a.txt .", "a.txt b.txt to/", "dir there", "*.txt /g/", '["a.txt", "/n"]']
    text = "FROM x\nWORKDIR /app\n" + "".join(f"COPY {copy}\n" for copy in copies)
    path = write(tmp_path, text, "a.txt", "b.txt", "dir/c", "dir/sub/d")
    context = path.parent
    steps = parse_dockerfile(path, workdir="/").steps
    found = [(c.sources, c.target, c.target_is_dir) for c in steps if isinstance(c, Copy)]
    assert found == [
        ((context / "a.txt",), "/app", True),
        ((context / "a.txt", context / "b.txt"), "/app/to", True),
        ((context / "dir",), "/app/there", False),
        ((context / "a.txt", context / "b.txt"), "/g", True),
        ((context / "a.txt",), "/n", False),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("RUN --mount=type=cache,target=/c make", r"Dockerfile:2: RUN --mount=type=cache,target=/c is not done"),
        ("RUN cat <<EOF >/a", "RUN with a heredoc"),
        ("RUN [1, 2]", "write a JSON list of strings"),
        ("COPY [a, /b]", "write a JSON list of strings"),
        ("USER nobody", "USER is not done"),
        ("COPY --chmod=755 a /b", "COPY --chmod=755"),
        ("COPY ../secret /b", "leaves environment/"),
        ("COPY none /b", "no such file"),
        ("COPY link /b", "leaves environment/ by a link"),
        ("COPY a", "needs sources and a target"),
        ("ENV A=1 junk", "cannot read ENV"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(line: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"FROM x\n{line}\n", "a")
    (tmp_path / "environment" / "link").symlink_to("/etc/passwd")
    with pytest.raises(SandboxRefused, match=message):
        parse_dockerfile(path, workdir="/app")


def test_commands_run_where_and_with_what_stands_above_them(tmp_path: Path) -> None:
    text = 'FROM x\nRUN a && \\\n  b \'c\'\nENV A=1\nWORKDIR w\nRUN ["/bin/x", "two words"]\nENV A=2\n'
    path = write(tmp_path, text)
    first, made, second = parse_dockerfile(path, workdir="/app").steps
    assert first == Run(command="/bin/sh -c 'a &&    b '\"'\"'c'\"'\"''", workdir="/", env={}, where=f"{path}:2")
    assert made == MakeDir(path="/w")
    assert second == Run(command="/bin/x 'two words'", workdir="/w", env={"A": "1"}, where=f"{path}:6")


def test_only_what_is_copied_goes_in_and_never_tests_or_solution(tmp_path: Path) -> None:
    write(tmp_path, "FROM x\nWORKDIR /app\nCOPY data .\nENV A=1\n", "data/in", "data/tool", "other")
    for folder in ("tests", "solution"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "secret.sh").write_text("the answer")
    plan = plan_layout(make_task(tmp_path, env={"B": "2"}))
    sent = b"".join(entry for step in plan.steps if not isinstance(step, Run) for entry in step_entries(step))
    layout = plan.layout
    assert plan.num_bytes == len("data/in") + len("data/tool") and not plan.has_run
    assert b"/app/in\0" in sent and b"/app/tool\0" in sent
    assert b"secret" not in sent and b"the answer" not in sent and b"/app/other" not in sent
    assert layout.workdir == "/app" and layout.env["A"] == "1" and layout.env["B"] == "2"


def test_the_tasks_own_workdir_goes_before_the_dockerfiles(tmp_path: Path) -> None:
    write(tmp_path, "FROM x\nWORKDIR /app\n")
    assert plan_layout(make_task(tmp_path, workdir="/mine")).layout.workdir == "/mine"
    with pytest.raises(SandboxRefused, match="absolute"):
        plan_layout(make_task(tmp_path, workdir="mine"))


@pytest.mark.sandbox
async def test_a_box_has_the_files_and_variables_of_its_task(provider: LocalProvider, tmp_path: Path) -> None:
    write(tmp_path, "FROM x\nWORKDIR /work\nCOPY . .\nENV A=1\n", "data/in", "tool")
    (tmp_path / "environment" / "tool").chmod(0o755)
    async with provider.start(make_task(tmp_path), owner="t") as sandbox:
        result = await sandbox.exec(
            "pwd; echo $A; cat data/in; stat -c %a tool; ls -d /logs/*; echo $HOME", timeout_s=20
        )
    assert result.stdout.decode().split() == [
        "/work", "1", "data/in755", "/logs/agent", "/logs/artifacts", "/logs/verifier", "/root"
    ]  # fmt: skip
