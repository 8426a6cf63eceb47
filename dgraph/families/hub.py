"""Checkpoints by their id on Hugging Face, ORG/NAME: found in the local cache, downloaded only where that is allowed.

The cache is that of huggingface_hub (HF_HOME, HF_HUB_CACHE), which `hf download` and transformers fill. A download
needs DGRAPH_DOWNLOAD=1; HF_HUB_OFFLINE=1 forbids it in any case.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from dgraph.errors import CheckpointError, InputError

DOWNLOAD = "DGRAPH_DOWNLOAD"
"""The variable that allows downloads, if it is 1."""
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a repository that a model is loaded from."""

UNREAD = ("original/*", "consolidated*")
"""Files among those that hold the same weights for other programs."""
CONFIG = "config.json"

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_id(name: str) -> bool:
    """Say if a name has the form of an id, and is the path of nothing that is here."""
    return bool(_ID.fullmatch(name)) and ".." not in name and not Path(name).exists()


def may_download() -> bool:
    """Say if downloads are allowed.

    Raises:
        InputError: the variable is neither 0 nor 1.
    """
    said = os.environ.get(DOWNLOAD, "0")
    if said not in ("0", "1"):
        raise InputError(f"{DOWNLOAD} is {said!r}, expected 1 to allow downloads, or 0.")
    from huggingface_hub.constants import is_offline_mode

    return said == "1" and not is_offline_mode()


def folder_of_id(name: str) -> Path:
    """The folder of the cache with a repository's checkpoint, which is downloaded if it is not there.

    Args:
        name: ORG/NAME.

    Raises:
        CheckpointError: it is not in the cache, and downloads are not allowed or this one failed.
        InputError: see `may_download`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        # Other missing files of a snapshot are found where they are read: the loader knows their names.
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=[CONFIG]))
        if (folder / CONFIG).is_file():
            return folder
    if not may_download():
        raise CheckpointError(
            f"{name} is not a checkpoint folder, and none of that id is in the local cache of Hugging Face; nothing "
            f"was downloaded. Run `hf download {name}` first, or set {DOWNLOAD}=1 (and not HF_HUB_OFFLINE) to let "
            f"dgraph download it."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(NEEDED), ignore_patterns=list(UNREAD)))
    except Exception as error:  # whatever a network and its clients raise
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{name} could not be downloaded from Hugging Face: {reason}") from error
