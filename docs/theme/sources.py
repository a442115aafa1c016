"""The pages' copies of code in examples/: `python docs/theme/sources.py` brings them up to date.

A page shows its whole code, so that it works wherever it is pasted. The examples hold the same code for the
tests. A comment `<!-- source: examples/file.py name other -->` stands above the copy of these functions or
classes.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPY = re.compile(
    r"(<!-- source: (\S+) ([\w ]+) -->\n)\n?(?:```python\n.*?^```\n)?", re.MULTILINE | re.DOTALL
)


def updated(page: str) -> str:
    """Returns the text of a page with the present code of the examples."""
    return COPY.sub(lambda found: f"{found[1]}\n```python\n{source(found[2], found[3].split())}\n```\n", page)


def source(file: str, names: list[str]) -> str:
    """Returns functions and classes of a file, two blank lines apart."""
    code = (ROOT / file).read_text()
    nodes = {getattr(node, "name", None): node for node in ast.parse(code).body}
    return "\n\n\n".join(str(ast.get_source_segment(code, nodes[name])) for name in names)


if __name__ == "__main__":
    for path in (ROOT / "docs").rglob("*.md"):
        if (text := updated(path.read_text())) != path.read_text():
            path.write_text(text)
            print("updated", path.relative_to(ROOT))
