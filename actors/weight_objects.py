"""A stage through Ray's object store, for servers that share no file system with the learner.

Invariant: each node fetches a version once, whole or not at all, to the path that it has on the learner's node; whoever
comes second finds it there. `put_stage` runs in a learner rank, `localize` in inference servers.
"""

import fcntl
import shutil
from dataclasses import replace

import numpy as np
import ray

from actors.weight_stage import Manifest, drop_old, version_label

FETCH_TIMEOUT_S = 300.0


def put_stage(manifest: Manifest) -> Manifest:
    """The manifest with its files in the object store; they live as long as somebody holds it."""
    objects = {name: ray.put(np.fromfile(manifest.directory / name, np.uint8)) for name in manifest.files}
    return replace(manifest, objects=objects)


def localize(manifest: Manifest) -> Manifest:
    """The manifest of files on this node, fetched from the object store where this node lacks them.

    Raises ray.exceptions.GetTimeoutError when a file does not come.
    """
    if not manifest.objects or manifest.directory.exists():
        return replace(manifest, objects={})
    parent = manifest.directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one server of a node fetches, the others wait for it
        if not manifest.directory.exists():
            partial = parent / f".{version_label(manifest.version)}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for name, reference in manifest.objects.items():
                np.asarray(ray.get(reference, timeout=FETCH_TIMEOUT_S), np.uint8).tofile(partial / name)
            partial.rename(manifest.directory)
            drop_old(parent, newest=manifest.version)
    return replace(manifest, objects={})
