"""Check that the packages of the extra `ray` are installed."""

from __future__ import annotations

from dgraph.errors import InputError


def check_installed() -> None:
    """Raise `InputError` if a package of the extra `ray` is missing."""
    try:
        import ray
        import ray.data
        import ray.serve
    except ImportError as error:
        raise InputError(f"replicas need {error.name}, which is not installed: pip install 'dgraph[ray]'.") from None
    del ray
