"""A folder on the import path in which a test installs the plugins that it needs."""

from tests.support.fake_plugins import site

__all__ = ["site"]
