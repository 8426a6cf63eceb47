"""Checkpoints by their id on Hugging Face, ORG/NAME or ORG/NAME@REVISION: those of the local cache, and downloads.

The cache is that of huggingface_hub (HF_HOME, HF_HUB_CACHE), which `hf download` and transformers fill. A checkpoint
that is there is loaded as it is, without asking the hub. One that is not, or not wholly, is downloaded from HF_ENDPOINT
unless DGRAPH_DOWNLOAD=0 or HF_HUB_OFFLINE=1 forbids it. A connection that is cut goes on where it was, and after an
interruption the next call fetches the files that are missing. Pickles and code of a repository are never fetched.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from dgraph.errors import CheckpointError, InputError

DOWNLOAD = "DGRAPH_DOWNLOAD"
"""The variable that forbids downloads, if it is 0."""
CONFIG = "config.json"
GGUF = ".gguf"
"""Suffix of files of llama.cpp, which hold a whole checkpoint; see `dgraph.models.gguf_file`."""
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
DESCRIBING = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a repository's root that a model is described by, or its tokenizer."""
ADAPTER = "adapter_config.json"
"""The file of a folder with a low-rank adapter, which is fetched with its checkpoint."""

_UNREAD = "consolidated*"
_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_SHARD = "model-*-of-*.safetensors"
_PARTIAL = "*.incomplete"
"""Names that huggingface_hub gives to what has arrived of a file."""


def is_gguf(path: Path) -> bool:
    """Say if a path is a GGUF file, and no folder."""
    return path.suffix == GGUF and path.is_file()


def is_id(name: str) -> bool:
    """Say if a name has the form of an id, and is the path of nothing that is here."""
    return bool(_ID.fullmatch(name)) and ".." not in name and not Path(name).exists()


def name_of_id(name: str) -> str:
    """The name of a checkpoint in messages: that of its repository, without owner and revision."""
    return _parted(name)[0].rpartition("/")[2]


def may_download() -> bool:
    """Say if downloads are allowed.

    Raises:
        InputError: the variable is neither 0 nor 1.
    """
    said = os.environ.get(DOWNLOAD, "1")
    if said not in ("0", "1"):
        raise InputError(f"{DOWNLOAD} is {said!r}, expected 1 to allow downloads, or 0.")
    from huggingface_hub.constants import is_offline_mode

    return said == "1" and not is_offline_mode()


def needed(files: Iterable[str]) -> list[str]:
    """The files of a repository that a model is loaded from, by their paths.

    Configs, tokenizer and chat templates of its root. One set of weights: model.safetensors, else the shards of its
    index, else all *.safetensors. Folders of low-rank adapters.
    """
    there = sorted(files)
    root = [path for path in there if "/" not in path and not fnmatch.fnmatch(path, _UNREAD)]
    weights = [path for path in root if path.endswith(".safetensors")]
    if WEIGHTS in weights:
        weights = [WEIGHTS]
    elif INDEX in root:
        weights = fnmatch.filter(weights, _SHARD) or weights
    adapters = {str(PurePosixPath(path).parent) for path in there if PurePosixPath(path).name == ADAPTER} - {"."}
    beside = [path for path in there if str(PurePosixPath(path).parent) in adapters]
    of_adapters = [path for path in beside if path.endswith((".json", ".safetensors"))]
    described = [path for path in root if any(fnmatch.fnmatch(path, pattern) for pattern in DESCRIBING)]
    return [*described, *weights, *of_adapters]


def folder_of_id(name: str) -> Path:
    """The folder of the cache with a repository's checkpoint; what it lacks is downloaded.

    Progress is shown while stderr is a terminal.

    Args:
        name: ORG/NAME, or ORG/NAME@REVISION: a branch, a tag or a commit.

    Raises:
        CheckpointError: it is not in the cache, and downloads are not allowed or this one failed.
        InputError: see `may_download`.
    """
    cached, allowed = _cached(name), may_download()
    if cached is not None and (not allowed or _is_whole(cached)):
        return cached  # the loader knows the names of files that are missing
    if not allowed:
        repository, revision = _parted(name)
        pick = f" --revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name} is not a checkpoint folder, and none of that id is in the local cache of Hugging Face; nothing "
            f"was downloaded. Run `hf download {repository}{pick}` first, or set {DOWNLOAD}=1 (and not "
            f"HF_HUB_OFFLINE) to let dgraph download it."
        )
    with _telling(name):
        return _downloaded(name)


