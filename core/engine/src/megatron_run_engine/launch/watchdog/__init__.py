"""Watching ranks from outside their processes: each keeps a page of what it does, and a watcher reads all of them.

No part of it imports torch, and nothing of it runs in the training loop but the writing of the page.
"""
