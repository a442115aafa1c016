"""What the site adds to Markdown that also reads well where the repository is hosted.

- The examples, CONTRIBUTING.md and CHANGELOG.md become pages; links to them lead there.
- A comment `<!-- source: examples/file.py name -->` becomes the source of that function or class.
- Nothing may be loaded from another host.
- The project's address, if it has one, is linked at the foot of each page. (Not as `repo_url`, for which the
  theme asks the host for numbers whenever a page is opened.)
- The figures become part of the page, so that they follow its palette and not the system's.
"""

import ast
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Files outside of docs/ -> the pages that they become.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"} | {
    f"examples/{path.name}": f"examples/{path.stem}.md" for path in EXAMPLES
}


def on_config(config: Any, **_: Any) -> Any:
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source")
    if address:
        source = {"icon": "material/source-repository", "link": address, "name": "Source"}
        config.extra["social"] = [source]
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for path in EXAMPLES:
        code = path.read_text()
        page = f"# {path.name}\n\n```python\n{code}```\n"
        files.append(File.generated(config, PAGES[f"examples/{path.name}"], content=page))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, PAGES[name], content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = os.path.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join("docs", here, found[1]))
        if target not in PAGES:
            return found[0]
        return f"]({os.path.relpath(PAGES[target], here or '.')})"

    markdown = re.sub(r"\]\((\.\./[\w./]+)\)", link, markdown)
    return re.sub(r"<!-- source: (\S+) (\w+) -->", lambda found: _source(found[1], found[2]), markdown)


def _source(file: str, name: str) -> str:
    """A function or class of a file, as a block of code."""
    code = (ROOT / file).read_text()
    node = next(node for node in ast.parse(code).body if getattr(node, "name", None) == name)
    return f"```python\n{ast.get_source_segment(code, node)}\n```"


def on_page_content(html: str, **_: Any) -> str:
    def figure(found: re.Match[str]) -> str:
        drawing = (ROOT / "docs" / "figures" / f"{found[1]}.svg").read_text()
        return f'<span class="scrolls">{drawing}</span>'

    return re.sub(r'<img[^>]*src="[^"]*figures/(\w+)\.svg"[^>]*>', figure, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^"> ]*)', output)
    if loaded:
        raise PluginError(
            f"{page.file.src_uri} loads {', '.join(loaded)}; the site must load nothing from other hosts"
        )
    return output
