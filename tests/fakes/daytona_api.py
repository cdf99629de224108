"""The HTTP API of a Daytona service, as its client 0.226 speaks it, over Sandboxes that really run.

Sandboxes are those of any SandboxProvider of this project; give it local ones where commands end processes. `faults`
are answered instead of, or after, doing what was asked. It keeps to what the client was seen to need: state by polling
(there is no event socket), cursor pages, camel-case records, errors in the service's envelope.

    async with serve_daytona(LocalProvider()) as api:
        DaytonaConfig(api_url=api.url)

    python -m tests.fakes.daytona_api --address-file F     # a service process, for drivers that are killed
"""

import asyncio
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from envs.errors import EpisodeError
from envs.local.provider import LocalProvider
from envs.sandbox import Sandbox, SandboxProvider
from envs.task import Environment, Limits, Provenance, Task, VerifierSpec

_PAGE = 2
"""Small, so that every listing takes several pages."""


@dataclass(kw_only=True)
class Fault:
    """What goes wrong, for the next `times` requests that match."""

    on: str
    """Regular expression over "METHOD /path"."""
    status: int = 500
    message: str = "injected"
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    after: bool = False
    """Does what was asked, and then fails: the answer was lost."""
    delay_s: float = 0.0
    """With status 200: only slow."""


@dataclass(kw_only=True)
class Remote:
    """One sandbox of the service."""

    id: str
    asked: Mapping[str, Any]
    """The body that it was created with."""
    started_at: float
    sandbox: Sandbox | None = None
    life: AsyncExitStack = field(default_factory=AsyncExitStack)
    failed: str = ""


