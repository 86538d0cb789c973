"""Conformance suites for plugin authors: one a kind, each a tuple of named checks.

``<kind>_checks(...)`` takes what the plugin's factory makes, or a function that makes it where a kind needs a context,
and returns :class:`~megatron_run_testing.check.Check` objects. A check raises
:class:`~megatron_run_testing.check.CheckFailed`, saying where, when the contract is broken. With pytest::

    from megatron_run_testing.schedule import schedule_checks

    @pytest.mark.parametrize("check", schedule_checks(MySchedule()), ids=lambda check: check.name)
    def test_conforms(check):
        check.run()
"""