def _parted(name: str) -> tuple[str, str | None]:
    """The repository of an id, and its revision if it names one."""
    found = _ID.fullmatch(name)
    assert found is not None, name
    return found[1], found[2]


def _cached(name: str) -> Path | None:
    """The folder of the cache that a checkpoint has begun to arrive in."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, revision = _parted(name)
    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        folder = snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=[CONFIG])
        if (Path(folder) / CONFIG).is_file():
            return Path(folder)
    return None


def _is_whole(folder: Path) -> bool:
    """Say if a folder of the cache has weights, all shards of its index, and no file that has arrived in part."""
    blobs = folder.parent.parent / "blobs"
    if any(not (blobs / path.name.partition(".")[0]).exists() for path in blobs.glob(_PARTIAL)):
        return False
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        try:
            shards = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, AttributeError, TypeError):
            return True  # damaged, which the loader says
        return all((folder / str(shard)).is_file() for shard in shards)
    return any(path.suffix in (".safetensors", ".bin", ".gguf") for path in folder.iterdir())


def _downloaded(name: str) -> Path:
    """The folder of a checkpoint, of which what is missing is fetched."""
    from huggingface_hub import HfApi, snapshot_download

    repository, revision = _parted(name)
    there = HfApi().list_repo_files(repository, revision=revision)
    wanted = needed(there)
    if CONFIG not in wanted or not any(path.endswith(".safetensors") for path in wanted):
        lacks = CONFIG if CONFIG not in wanted else "*.safetensors"
        shown = ", ".join(sorted(there)[:6]) + (" and more" if len(there) > 6 else "")
        advice = "Give the id of a repository with *.safetensors."
        if one := next((path for path in sorted(there) if path.endswith(".gguf")), None):
            advice = f"Run `hf download {repository} {one}`, and give the path that it prints."
        raise CheckpointError(f"{name} on Hugging Face has no {lacks}, only {shown or 'no files'}. {advice}")
    patterns = [glob.escape(path) for path in wanted]
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))


@contextlib.contextmanager
def _telling(name: str) -> Iterator[None]:
    """Raise `CheckpointError`, with what to do, for whatever a download fails by."""
    from huggingface_hub import constants, errors

    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # whatever a network and its clients raise
        repository, revision = _parted(name)
        status = getattr(getattr(error, "response", None), "status_code", None)
        page = f"{constants.ENDPOINT}/{repository}"
        login = "`hf auth login`, or set HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            said = f"is gated. Accept its terms at {page}, and log in with {login}."
        elif isinstance(error, errors.RevisionNotFoundError):
            said = f"has no revision {revision}; see {page}/tree/main for its branches, tags and commits."
        elif isinstance(error, errors.RepositoryNotFoundError):
            said = (
                f"is no folder here, and {constants.ENDPOINT} shows no such repository. Check the spelling; for a "
                f"private one log in with {login}."
            )
        elif status in (401, 403):
            said = f"may not be read with this login ({status}). Log in with {login}."
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            advice = (
                f"Free some space, or set HF_HOME to a folder on another disk (now {constants.HF_HOME})."
                if full
                else f"Check the connection to {constants.ENDPOINT} (HF_ENDPOINT names another). Or copy the folder "
                f"from elsewhere, and give its path."
            )
            said = f"could not be downloaded from Hugging Face: {reason.rstrip('.')}. Files that have arrived are "
            said += f"kept, and the next call fetches the others. {advice}"
        raise CheckpointError(f"{name} {said}") from error
