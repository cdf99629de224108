"""How the Daytona provider reaches its service and what it asks of it.

Invariant: importing this loads no client library; a key is only ever named, never held.
Composed into envs/providers.py; read by envs/daytona/provider.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DaytonaConfig:
    """Remote sandboxes of a Daytona service. A Task's own resources go before the service's defaults."""

    key_variable: str = "DAYTONA_API_KEY"
    """Environment variable that holds the key."""
    api_url: str | None = None
    """None: DAYTONA_API_URL, else the public service."""
    target: str | None = None
    """Region; None: DAYTONA_TARGET, else the account's default."""
    snapshot: str | None = None
    """Snapshot that every sandbox starts from, "{task}" standing for the Task's id; None: the Task's image or
    Dockerfile, and where it has neither the service's default."""
    auto_stop_min: int = 30
    """The service removes a sandbox that nobody used for so many minutes; never 0, which would be never."""
    create_timeout_s: float = 900.0
    """One creation, its image build included, may take so long, or the Task's build_timeout_s if that is less."""
    retry_s: float = 900.0
    """A creation turned away for rate, quota or capacity is tried again for so long."""
    request_timeout_s: float = 60.0
    """Any other request."""
    poll_s: float = 20.0
    """One request waits so long for a command; longer commands take several."""
    max_output_bytes: int = 1 << 20
    """Kept of a command's stdout, and of its stderr."""
    grace_s: float = 60.0
    """How late past its timeout a command's result may come before the sandbox counts as dead."""

    def __post_init__(self) -> None:
        if self.auto_stop_min < 1:
            raise ValueError(f"auto_stop_min must be >= 1, got {self.auto_stop_min}; 0 would leak sandboxes for ever")
        for name in ("create_timeout_s", "retry_s", "request_timeout_s", "poll_s", "max_output_bytes", "grace_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
