from __future__ import annotations

from typing import Any

import pytest

from tests.support.interpreted import interpreted


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The results of the kernels of a file, which its function ``everything`` calls, by Triton's interpreter."""
    return interpreted(request.module.everything)
