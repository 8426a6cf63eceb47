"""The trained models that are installed with dgraph."""

from __future__ import annotations

from pathlib import Path

from dgraph.families import Embedded

tiny_sdar = Embedded(
    name="tiny_sdar",
    folder=Path(__file__).parent / "tiny_sdar",
    summary="10 M parameters, SDAR format, blocks of 32: arithmetic, retrieval, sorting, instructions, open text",
)

tiny_llada = Embedded(
    name="tiny_llada",
    folder=Path(__file__).parent / "tiny_llada",
    summary="11 M parameters, LLaDA format, every row sees every row: the same tasks, retrieval from 512 tokens",
)
