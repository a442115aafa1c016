"""The README as a package index shows it: there are no files beside it, so its links need whole addresses.

They begin with the project's public address, `Source` among the `urls` in pyproject.toml. There is none yet;
until then the files' paths take the place of the links.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)]+)\)")


def dynamic_metadata(field: str, *_: Any) -> dict[str, str]:
    """As scikit-build-core asks for it, in the folder of pyproject.toml."""
    address = tomllib.loads(Path("pyproject.toml").read_text())["project"].get("urls", {}).get("Source")

    def whole(found: re.Match[str]) -> str:
        image, text, path = found.groups()
        if address is None:
            return f"{text} [{path}]"
        return f"{image}[{text}]({address.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{path})"

    return {"content-type": "text/markdown", "text": LINK.sub(whole, Path("README.md").read_text())}
