"""Functions that MkDocs calls in a build: navigation, pages made from the sources, links that leave docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os.path import normpath, relpath
from pathlib import PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import write_file

from docs.site.notebooks import as_page
from docs.site.notebooks import pages as notebooks
from docs.site.pages import ROOT, catalogue, entries, libraries, made_pages
from docs.site.plain import joined, listed, plain
from megatron_run.contracts import KINDS

#: Pages that lie outside docs/, or go by another name there: path in the repository -> path in the site.
_MOVED: Mapping[str, str] = {
    "README.md": "index.md",
    "docs/index.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "cli/README.md": "command.md",
    "core/engine/README.md": "built-in-plugins.md",
    "plugins/data/indexed/README.md": "data-indexed.md",
    "plugins/format/huggingface/README.md": "huggingface.md",
    "plugins/format/megatron/README.md": "megatron-flags.md",
    "plugins/optimizer/deepspeed/README.md": "deepspeed.md",
    "benchmarks/README.md": "results/index.md",
    **{f"benchmarks/results/{page.name}": f"results/{page.name}" for page in ROOT.glob("benchmarks/results/*.md")},
}
#: These and the notebooks, each of which becomes a page.
_PAGES: Mapping[str, str] = {**_MOVED, **{str(file.relative_to(ROOT)): page for page, file in notebooks().items()}}
#: What the navigation has under other headings than the table of contents.
_PROJECT = ("index.md", "contents.md", "contributing.md", "agents.md", "changelog.md")
#: Files of the repository -> the page that is made from them, and the heading on it.
_MADE: Mapping[str, tuple[str, str]] = {
    **{
        f"core/kernel/src/megatron_run/contracts/{kind.replace('-', '_')}.py": (f"kinds/{kind}.md", "")
        for kind in KINDS
    },
    **{
        f"plugins/{kind}/{readme.parent.name}/README.md": ("plugins.md", f"#{kind}{readme.parent.name}")
        for kind in KINDS
        for readme in ROOT.glob(f"plugins/{kind}/*/README.md")
    },
}
_LINK = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_HEADING = re.compile(r"^## (?P<title>.+)$|\[(?P<name>[^\]]+)\]\((?P<page>[^)#:]+\.(?:md|ipynb))\)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the navigation: guides as the table of contents has them, then what is made from the sources."""
    # The names within a package alone: whole ones do not fit beside the page.
    pages = {each.name: {module: f"api/{module}.md" for module in entries(each)} for each in libraries()}
    api = [
        {name: [{module.removeprefix(f"{name}."): page} for module, page in own.items()]} for name, own in pages.items()
    ]
    config.nav = [
        {"Home": "index.md"},
        *_guides(),
        {"Kinds": ["kinds/index.md", *(f"kinds/{kind}.md" for kind in KINDS)]},
        {"Plugins": "plugins.md"},
        {"API": ["api/index.md", *api]},
        {"Measured": sorted((page for page in _MOVED.values() if page.startswith("results/")), key=_by_name)},
        {"Project": list(_PROJECT[1:])},
    ]
    return config


def _by_name(page: str) -> tuple[bool, str]:
    """The order of pages in a folder: what introduces them first."""
    return not page.endswith("/index.md"), page


def _guides() -> Iterator[dict[str, Any]]:
    """The pages that docs/index.md links to, in its order, under its headings, by the names that it gives them."""
    groups: dict[str, list[dict[str, str]]] = {}
    group = groups.setdefault("Guides", [])
    for match in _HEADING.finditer((ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        if match["title"]:
            group = groups.setdefault(match["title"], [])
        elif (page := _PAGES.get(normpath(f"docs/{match['page']}"), match["page"])) not in _PROJECT:
            group.append({match["name"]: page})
    return ({title: pages} for title, pages in groups.items() if pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the catalogue of plugins."""
    contents = files.get_file_from_path("index.md")
    assert contents is not None
    files.remove(contents)
    for source, path in _MOVED.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    for path, notebook in notebooks().items():
        text, pictures = as_page(notebook)
        files.append(File.generated(config, path, content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{PurePosixPath(path).parent}/{name}", content=picture))
    for path, text in (*made_pages(), ("plugins.json", catalogue())):
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links as they are in the repository into links of the site, or to the repository where it has an address."""
    source = next((old for old, new in _PAGES.items() if new == page.file.src_uri), f"docs/{page.file.src_uri}")
    if not (ROOT / source).is_file():  # made for the site
        return markdown
    here = PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = relpath((ROOT / source).parent / match["path"], ROOT)
        path = _PAGES.get(target, target.removeprefix("docs/"))
        path, heading = (path, "") if target in _PAGES else _MADE.get(target, (path, ""))
        if files.get_file_from_path(path) is not None:
            return f"{match['text']}({relpath(path, here)}{heading or match['anchor'] or ''})"
        if not (ROOT / target).exists():
            return match[0]  # a broken link: MkDocs says so
        if config.repo_url:
            return f"{match['text']}({config.repo_url.rstrip('/')}/blob/main/{target})"
        text = match["text"][1:-1]
        return f"`{text}`" if text.endswith(".py") else text

    return _outside_code(link, markdown)


def on_env(_env: Any, config: MkDocsConfig, files: Files) -> None:
    """Add what programs read first: a list of all pages, and all in one file, in the order of the navigation."""
    pages = [page for file in files.documentation_pages() if (page := file.page) is not None]
    ordered = [page for page in pages if page.previous_page is None]
    while (following := ordered[-1].next_page) is not None:
        ordered.append(following)
    contents = next(page.markdown or "" for page in pages if page.file.src_uri == "contents.md")
    summary, address = config.site_description or "", config.site_url or ""
    made = {
        "llms.txt": listed(contents, config.site_name, summary, address),
        "llms-full.txt": joined((page.file.src_uri, plain(page.markdown or "")) for page in ordered if _written(page)),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))


def on_post_page(_output: str, page: Page, config: MkDocsConfig) -> None:
    """Put the page's Markdown beside its HTML: first-run.md beside first-run/."""
    if _written(page):
        write_file(plain(page.markdown or "").encode(), str(PurePosixPath(config.site_dir, page.file.src_uri)))


def _written(page: Page) -> bool:
    """Whether the page is Markdown, and no file of another kind that a plugin shows."""
    return page.file.src_uri.endswith(".md")


def _outside_code(change: Any, markdown: str) -> str:
    """``markdown`` with ``change`` made to every link that stands in no block of code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(change, part) for part in parts)
