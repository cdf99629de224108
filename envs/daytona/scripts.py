"""The shell scripts that run inside a Daytona sandbox, which offers one merged, blocking `execute` and no more.

Invariant: a command has an id, and however often its script is sent it runs once: whoever comes later waits for the
same result. Needs bash, coreutils and util-linux's setsid inside; nothing of Python.
Called by envs/daytona/sandbox.py.
"""

import base64
import binascii
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.sandbox import ExecResult

DIR = "/var/tmp/.thresher"
"""Of commands under way and staged files. Hidden and outside /tmp, which commands like to empty."""

_FAILED = "thresher: cannot start"
IN_FILE = "in file"
"""Printed instead of a long result, which is downloaded from `result_path`."""
_MAX_SHOWN = 256 << 10

# $1 is the command's directory. Its output goes through fifos, whose readers keep the first bytes and drop the rest, so
# that a flood fills nothing, and which a process left in the background may hold open without holding us up.
# `read -t` on a fifo is a sleep without a process.
_RUNNER = """\
d=$1
echo $$ >"$d/pid"
{{ head -c {cap} >"$d/o.kept"; cat >/dev/null; }} <"$d/o" & r1=$!
{{ head -c {cap} >"$d/e.kept"; cat >/dev/null; }} <"$d/e" & r2=$!
(
    cd -- {cwd} || {{ echo "cannot enter "{cwd} >&2; exit 126; }}
    exec setsid env {env} bash -c {command}
) <"$d/in" >"$d/o" 2>"$d/e" & p=$!
(
    read -r -t {timeout_s} <>"$d/never"
    : >"$d/late"
    for f in /proc/[0-9]*/stat; do
        {{ IFS= read -r s <"$f"; }} 2>/dev/null || continue
        set -- ${{s##*) }}
        f=${{f#/proc/}}
        [[ $4 == $p || $2 == $p ]] && kill -9 "${{f%/stat}}"
    done
    kill -9 -- -$p $p
) & w=$!
wait $p; code=$?
kill -9 $w
[[ -e $d/late ]] && code=124
for k in {{1..40}}; do
    kill -0 $r1 || kill -0 $r2 || break
    read -r -t 0.01 <>"$d/never"
done
{{ echo $code; base64 "$d/o.kept"; echo .; base64 "$d/e.kept"; echo .; }} >"$d/result.new"
mv "$d/result.new" "$d/result"
echo >"$d/poke"
"""

_START = """\
d={dir}/{id}
rm -rf {spent}
if mkdir "$d" 2>/dev/null; then
    mkfifo "$d/o" "$d/e" "$d/poke" "$d/never" || {{ rm -rf "$d"; echo {failed}; exit 1; }}
    {make_stdin}
    setsid bash -c {runner} runner "$d" </dev/null >/dev/null 2>&1 9>&- &
    echo $! >"$d/pid"
fi
[[ -d $d ]] || {{ echo {failed}; exit 1; }}
"""

_WAIT = """\
d={dir}/{id}
[[ -d $d ]] || {{ echo {failed}; exit 1; }}
exec 9<>"$d/poke"
show() {{
    [[ -e $d/result ]] || return
    if (( $(stat -c %s "$d/result") > {max_shown} )); then echo {in_file}; else cat "$d/result"; fi
    exit 0
}}
look() {{
    show
    read -r pid <"$d/pid" 2>/dev/null && kill -0 "$pid" 2>/dev/null && return
    show
    printf '137\\n.\\n.\\n'
    exit 0
}}
look
read -r -t {wait_s} -u 9
look
echo running
"""

# Everything but the first process, what ran before the agent came, and those whom this script descends from.
_KILL_ALL = """\
keep=" 1 {baseline} "
p=$$
while [[ $p -gt 1 ]]; do
    keep+="$p "
    IFS= read -r s <"/proc/$p/stat"
    set -- ${s##*) }
    p=$2
done
for round in {1..200}; do
    found=
    for f in /proc/[0-9]*; do
        p=${f##*/}
        { IFS= read -r s <"$f/stat"; } 2>/dev/null || continue
        set -- ${s##*) }
        [[ $1 == Z || $keep == *" $p "* || $keep == *" $p.${20} "* ]] && continue
        kill -9 "$p" 2>/dev/null && found=1
    done
    [[ $found ]] || { echo done; exit 0; }
done
echo left
"""

SETUP = f"""\
mkdir -p -m 700 {DIR} || exit 1
mkdir -p -m 777 /logs /logs/agent /logs/verifier /logs/artifacts || exit 1
for f in /proc/[0-9]*/stat; do
    {{ IFS= read -r s <"$f"; }} 2>/dev/null || continue
    f=${{f#/proc/}}
    set -- ${{s##*) }}
    [[ ${{f%/stat}} == "$$" ]] || echo "${{f%/stat}}.${{20}}"
done
"""
"""Makes the directories and prints pid.start of every process there is, ours apart; run once, at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run inside."""

    id: str
    command: str
    timeout_s: float
    cwd: str
    env: Mapping[str, str]
    stdin: bytes
    max_output_bytes: int


def start_script(command: Command, *, spent: Sequence[str]) -> str:
    """Starts the command unless it was started before, and forgets the results of the `spent` ids."""
    variables = " ".join(shlex.quote(f"{key}={value}") for key, value in command.env.items())
    runner = _RUNNER.format(
        cap=command.max_output_bytes,
        cwd=shlex.quote(command.cwd),
        env=variables,
        command=shlex.quote(command.command),
        timeout_s=f"{command.timeout_s:.3f}",
    )
    stdin = base64.encodebytes(command.stdin).decode()
    return _START.format(
        dir=DIR,
        id=command.id,
        spent=" ".join(f"{DIR}/{name}" for name in spent) or f"{DIR}/none",
        make_stdin=f"base64 -d >\"$d/in\" <<'EOF'\n{stdin}EOF\n" if stdin else ': >"$d/in"',
        runner=shlex.quote(runner),
        failed=shlex.quote(_FAILED),
    )


def wait_script(command_id: str, *, wait_s: float) -> str:
    """Prints the command's result, IN_FILE when that is long, or "running" after `wait_s`."""
    return _WAIT.format(
        dir=DIR,
        id=command_id,
        wait_s=f"{wait_s:.3f}",
        failed=shlex.quote(_FAILED),
        max_shown=_MAX_SHOWN,
        in_file=shlex.quote(IN_FILE),
    )


def result_path(command_id: str) -> str:
    """Where the result of a command lies until its id is `spent`."""
    return f"{DIR}/{command_id}/result"


def kill_all_script(baseline: Sequence[str]) -> str:
    """Ends all but what the baseline names; prints "done", or "left" when something would not end."""
    return _KILL_ALL.replace("{baseline}", " ".join(baseline))


def parse_result(text: str) -> ExecResult | None:
    """What a script printed: a result, or None while the command runs. Raises ValueError for anything else."""
    if text.strip() == "running":
        return None
    code, _, rest = text.partition("\n")
    out, middle, rest = _section(rest)
    err, end, _ = _section(rest)
    if not code.isdigit() or not middle or not end:
        raise ValueError(f"not a result: {text[:200]!r}")
    return ExecResult(exit_code=int(code), stdout=out, stderr=err)


def _section(text: str) -> tuple[bytes, bool, str]:
    """The bytes before a line that is a dot, whether there was one, and what follows it."""
    encoded, dot, rest = ("\n" + text).partition("\n.\n")
    try:
        return base64.b64decode(encoded), bool(dot), rest
    except binascii.Error as error:
        raise ValueError(f"not base64: {encoded[:80]!r}") from error
