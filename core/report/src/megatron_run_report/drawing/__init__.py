"""Pictures of ranks and of the planned step, as SVG that takes its colours from the page, as charts do."""

from __future__ import annotations
