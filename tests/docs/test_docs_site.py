"""The documentation as a site: it builds without a warning, and holds what is made from the sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest

from docs.site import hooks
from docs.site.docstrings import as_markdown
from docs.site.pages import libraries, plugins
from docs.site.plain import listed, plain
from megatron_run.contracts import KINDS
from tests.support.checkout import PLUGINS, ROOT

#: Addresses of the site that a builder may have set: a link would lead there, and not into this checkout.
ADDRESSES = ("SITE_URL", "REPOSITORY_URL")
#: Of tests that read the built site.
built = pytest.mark.nightly


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with no address and from this checkout alone.

    What no test reads, and takes a quarter of the time, is left out: the index of the search, and the breaks in lines
    of long signatures. In this process the plugins, and torch with them, are loaded already.
    """
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of libraries: what is wrong with the site is logged
        for name in ADDRESSES:
            patch.delenv(name, raising=False)
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
        config.plugins["material/search"].config["enabled"] = False
        config.plugins.on_startup(command="build", dirty=False)
        patch.setattr("black.format_str", lambda code, mode: code)
        build(config)
        config.plugins.on_shutdown()
    return folder


@built
def test_the_command_builds_the_site_with_its_search(tmp_path: Path) -> None:
    clean = {name: text for name, text in os.environ.items() if name not in ADDRESSES}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**clean, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "megatron_run_create_scaler" in found


