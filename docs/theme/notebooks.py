"""Runs the notebooks of the site. Their sources are docs/notebooks/*.py, in jupytext's percent format."""

import functools
import os
import tempfile
from typing import Any

import jupytext
import nbformat
from drawings import inline
from nbclient import NotebookClient
from traitlets.config import Config

# Eight virtual devices on the CPU need 16 threads.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "NPROC": "32"}


@functools.cache
def run(source: str) -> Any:
    """Returns the notebook with its outputs. A cell that raises or warns raises here too."""
    notebook = jupytext.reads(source, fmt="py:percent")
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    with tempfile.TemporaryDirectory() as folder:  # of the kernel's sockets
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        client = NotebookClient(notebook, config=config, timeout=120, coalesce_streams=True)
        client.execute(env={**os.environ, **ENVIRONMENT})
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise RuntimeError(f"a notebook must not warn:\n{cell.source}\n\n{output.text}")
    return notebook


def file(source: str) -> str:
    """Returns the .ipynb file of a notebook that was run."""
    return nbformat.writes(run(source))


def page(source: str, name: str) -> str:
    """Returns the Markdown of a notebook that was run, with a link to the file `name`.ipynb."""
    title, *cells = run(source).cells
    heading, text = title.source.split("\n", 1)
    download = f"[Download this notebook]({name}.ipynb){{ .md-button }}"
    parts = [heading, text.strip(), download]
    for i, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [_shown(output, f"{name}-{i}") for output in cell.outputs]
    return "\n\n".join(parts) + "\n"


def _shown(output: Any, name: str) -> str:
    if output.output_type == "stream":
        return f"``` {{ .text .output }}\n{output.text}```"
    if "image/svg+xml" in output.data:
        return inline(output.data["image/svg+xml"], name)
    return f"``` {{ .text .output }}\n{output.data['text/plain']}\n```"
