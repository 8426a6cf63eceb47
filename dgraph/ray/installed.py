"""What the extra `ray` brings."""

from __future__ import annotations

from dgraph.errors import InputError


def check_installed() -> None:
    """Raises `InputError` where what the extra `ray` brings is missing."""
    try:
        import ray
        import ray.data
        import ray.serve
    except ImportError as error:
        raise InputError(f"replicas need {error.name}, which is not installed: pip install 'dgraph[ray]'.") from None
    del ray
