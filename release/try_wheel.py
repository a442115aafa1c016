"""Runs the README's example with the package that is installed, which must be a wheel with its extension."""

import re
import sys
from importlib import metadata
from pathlib import Path

root = Path(__file__).parents[1]
sys.path = [entry for entry in sys.path if Path(entry).resolve() not in (root, root / "release")]
(example,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
names: dict = {}
exec(compile(example, "README.md", "exec"), names)

package, info = Path(names["jax_ep"].__file__), names["group"].info()
assert "site-packages" in package.parts, f"this is not the installed package but {package}"
assert info.implementation == "ffi", f"the wheel's extension cannot be used: {info.reason}"
assert float(names["value"]) < 0.35, f"the README's example did not learn: its loss is {names['value']}"

# release/index.py adds this module to the older version.
assert not (package.parent / "older.py").exists(), "the upgrade left a module of the older version"
required = metadata.requires("jax_ep") or []
extras_of_jax = metadata.metadata("jax").get_all("Provides-Extra") or []
for extra in ("cuda12", "cuda13"):
    (of_extra,) = [requirement for requirement in required if re.search(f"extra == .{extra}.$", requirement)]
    assert of_extra.startswith(f"jax[{extra}]"), f"the extra {extra} requires {of_extra}"
    assert extra in extras_of_jax, f"jax has no extra {extra}, only {extras_of_jax}"
print(f"Python {sys.version.split()[0]}, jax {names['jax'].__version__}: the README's example runs")
