"""The output of the commands, as text and as data: lists, explanations, drawings, the dry run.

A report may import the kernel, and the engine inside the function that needs it; nothing imports a report but a
command, another report, and the tests.
"""
