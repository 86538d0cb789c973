"""The runs that are resolved here differ in what is asked, and not in what is installed."""

from tests.kernel.installed_once import _installed_is_read_once

__all__ = ["_installed_is_read_once"]
