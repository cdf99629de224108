"""Host variables in a Task's env: "${NAME}" and "${NAME:-default}".

Invariant: a value is a template only as a whole, as in Harbor; "a${NAME}b" means itself. Resolved where the value is
used, never in a record. Called by providers, envs/verifier.py and envs/playable.py.
"""

import os
import re
from collections.abc import Mapping

from envs.errors import TaskError

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_variables(env: Mapping[str, str], *, host: Mapping[str, str] | None = None) -> dict[str, str]:
    """`env` with its templates replaced from `host` (None: this process's environment).

    {"KEY": "${TOKEN:-none}"} -> {"KEY": "none"} where the host has no TOKEN; a variable that is set but empty counts as
    set. TaskError names the first variable that the host lacks and that has no default.
    """
    known = os.environ if host is None else host
    return {name: _resolve(name, value, known) for name, value in env.items()}


def _resolve(name: str, value: str, host: Mapping[str, str]) -> str:
    template = _TEMPLATE.fullmatch(value)
    if template is None:
        return value
    if template[1] in host:
        return host[template[1]]
    if template[2] is None:
        raise TaskError(f"env {name} = {value!r}: the host has no variable {template[1]}; export it, or give a default")
    return template[2]
