"""What the site adds to Markdown that also reads well where the repository is hosted.

- The examples, CONTRIBUTING.md and CHANGELOG.md become pages; links to them lead there.
- Nothing may be loaded from another host.
- The project's address, if it has one, is linked at the foot of each page. (Not as `repo_url`, for which the
  theme asks the host for numbers whenever a page is opened.)
- The notebooks are run, and become pages and files to download.
- The figures and plots become part of the page, so that they follow its palette and not the system's.
"""

import concurrent.futures
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import notebooks
from drawings import inline
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
# Files -> the pages that they become.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in EXAMPLES}
PAGES |= {f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS}


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
        content = (ROOT / name).read_text().replace("](docs/", "](")  # relative to docs/, where the page is
        files.append(File.generated(config, PAGES[name], content=content))
    sources = {path.stem: path.read_text() for path in NOTEBOOKS}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(notebooks.run, sources.values()))
    for name, source in sources.items():
        page = notebooks.page(source, name)
        files.append(File.generated(config, f"notebooks/{name}.md", content=page))
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=notebooks.file(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = os.path.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join("docs", here, found[1]))
        if target not in PAGES:
            return found[0]
        return f"]({os.path.relpath(PAGES[target], here or '.')})"

    return re.sub(r"\]\(([\w./]+)\)", link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    def drawing(found: re.Match[str]) -> str:
        path = ROOT / "docs" / f"{found[1]}.svg"
        return inline(path.read_text(), path.stem)

    name = r"(?:figures/|round_trip_|products_|fp8_)\w+"
    return re.sub(rf'<img[^>]*src="(?:\.\./)*({name})\.svg"[^>]*>', drawing, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^"> ]*)', output)
    if loaded:
        raise PluginError(
            f"{page.file.src_uri} loads {', '.join(loaded)}; the site must load nothing from other hosts"
        )
    return output
