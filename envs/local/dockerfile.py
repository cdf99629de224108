"""The subset of Dockerfile that boxes do: FROM, WORKDIR, COPY, ENV, and RUN without a network.

Invariant: what cannot be done is refused by name; nothing is skipped silently. FROM's image is not fetched: the base is
the host's /usr (recorded in provenance). Called by envs/local/layout.py.
"""

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from envs.errors import SandboxRefused

_VARIABLE = re.compile(r"\\([$\"\\ ])|\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")
_PART = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|((?:\\.|[^'"\\])+)""")
"""Of a value: single-quoted (literal), double-quoted, or bare."""
_HEREDOC = re.compile(r"<<-?\s*[\"']?[A-Za-z_]")
_ASSIGNMENT = re.compile(r"""(\w+)=((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'\\])*)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Files of the build context and where they go."""

    sources: tuple[Path, ...]
    target: str
    """Absolute path inside."""
    target_is_dir: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeDir:
    """A working directory named on the way, which each WORKDIR makes."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command that changes the box's files."""

    command: str
    """For bash; a shell form is given to /bin/sh, as Docker does."""
    workdir: str
    env: dict[str, str]
    """What ENV has set above it."""
    where: str
    """File and line, for messages."""


Step = MakeDir | Copy | Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """What an environment asks for."""

    workdir: str
    env: dict[str, str]
    steps: tuple[Step, ...]
    """In their order."""


def parse_dockerfile(path: Path, *, workdir: str) -> Dockerfile:
    """What the file asks for; `workdir` holds until its first WORKDIR. Raises SandboxRefused naming line and remedy."""
    context = path.parent.resolve()
    env: dict[str, str] = {}
    steps: list[Step] = []
    current = ""
    for number, instruction, rest in _instructions(path.read_text(encoding="utf-8", errors="replace")):
        where = f"{path}:{number}"
        if instruction == "WORKDIR":
            current = str(PurePosixPath("/", current) / _expand(rest.strip("\"'"), env))
            steps.append(MakeDir(path=current))
        elif instruction == "ENV":
            env |= _parse_env(rest, env, where)
        elif instruction == "COPY":
            steps.append(_parse_copy(rest, env, context, current or "/", where))
        elif instruction == "RUN":
            steps.append(Run(command=_parse_run(rest, where), workdir=current or "/", env=dict(env), where=where))
        elif instruction != "FROM":
            raise SandboxRefused(
                f"{where}: {instruction} is not done by the local sandbox; "
                "use FROM, WORKDIR, COPY, ENV and RUN only, or another sandbox provider"
            )
    return Dockerfile(workdir=current or workdir, env=env, steps=tuple(steps))


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, name and arguments of each; comments dropped, continued lines joined."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not joined and not line.strip()):
            continue
        first = first if joined else number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        name, _, rest = (joined + line).strip().partition(" ")
        yield first, name.upper(), rest.strip()
        joined = ""
    if joined.strip():
        name, _, rest = joined.strip().partition(" ")
        yield first, name.upper(), rest.strip()


def _parse_env(rest: str, env: dict[str, str], where: str) -> dict[str, str]:
    """`A=1 B="x y"`, or the old form `A x y`."""
    if not re.match(r"\w+=", rest):
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), env)}
    if _ASSIGNMENT.sub("", rest).strip():
        raise SandboxRefused(f"{where}: cannot read ENV {rest!r}; write it as NAME=value")
    return {name: _unquote(value, env) for name, value in _ASSIGNMENT.findall(rest)}


def _unquote(value: str, env: dict[str, str]) -> str:
    parts = _PART.findall(value)
    return "".join(literal or _expand(quoted or bare, env) for literal, quoted, bare in parts)


def _parse_run(rest: str, where: str) -> str:
    if rest.startswith("--"):
        raise SandboxRefused(f"{where}: RUN {rest.split()[0]} is not done by the local sandbox; run it without")
    if _HEREDOC.search(rest):
        raise SandboxRefused(f"{where}: RUN with a heredoc is not read by the local sandbox; COPY a script and run it")
    if not rest.startswith("["):
        return f"/bin/sh -c {shlex.quote(rest)}"
    return shlex.join(_json_words(rest, where))


def _json_words(text: str, where: str) -> list[str]:
    try:
        words: object = json.loads(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in cast(list[object], words)):
        raise SandboxRefused(f"{where}: cannot read {text!r}; write a JSON list of strings")
    return cast(list[str], words)


def _parse_copy(rest: str, env: dict[str, str], context: Path, current: str, where: str) -> Copy:
    words = _json_words(rest, where) if rest.startswith("[") else shlex.split(rest)
    words = [_expand(word, env) for word in words]
    flags = [word for word in words if word.startswith("--")]
    if flags:
        raise SandboxRefused(f"{where}: COPY {flags[0]} is not done by the local sandbox; copy plain files without it")
    if len(words) < 2:
        raise SandboxRefused(f"{where}: COPY needs sources and a target, got {rest!r}")
    *patterns, target = words
    sources = tuple(source for pattern in patterns for source in _find(pattern, context, where))
    is_dir = target.endswith("/") or target in (".", "..") or len(sources) > 1
    return Copy(sources=sources, target=str(PurePosixPath(current) / target), target_is_dir=is_dir)


def _find(pattern: str, context: Path, where: str) -> list[Path]:
    relative = PurePosixPath(pattern.lstrip("/") or ".")
    if ".." in relative.parts:
        raise SandboxRefused(f"{where}: COPY {pattern} leaves environment/; copy files from inside it")
    if any(char in pattern for char in "*?["):
        parent = context / relative.parent
        found = sorted(p for p in parent.glob("*") if fnmatch.fnmatchcase(p.name, relative.name))
    else:
        found = [context / relative] if (context / relative).exists() else []
    if not found:
        raise SandboxRefused(f"{where}: COPY {pattern}: no such file in {context}")
    for source in found:
        if not source.resolve().is_relative_to(context):
            raise SandboxRefused(f"{where}: COPY {pattern} leaves environment/ by a link; copy files from inside it")
    return found


def _expand(text: str, env: dict[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-word} and ${NAME:+word} from the ENV lines above."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        found = env.get(match[2] or match[5], "")
        if match[3] == "-":
            return found or match[4]
        return (match[4] if found else "") if match[3] == "+" else found

    return _VARIABLE.sub(value, text)
