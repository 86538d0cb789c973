"""Saves models of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock


def save(model: Any, folder: Path, **options: Any) -> None:
    """``model.save_pretrained(folder)``, which would import DeepSpeed, for seconds, to see if it wraps the model."""
    with mock.patch("accelerate.utils.other.is_deepspeed_available", return_value=False):
        model.save_pretrained(folder, **options)