class DaytonaApi:
    """The service's state; tests read `requests` and `remotes`, and add `faults`."""

    def __init__(self, provider: SandboxProvider, *, key: str = "key", workdir: str = "/app") -> None:
        self.url = ""
        self.key = key
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """"METHOD /path" of each, in order."""
        self.times: list[float] = []
        """When each came."""
        self.remotes: dict[str, Remote] = {}
        self.max_sandboxes: int | None = None
        self.start_delay_s = 0.0
        self.is_build_broken = False
        self._provider = provider
        self._workdir = workdir
        self.app = Starlette(
            routes=self._routes(), middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._dispatch)]
        )

    async def vanish(self, sandbox_id: str) -> None:
        """The sandbox is gone, as after an eviction."""
        await self.remotes.pop(sandbox_id).life.aclose()

    async def close(self) -> None:
        """Ends every sandbox."""
        for sandbox_id in list(self.remotes):
            await self.vanish(sandbox_id)

    def _routes(self) -> list[Route]:
        toolbox = "/toolbox/{id}"
        return [
            Route("/api/sandbox", self._create, methods=["POST"]),
            Route("/api/sandbox", self._list, methods=["GET"]),
            Route("/api/sandbox/{id}", self._get, methods=["GET"]),
            Route("/api/sandbox/{id}", self._delete, methods=["DELETE"]),
            Route(f"{toolbox}/process/execute", self._execute, methods=["POST"]),
            Route(f"{toolbox}/files/bulk-upload", self._upload, methods=["POST"]),
            Route(f"{toolbox}/files/bulk-download", self._download, methods=["POST"]),
        ]

    async def _dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        asked = f"{request.method} {request.url.path}"
        if "socket.io" not in asked:
            self.requests.append(asked)
            self.times.append(time.monotonic())
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "Invalid credentials")
        fault = next((f for f in self.faults if f.times > 0 and re.search(f.on, asked)), None)
        if fault is None:
            return await call_next(request)
        fault.times -= 1
        await asyncio.sleep(fault.delay_s)
        if fault.after or fault.status == 200:
            response = await call_next(request)
            if fault.status == 200:
                return response
        return _error(fault.status, fault.message, headers=fault.headers)

    async def _create(self, request: Request) -> Response:
        asked = await request.json()
        if self.max_sandboxes is not None and len(self.remotes) >= self.max_sandboxes:
            return _error(403, "Total CPU limit exceeded. Maximum allowed: 4")
        remote = Remote(id=uuid4().hex, asked=asked, started_at=time.monotonic() + self.start_delay_s)
        self.remotes[remote.id] = remote
        if self.is_build_broken:
            remote.failed = "Failed to build: exit status 1"
        else:
            task = _task(asked, self._workdir)
            remote.sandbox = await remote.life.enter_async_context(self._provider.start(task, owner=remote.id))
        return JSONResponse(self._record(remote))

    async def _list(self, request: Request) -> Response:
        wanted = json.loads(request.query_params.get("labels") or "{}")
        found = [r for r in self.remotes.values() if wanted.items() <= r.asked.get("labels", {}).items()]
        at = int(request.query_params.get("cursor") or 0)
        page = [self._record(remote) for remote in found[at : at + _PAGE]]
        following = str(at + _PAGE) if at + _PAGE < len(found) else None
        return JSONResponse({"items": page, "nextCursor": following})

    async def _get(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        return _missing(request) if remote is None else JSONResponse(self._record(remote))

    async def _delete(self, request: Request) -> Response:
        remote = self.remotes.pop(request.path_params["id"], None)
        if remote is None:
            return _missing(request)
        await remote.life.aclose()
        return JSONResponse(self._record(remote) | {"state": "destroying"})

    async def _execute(self, request: Request) -> Response:
        """The toolbox merges both streams, and kills what runs past `timeout`."""
        asked = await request.json()
        remote = self.remotes.get(request.path_params["id"])
        if remote is None or remote.sandbox is None:
            return _missing(request)
        try:
            result = await remote.sandbox.exec(
                asked["command"], timeout_s=asked.get("timeout") or 360, env=asked.get("envs"), cwd=asked.get("cwd")
            )
        except EpisodeError as error:
            return _error(502, str(error), source="DAYTONA_PROXY")
        text = (result.stdout + result.stderr).decode(errors="replace")
        return JSONResponse({"exitCode": result.exit_code, "result": text})

    async def _upload(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        if remote is None or remote.sandbox is None:
            return _missing(request)
        async with request.form() as form:
            for name, path in form.multi_items():
                if name.endswith(".path"):
                    file = form[name.removesuffix("path") + "file"]
                    assert isinstance(path, str) and not isinstance(file, str)
                    await remote.sandbox.write_file(path, await file.read())
        return JSONResponse({})

    async def _download(self, request: Request) -> Response:
        remote = self.remotes.get(request.path_params["id"])
        if remote is None or remote.sandbox is None:
            return _missing(request)
        boundary, parts = uuid4().hex, list[bytes]()
        for path in (await request.json())["paths"]:
            data = await remote.sandbox.read_file(path, max_bytes=64 << 20)
            name = "error" if data is None else "file"
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{path}"\r\n'
            kind = "application/json" if data is None else "application/octet-stream"
            problem = {"message": "file not found", "statusCode": 404, "code": "FILE_NOT_FOUND"}
            body = json.dumps(problem).encode() if data is None else data
            parts.append(head.encode() + f"Content-Type: {kind}\r\n\r\n".encode() + body + b"\r\n")
        content = b"".join(parts) + f"--{boundary}--\r\n".encode()
        return Response(content, media_type=f"multipart/form-data; boundary={boundary}")

    def _record(self, remote: Remote) -> dict[str, Any]:
        asked = remote.asked
        is_started = time.monotonic() >= remote.started_at
        state = "build_failed" if remote.failed else "started" if is_started else "creating"
        return {
            "id": remote.id,
            "organizationId": "org",
            "name": asked.get("name") or remote.id,
            "user": "root",
            "env": asked.get("env") or {},
            "labels": asked.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(asked.get("networkBlockAll")),
            "kvm": False,
            "target": "here",
            "cpu": asked.get("cpu") or 1,
            "gpu": 0,
            "memory": asked.get("memory") or 1,
            "disk": asked.get("disk") or 3,
            "state": state,
            "errorReason": remote.failed or None,
            "autoStopInterval": asked.get("autoStopInterval"),
            "autoDeleteInterval": asked.get("autoDeleteInterval"),
            "toolboxProxyUrl": self.url.removesuffix("/api") + "/toolbox",
        }


@asynccontextmanager
async def serve_daytona(provider: SandboxProvider) -> AsyncIterator[DaytonaApi]:
    """A service on a free loopback port, for the length of the block."""
    api = DaytonaApi(provider)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        api.url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        config = uvicorn.Config(api.app, log_level="critical", timeout_graceful_shutdown=1, lifespan="off")
        server = uvicorn.Server(config)
        listening.listen(128)  # from now on a request waits for the server instead of failing
        serving = asyncio.create_task(server._serve(sockets=[listening]))  # without its signal handlers
        try:
            yield api
        finally:
            await api.close()
            server.should_exit = True
            await serving


def _task(asked: Mapping[str, Any], workdir: str) -> Task:
    return Task(
        id="remote",
        instruction="",
        environment=Environment(network_mode="no-network", env=asked.get("env") or {}, workdir=workdir),
        verifier=VerifierSpec(),
        limits=Limits(),
        provenance=Provenance(),
        path=Path("/nonexistent"),
    )


def _missing(request: Request) -> Response:
    return _error(404, f"Sandbox with ID or name {shlex.quote(request.path_params['id'])} not found")


def _error(
    status: int, message: str, *, headers: Mapping[str, str] | None = None, source: str = "DAYTONA_API"
) -> Response:
    body = {"statusCode": status, "message": message, "source": source}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


async def _serve(address_file: Path) -> None:
    provider = LocalProvider()
    async with serve_daytona(provider) as api:
        address_file.with_suffix(".new").write_text(api.url)
        address_file.with_suffix(".new").rename(address_file)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until whoever started it ends
    await provider.close()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[2])))
