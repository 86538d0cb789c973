"""The Hugging Face Hub, by its library ``huggingface_hub``, which only what uses the Hub imports.

``names`` has the grammar of ``hf:ORG/NAME@REVISION``, ``wanted`` which files of a repository are read, ``download``
gets them into the library's cache, ``upload`` sends a folder, ``failures`` has each failure in one line. Nothing that
is fetched is executed: what a repository holds besides is not even fetched. A token comes from the library's own places
(``hf auth login``, ``HF_TOKEN``), and is never shown or written by us.
"""
