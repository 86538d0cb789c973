"""Conformance suites for plugin authors: one per kind, each a tuple of named checks.

``<kind>_checks(...)`` takes the object that the plugin's factory creates or, for kinds that need a context, a function
that creates it. It returns :class:`~megatron_run_testing.check.Check` objects. If the contract is broken, a check
raises :class:`~megatron_run_testing.check.CheckFailed`, which states where. With pytest::

    from megatron_run_testing.schedule import schedule_checks

    @pytest.mark.parametrize("check", schedule_checks(MySchedule()), ids=lambda check: check.name)
    def test_conforms(check):
        check.run()
"""
