"""What can go wrong between a Sampler, its servers and their weights.

Invariant: every message names the server, and what did not come or did not match. Raised by the inference and
weight-sync modules of actors/; importable without Ray, vLLM or torch.

SamplerError (envs.errors)      a rollout's request got no Completion        -> outcome sampler_error
+-- ServerGone                  the server died or dropped the connection; the request may run elsewhere
|   +-- RequestDropped          a weight update dropped the request alone; the same server takes it again
+-- ServerNotReady              the server holds no proven weights yet; the request may run elsewhere
+-- NonFiniteLogprobs           the engine sampled a token with a NaN or infinite log-probability
ClusterError (actors.errors)
+-- ServerStartError            a server did not come up
+-- WeightSyncError             a weight update did not reach a server
    +-- NoServerLeft            all servers are down; those that come back get the version then
    +-- WeightSyncTimeout       a phase outlived its deadline
    +-- VersionProofError       the server does not serve the weights that its version names
"""

from actors.errors import ClusterError
from envs.errors import SamplerError


class ServerGone(SamplerError):
    """The server died, or its connection broke, before the Completion came."""


class RequestDropped(ServerGone):
    """A weight update in mode abort dropped the request; the server itself goes on."""


class ServerNotReady(SamplerError):
    """The server is up but holds no proven weights, so it samples nothing."""


class NonFiniteLogprobs(SamplerError):
    """The engine returned a NaN or infinite log-probability for a sampled token."""


class ServerStartError(ClusterError):
    """An inference server did not come up; the message names it and the cause."""


class WeightSyncError(ClusterError):
    """A weight update failed; the message names the phase and the server."""


class NoServerLeft(WeightSyncError):
    """No server took a version, because all are down; one that comes back gets it before it samples."""


class WeightSyncTimeout(WeightSyncError):
    """A phase of a weight update outlived its deadline."""


class VersionProofError(WeightSyncError):
    """Canary, digest or probe shows that a server does not serve the weights it should."""
