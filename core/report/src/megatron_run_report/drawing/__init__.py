"""Pictures: curves, ranks and the planned step, as SVG that takes its colours from the page."""

from __future__ import annotations
