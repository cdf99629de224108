"""Failures of the distributed run; importable without Ray.

ClusterError
+-- CheckpointFailed  a checkpoint could not be written; the one before it counts
+-- DeadlineMissed    somebody did not answer in time; the message names who and for what
+-- ActorDied         an actor's process is gone
|   +-- LearnerLost   a learner rank's, and with it the weights since the last checkpoint
+-- PlacementError    the cluster lacks a resource that the config asks for; the message names it
"""


class ClusterError(RuntimeError):
    """Base of what a run may meet between processes."""


class CheckpointFailed(ClusterError):
    """A checkpoint could not be written."""


class DeadlineMissed(ClusterError):
    """A wait came to its end."""


class ActorDied(ClusterError):
    """An actor's process is gone."""


class LearnerLost(ActorDied):
    """A learner rank's process is gone, and with it the weights since the last checkpoint."""


class PlacementError(ClusterError):
    """The cluster cannot place what the config asks for."""
