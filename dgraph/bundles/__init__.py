"""Bundles: what a bug report needs of one step, in a file that holds no code and, unless asked for, no text.

`Recorder` watches the programs of a session, `Bundle` is the file, and `offer` tells who meets an exception how to get
one. `dgraph.bundling` records and replays a step.
"""

from __future__ import annotations

from dgraph.bundles.file import Asked, Bundle, bundle_of
from dgraph.bundles.offer import FOLDER, commanded, folder, offer
from dgraph.bundles.recorder import RecordedCall, Recorder, Stopped, live_outputs

__all__ = [
    "FOLDER",
    "Asked",
    "Bundle",
    "RecordedCall",
    "Recorder",
    "Stopped",
    "bundle_of",
    "commanded",
    "folder",
    "live_outputs",
    "offer",
]