@cache
class Read(HTMLParser):
    """What a page shows and fetches: its text, its headings' anchors, and the addresses that a browser loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self._shown, self.code, self.anchors, self.fetched = list[str](), list[str](), set[str](), list[str]()
        self._last = ""
        self.feed(page.read_text(encoding="utf-8"))
        self.text = "".join(self._shown)

    def handle_data(self, data: str) -> None:
        self._shown.append(data)
        if self._last == "code":
            self.code.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self._last = tag
        self.anchors.add(told.get("id") or "")
        if tag in ("script", "img", "link") and told.get("rel") != "canonical":
            self.fetched.append(told.get("src") or told.get("href") or "")


@built
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_a_page_with_its_hook_and_contract(site: Path, kind: str) -> None:
    word = kind.replace("-", "_")
    page = Read(site / "kinds" / kind / "index.html")
    assert f"megatron_run.hookspecs.megatron_run_create_{word}" in page.anchors
    assert any(anchor.startswith(f"megatron_run.contracts.{word}.") for anchor in page.anchors)
    assert all(plugin.distribution in page.text for plugin in plugins() if plugin.info.kind == kind)


@built
def test_the_page_of_plugins_shows_all_of_this_repository(site: Path) -> None:
    assert {member.name for member in PLUGINS} < {plugin.distribution for plugin in plugins()}
    page = Read(site / "plugins" / "index.html")
    assert all(str(plugin) in page.text and plugin.summary.split("`")[0] in page.text for plugin in plugins())
    assert "schedule.group_size" in page.text


@built
def test_every_library_has_its_reference(site: Path) -> None:
    for library in libraries():
        page = Read(site / "api" / library.name / "index.html")
        assert library.name in page.text
    contract = Read(site / "api" / "megatron_run.contracts" / "index.html")
    assert "megatron_run.contracts.plugin.PluginInfo" in contract.anchors


@built
def test_the_words_of_a_contract_are_shown_with_their_fields(site: Path) -> None:
    assert "microbatch: int" in " ".join(Read(site / "kinds" / "schedule" / "index.html").text.split())


@built
def test_a_notebook_is_a_page_with_its_outputs_and_the_file(site: Path) -> None:
    page = Read(site / "notebooks" / "first_model" / "index.html")
    assert "result.plot()" in page.text
    assert ", below the token bigram's" in page.text
    pictures = [site / "notebooks" / "first_model" / address for address in page.fetched if address.endswith(".svg")]
    assert len(pictures) == 2
    assert all("<svg" in picture.read_text(encoding="utf-8") for picture in pictures)
    assert (site / "notebooks" / "first_model.ipynb").is_file()
    assert 'href="../first_model.ipynb"' in (site / "notebooks" / "first_model" / "index.html").read_text("utf-8")


@built
def test_no_page_shows_the_marks_of_docstrings(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r":(class|func|meth|mod|attr|exc|data):`", Read(page).text), page


@built
def test_the_front_page_is_the_readme(site: Path) -> None:
    page = Read(site / "index.html")
    assert "make run" in page.text
    assert "](" not in page.text
    assert "`hookspecs.py`" not in page.text
    assert "hookspecs.py" in page.code


@built
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not [address for address in Read(page).fetched if re.match(r"(https?:)?//", address)], page
    assert not [file for file in site.rglob("*.css") if re.search(r"@import|url\(\s*['\"]?https?:", file.read_text())]


@built
def test_every_page_is_markdown_too_whose_links_lead_somewhere(site: Path) -> None:
    written = set(site.rglob("*.md"))
    made = [page.parent for folder in ("api", "kinds") for page in (site / folder).glob("*/index.html")]
    assert {page.with_name(f"{page.name}.md") for page in made} < written
    assert {site / page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")} < written
    for page in written:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^:::|^<!-- \[\[\[", text, re.MULTILINE), page
        lost = [path for path in relative_links(text) if not (page.parent / path).exists()]
        assert not lost, page
    assert "class Schedule(ABC):" in (site / "kinds" / "schedule.md").read_text(encoding="utf-8")


@built
def test_programs_find_a_list_of_the_pages_and_all_in_one_file(site: Path) -> None:
    found, whole = ((site / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    assert found.startswith("# megatron-run\n\n> Train transformer")
    links = relative_links(found)
    assert not [path for path in links if not (site / path).is_file()]
    pages = re.findall(r"^<!-- page: (\S+) -->$", whole, re.MULTILINE)
    assert pages[:2] == ["index.md", "first-run.md"]
    assert {path for path in links if path.endswith(".md")} <= {*pages, "api/index.md"}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {*pages}
    assert all((site / page).read_text(encoding="utf-8").strip() in whole for page in pages)


def relative_links(markdown: str) -> list[str]:
    """The files that ``markdown`` links to, but for those that its code shows."""
    told = re.sub(r"^```.*?^```$|`[^`\n]+`", "`", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", told)


def test_the_list_for_programs_is_the_table_of_contents() -> None:
    contents = "# Documentation\n\nAll.\n\n## Start\n\n1. [A](a.md): first\n\n## More\n\n- [B](b/c.md#d)\n\n`x` ends.\n"
    made = listed(contents, "name", "It trains.", "https://x.org/y/")
    assert made.startswith("# name\n\n> It trains.\n\n")
    assert "](https://x.org/y/llms-full.txt)" in made
    assert "\n## Start\n\n- [A](https://x.org/y/a.md): first\n\n## More\n\n" in made
    assert "\n- [B](https://x.org/y/b/c.md#d)\n\n## Reference\n" in made
    assert "[B](b/c.md#d)" in listed(contents, "name", "It trains.", "")


def test_programs_read_declarations_without_bodies_and_private_names() -> None:
    page = "<!-- [[[cog x ]]] -->\n\n# a\n\n::: docs_site_example\n    options:\n      x: y\n\nb\n"
    source = "import re\n_X = 1\nY: int = 2\n\ndef f(a: int) -> int:\n    'Doc.'\n    return a\n\ndef _g(): ...\n"
    with mock.patch("docs.site.plain.source_of", return_value=mock.Mock(read_text=lambda encoding: source)):
        made = plain(page)
    assert made.startswith("# a\n\n`docs_site_example`:\n\n```python\nimport re\nY: int = 2\n\ndef f(a: int) -> int:\n")
    assert made.endswith("    'Doc.'\n```\n\nb\n".replace("'Doc.'", '"""Doc."""'))


def test_roles_and_literal_blocks_become_markdown() -> None:
    assert as_markdown("A :class:`~a.b.C` and :meth:`D.e`. Example::\n\n    x") == "A `C` and `e`. Example:\n\n    x"
    assert as_markdown("``name::``, a:: b") == "``name::``, a:: b"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[a](../README.md#x) [b](https://x.org) [c](#y)", "[a](index.md#x) [b](https://x.org) [c](#y)"),
        ("[`t`](../core/kernel/pyproject.toml)", "[`t`](https://x.org/y/blob/main/core/kernel/pyproject.toml)"),
        ("[gone](../no-such-file)", "[gone](../no-such-file)"),
        ("[s](../core/kernel/src/megatron_run/contracts/scaler.py)", "[s](kinds/scaler.md)"),
        ("[z](../plugins/optimizer/zero1/README.md)", "[z](plugins.md#optimizerzero1)"),
        ("[z](../plugins/optimizer/zero1/README.md#no-heading-there)", "[z](plugins.md#optimizerzero1)"),
        ("[n](notebooks/first_model.ipynb)", "[n](notebooks/first_model.md)"),
        ("```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_that_leave_the_docs_lead_somewhere(line: str, expected: str) -> None:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

    config = MkDocsConfig()
    config.load_dict({"site_name": "x", "repo_url": "https://x.org/y"})
    config.validate()
    names = ("design.md", "index.md", "plugins.md", "kinds/scaler.md", "notebooks/first_model.md")
    here, *others = (File(name, None, "site", use_directory_urls=True) for name in names)
    page, files = Page(None, here, config), Files([here, *others])
    assert hooks.on_page_markdown(line, page, config, files) == expected
