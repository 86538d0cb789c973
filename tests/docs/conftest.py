"""The commands of a page find the same plugins, whichever they are."""

from tests.kernel.installed_once import _installed_is_read_once

__all__ = ["_installed_is_read_once"]
