"""An [environment] table as an Environment, and the network and health checks that other tables share with it.

Invariant: as envs/task_toml.py, which calls it.
"""

import re
from ipaddress import ip_address, ip_network
from typing import Literal, cast

from envs.task import Environment, Healthcheck, McpServer, Network, NetworkMode, Tpu
from envs.toml_table import Fault, Table

_NETWORK_MODES = ("public", "no-network", "allowlist")
_MB_PER_UNIT = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_HOST_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_TOPOLOGY = re.compile(r"[1-9]\d*(?:x[1-9]\d*)+")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CREDENTIAL_NAME = re.compile(r"key|secret|token(?!s)|password|credential|auth|cookie", re.IGNORECASE)
_CREDENTIAL_VALUE = re.compile(r"\s*(?:[A-Za-z]+\s+)?\$\{\w+(?::-)?\}(?:[\s:-]*\$\{\w+(?::-)?\})*\s*")


def read_environment(table: Table) -> Environment:
    """The Environment of an [environment] or [verifier.environment] table."""
    network = _read_baseline(table)
    timeout_s = table.number("build_timeout_sec")
    return Environment(
        docker_image=table.text("docker_image") or None,
        workdir=table.text("workdir"),
        os=_read_os(table),
        cpus=table.number("cpus"),
        memory_mb=_read_megabytes(table, "memory"),
        storage_mb=_read_megabytes(table, "storage"),
        gpus=table.count("gpus") or 0,
        gpu_types=table.texts("gpu_types"),
        tpu=_read_tpu(table.optional_table("tpu")),
        env=table.strings("env"),
        network_mode=network.mode,
        allowed_hosts=network.allowed_hosts,
        build_timeout_s=Environment().build_timeout_s if timeout_s is None else timeout_s,
        mcp_servers=tuple(_read_mcp_server(entry) for entry in table.tables("mcp_servers")),
        skills_dir=table.text("skills_dir"),
        healthcheck=read_healthcheck(table),
    )


def read_network(table: Table) -> Network | None:
    """The network of a phase ([agent], [verifier]); None when the table does not name one."""
    mode = cast(NetworkMode | None, table.choice("network_mode", _NETWORK_MODES))
    hosts = tuple(_read_host(table.key("allowed_hosts"), host) for host in table.texts("allowed_hosts"))
    if hosts and mode != "allowlist":
        raise Fault(f'{table.key("allowed_hosts")} means something with network_mode = "allowlist" only; set that')
    return None if mode is None else Network(mode=mode, allowed_hosts=hosts)


def read_healthcheck(table: Table) -> Healthcheck | None:
    """The [TABLE.healthcheck]; None when there is none."""
    check = table.optional_table("healthcheck")
    if check is None:
        return None
    command = check.required_text("command")
    default = Healthcheck(command=command)
    return Healthcheck(
        command=command,
        interval_s=_duration(check, "interval_sec", default.interval_s),
        timeout_s=check.number("timeout_sec") or default.timeout_s,
        start_period_s=_duration(check, "start_period_sec", default.start_period_s),
        start_interval_s=_duration(check, "start_interval_sec", default.start_interval_s),
        retries=check.count("retries", at_least=1) or default.retries,
    )


def _duration(table: Table, name: str, default_s: float) -> float:
    value = table.number(name, at_least_zero=True)
    return default_s if value is None else value


def _read_baseline(table: Table) -> Network:
    """With the legacy `allow_internet`, which an explicit mode or list of hosts overrules."""
    legacy = table.flag("allow_internet")
    network = read_network(table)
    if network is not None:
        return network
    return Network(mode="no-network" if legacy is False else "public")


def _read_host(key: str, text: str) -> str:
    """A host name, "*." wildcard, address or CIDR range, in lower case."""
    host = text.strip().lower().rstrip(".")
    name = host.removeprefix("*.")
    try:
        if "/" in host:
            return ip_network(host).compressed
        if ":" in host:
            return ip_address(host).compressed
        is_wildcard_address = name != host and _is_address(name)
        if not is_wildcard_address and all(_HOST_LABEL.fullmatch(label) for label in name.split(".")):
            return host
    except ValueError:
        pass
    raise Fault(f"{key}: {text!r} is no host name, *.name, address or CIDR range; leave out scheme, port and path")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _read_os(table: Table) -> Literal["linux", "windows"]:
    name = (table.text("os") or "linux").lower()
    if name not in ("linux", "windows"):
        raise Fault(f"{table.key('os')} must be linux or windows, got {name!r}")
    return "windows" if name == "windows" else "linux"


def _read_megabytes(table: Table, name: str) -> int | None:
    """The value of `<name>_mb`, or of the legacy `<name>` such as "2G"; both must agree."""
    current, text = table.count(f"{name}_mb", at_least=1), table.text(name)
    if text is None:
        return current
    digits, factor = text.strip()[:-1], _MB_PER_UNIT.get(text.strip()[-1:].upper())
    if factor is None or not re.fullmatch(r"\d+(?:\.\d+)?", digits) or (legacy := int(float(digits) * factor)) < 1:
        raise Fault(f"{table.key(name)} must be like 2G, 512M or 1024K, at least 1M, got {text!r}; or set {name}_mb")
    if current is not None and current != legacy:
        raise Fault(f"{table.key(name)} {text!r} contradicts {name}_mb {current}; keep {name}_mb")
    return legacy


def _read_tpu(table: Table | None) -> Tpu | None:
    if table is None:
        return None
    tpu = Tpu(type=table.required_text("type"), topology=table.required_text("topology").strip())
    if not _TOPOLOGY.fullmatch(tpu.topology):
        raise Fault(f"{table.key('topology')} must be like 2x4 or 2x2x1, got {tpu.topology!r}")
    return tpu


def _read_mcp_server(table: Table) -> McpServer:
    transport = table.choice("transport", ("sse", "stdio", "streamable-http", "http")) or "sse"
    server = McpServer(
        name=table.required_text("name"),
        transport="stdio" if transport == "stdio" else "sse" if transport == "sse" else "streamable-http",
        url=table.text("url") or "",
        command=table.text("command") or "",
        args=table.texts("args"),
        headers=table.strings("headers"),
    )
    wanted = "command" if server.transport == "stdio" else "url"
    if not table.has(wanted):
        raise Fault(f"{table.key(wanted)} is missing; transport {server.transport} needs it")
    if server.headers and server.transport == "stdio":
        raise Fault(f"{table.key('headers')} mean nothing to transport stdio; drop them")
    for name, value in server.headers.items():
        _check_header(table.key("headers"), name, value)
    return server


def _check_header(where: str, name: str, value: str) -> None:
    """A credential may be a host variable only: task files are published, and records travel."""
    if not _HEADER_NAME.fullmatch(name) or "\n" in value or "\r" in value:
        raise Fault(f"{where}.{name} is no HTTP header; use one line, and a name of letters, digits and '-'")
    if _CREDENTIAL_NAME.search(name) and value.strip() and not _CREDENTIAL_VALUE.fullmatch(value):
        raise Fault(f'{where}.{name} holds a credential; write it as "Bearer ${{NAME}}", without a default')
