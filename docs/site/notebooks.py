"""The notebooks of docs/notebooks as pages: their texts, cells and stored outputs. No cell runs."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "notebooks"


def pages() -> dict[str, Path]:
    """The path in the site of each notebook's page -> the notebook."""
    return {f"notebooks/{file.stem}.md": file for file in sorted(FOLDER.glob("*.ipynb"))}


def as_page(file: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook, and its pictures by their names beside the page."""
    from nbconvert import MarkdownExporter  # a second, which most tests of the site do without

    markdown, found = MarkdownExporter().from_filename(str(file), {"unique_key": file.stem})
    title, _, rest = markdown.partition("\n\n")
    link = f'<a href="../{file.name}" download>notebook</a>'  # no link of Markdown, which would lead to this page
    return f"{title}\n\nThis page is a {link}.\n\n{rest}", dict(found["outputs"])
